"""Memory that a device may write to while the process forks."""

import ctypes
import mmap
import weakref
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import BufferPool

__all__ = ["memory_for_devices", "pool_for_devices"]

_WIPE_ON_FORK = 18  # of Linux since 4.14; `mmap` has no name for it
_ROUNDED_TO = 1 << 20
_last: "weakref.ref[BufferPool] | None" = None


def pool_for_devices() -> BufferPool:
    """Return the pool shared by all direct reads, which is freed with the last of them."""
    global _last  # noqa: PLW0603 - it is that of the process
    pool = None if _last is None else _last()
    if pool is None:
        pool = BufferPool()
        _last = weakref.ref(pool)
    return pool


def memory_for_devices(pool: BufferPool, n_bytes: int) -> NDArray[np.uint8]:
    """Return page-aligned memory, uint8, shape (n,) where n is at least ``n_bytes``.

    After a fork, parent and child share the pages of private memory until one of them writes; what
    a device writes meanwhile may end up in either (see NOTES of open(2)). The child therefore
    does not inherit this memory: its pages are zero there.
    """
    n = -(-n_bytes // _ROUNDED_TO) * _ROUNDED_TO
    buffer = pool.acquire(n)
    if _madvise()(buffer.address, n, _WIPE_ON_FORK) == 0:
        return buffer.array(np.dtype(np.uint8), n)
    shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, n, flags=shared), np.uint8)


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return madvise
