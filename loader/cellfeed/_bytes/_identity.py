"""What tells that a file is still the one that was opened, and the words for when it is not."""

import os
from pathlib import Path

from cellfeed._errors import FormatError, PathError

__all__ = ["Identity", "identity", "removed", "replaced"]

Identity = tuple[int, int]  # bytes, and time of the last change in ns


def identity(found: os.stat_result) -> Identity:
    """Return what of a file changes when its content does."""
    return found.st_size, found.st_mtime_ns


def removed(path: Path) -> PathError:
    """Return the error for a file that is no longer there."""
    return PathError(f"{path}: was removed since it was opened; put it back")


def replaced(path: Path) -> FormatError:
    """Return the error for a file that is another one now."""
    return FormatError(f"{path}: was replaced or written to since it was opened; open it again")
