"""Identities of files, to notice changes after they were opened, and the error messages."""

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
    "broken_link",
    "digest_of",
    "identity",
    "lasting_identity",
    "removed",
    "replaced",
]

Identity = tuple[int, int]  # bytes, and time of the last change in ns

_SETTLED_NS = 10 * 10**9


def identity(found: os.stat_result) -> Identity:
    """Return the properties of a file that change with its content."""
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class LastingIdentity:
    """An identifier of files with given names that is valid across processes.

    Parameters
    ----------
    digest
        Digest of their names, sizes and times of change.
    is_settled
        Whether none of them changed in the last ten seconds.
    """

    digest: str
    is_settled: bool


def lasting_identity(found: Iterable[tuple[str, os.stat_result]]) -> LastingIdentity:
    """Return the identity of files.

    In addition to size and modification time (see `identity`), it includes the change time of the
    inode, which no program can set. It therefore notices writes in place and replaced files, even
    those of the same size with a preserved modification time, as by ``cp -p``, ``rsync -t`` and
    ``tar``; a file that was only renamed, or whose permissions changed, also counts as another one.

    It cannot notice two changes within one tick of the file system's clock, which may be a whole
    second, or while that clock goes back. Therefore a file that has just changed, by this machine's
    clock, or has a change time in the future, is not settled: it may still be being written.
    Changes are not noticed if the clock of a server is late by more than ten seconds, or if they
    are made below the file system.

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


def broken_link(path: Path) -> PathError:
    """Return the error for a link to a file that is missing."""
    return PathError(f"{path}: is a link to {path.readlink()}, which is missing; put it there")


def removed(path: Path | Location) -> PathError:
    """Return the error for a file that was removed."""
    return PathError(f"{path}: was removed since it was opened; put it back")


def replaced(path: Path | Location) -> FormatError:
    """Return the error for a file that was replaced."""
    return FormatError(f"{path}: was replaced or written to since it was opened; open it again")
