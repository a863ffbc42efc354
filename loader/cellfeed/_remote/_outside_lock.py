"""Reading several files with h5py concurrently, although h5py locks all of HDF5 while it reads.

A read is tried with the pages that are present. If one is missing, the attempt ends, the page is
fetched without the lock, and the read is tried again. So pages of many files are fetched
concurrently.
"""

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["MissingError", "at_end", "brings_outside", "opened_outside", "outside_lock"]

_Read = TypeVar("_Read")
_File = TypeVar("_File")


class _Local(threading.local):
    is_on = False
    files: dict[object, object] | None = None
    at_end: dict[object, Callable[[], None]] | None = None


_local = _Local()


class Bringing(Protocol):
    """Knows which pages are missing."""

    def __call__(self) -> bool:
        """Fetch them; return whether they will still be present at the next attempt."""
        ...


class MissingError(BaseException):
    """Pages are missing; not an `Exception`, so that nobody mistakes it for damage."""

    def __init__(self, bring: Bringing) -> None:
        super().__init__()
        self.bring = bring


def brings_outside() -> bool:
    """Return whether this thread fetches pages without the lock of h5py."""
    return _local.is_on


def at_end(key: object, call: Callable[[], None]) -> None:
    """Call a function once this thread has finished its read outside the lock."""
    if _local.at_end is not None:
        _local.at_end[key] = call


def opened_outside(key: object, make: Callable[[], _File]) -> _File:
    """Return a file that an earlier attempt of this thread opened, so that its pages are kept."""
    if _local.files is None:
        return make()
    if key not in _local.files:
        _local.files[key] = make()
    found: _File = _local.files[key]  # type: ignore[assignment]
    return found


def outside_lock(read: Callable[[], _Read]) -> _Read:
    """Read, and fetch missing pages without the lock of h5py.

    Parameters
    ----------
    read
        Called again after each time that pages were missing, so it must have no side effects then.
    """
    if _local.files is not None:
        return read()
    _local.files, _local.is_on = {}, True
    _local.at_end = {}
    try:
        while True:
            try:
                return read()
            except MissingError as missing:
                # Pages beyond the limit are fetched one after the other, under the lock.
                _local.is_on = missing.bring()
    finally:
        ended, _local.at_end = _local.at_end, None
        _local.files, _local.is_on = None, False
        for call in ended.values():
            call()
