"""Reading through h5py of several files at once, though it locks all of HDF5 while it reads.

What is read is tried with the pages that are there. Where one is missing, the attempt ends, the
page is brought without the lock, and it is tried again: so pages of many files are on their way
side by side.
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
    """What knows which pages are missing."""

    def __call__(self) -> bool:
        """Bring them; return whether they will still be there when it is tried again."""
        ...


class MissingError(BaseException):
    """Pages are missing; not an error, so that nobody takes it for damage."""

    def __init__(self, bring: Bringing) -> None:
        super().__init__()
        self.bring = bring


def brings_outside() -> bool:
    """Return whether this thread brings pages without the lock of h5py."""
    return _local.is_on


def at_end(key: object, call: Callable[[], None]) -> None:
    """Have a function called once this thread has read what it reads outside the lock."""
    if _local.at_end is not None:
        _local.at_end[key] = call


def opened_outside(key: object, make: Callable[[], _File]) -> _File:
    """Return a file that earlier attempts of this thread have made, so that its pages are there."""
    if _local.files is None:
        return make()
    if key not in _local.files:
        _local.files[key] = make()
    found: _File = _local.files[key]  # type: ignore[assignment]
    return found


def outside_lock(read: Callable[[], _Read]) -> _Read:
    """Read, and bring pages that are missing without the lock of h5py.

    Parameters
    ----------
    read
        Called again after each time that pages were missing, so it leaves nothing behind then.
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
                # More than there is room for is brought one after the other, under the lock.
                _local.is_on = missing.bring()
    finally:
        ended, _local.at_end = _local.at_end, None
        _local.files, _local.is_on = None, False
        for call in ended.values():
            call()
