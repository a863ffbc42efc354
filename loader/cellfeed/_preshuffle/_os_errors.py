"""Errors of the system, such as a full disk, as Python's `OSError`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["os_errors"]


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Add the path to errors of zarr, and convert those of zarrs to `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except RuntimeError as error:  # of zarrs
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
