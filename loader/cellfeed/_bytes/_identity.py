"""What tells that a file is still the one that was opened, and the words for when it is not."""

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cellfeed._bytes._location import Location
from cellfeed._errors import FormatError, PathError

__all__ = [
    "Identity",
    "LastingIdentity",
    "digest_of",
    "identity",
    "lasting_identity",
    "removed",
    "replaced",
]

Identity = tuple[int, int]  # bytes, and time of the last change in ns

_SETTLED_NS = 10 * 10**9


def identity(found: os.stat_result) -> Identity:
    """Return what of a file changes when its content does."""
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class LastingIdentity:
    """What tells files from others of the same names, for longer than a process lives.

    Parameters
    ----------
    digest
        Of their names, sizes, and times of change.
    is_settled
        Whether none of them changed in the last ten seconds.
    """

    digest: str
    is_settled: bool


def lasting_identity(found: Iterable[tuple[str, os.stat_result]]) -> LastingIdentity:
    """Return the identity of files.

    Beside size and time of the last change (as `identity` has them) it holds the time at which
    the system last changed what it knows of the file, which no program can set. So it notices
    what is written in place, and another file that was put there, also one of the same size
    whose time was set back, as ``cp -p``, ``rsync -t`` and ``tar`` do; a file that was only
    given another name or permissions counts as another one, too.

    It cannot notice two changes between two ticks of the file system's clock, of which some
    count whole seconds, or while that clock goes back. Therefore a file that has just changed,
    by this machine's clock, or that will have been changed in the future, is not settled: it may
    be in the midst of being written. A server whose clock is late by more than ten seconds, and
    changes below the file system, are not noticed.

    Parameters
    ----------
    found
        Names and states of files, always in the same order.
    """
    digest, newest = hashlib.blake2b(digest_size=16), 0
    for name, state in found:
        digest.update(f"{name}\0{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}\n".encode())
        newest = max(newest, state.st_mtime_ns)
    return LastingIdentity(digest.hexdigest(), time.time_ns() - newest > _SETTLED_NS)


def digest_of(*parts: str) -> str:
    """Return a digest of texts, for `LastingIdentity`."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def removed(path: Path | Location) -> PathError:
    """Return the error for a file that is no longer there."""
    return PathError(f"{path}: was removed since it was opened; put it back")


def replaced(path: Path | Location) -> FormatError:
    """Return the error for a file that is another one now."""
    return FormatError(f"{path}: was replaced or written to since it was opened; open it again")
