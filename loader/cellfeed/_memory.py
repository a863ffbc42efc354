"""Memory that is used again as soon as nothing refers to it any more."""

import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MemoryPool"]

Bytes = NDArray[np.uint8]

_SMALLEST = 1 << 12
_CLASSES_OF_A_DOUBLING = 8


class MemoryPool:
    """Lends pieces of memory, and takes each back when the last array over it is gone.

    Whoever keeps a minibatch keeps its memory and that alone; whoever drops it gives the memory
    to the next fetch, without the system calls and page faults that new memory costs. May be
    called from any thread.

    Examples
    --------
    >>> pool = MemoryPool()
    >>> first = pool.take(10_000)
    >>> address = first.ctypes.data
    >>> del first
    >>> pool.take(9_900).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._returned = deque[Bytes]()  # appending is atomic, so that returning needs no lock
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> Bytes:
        """Return memory of at least ``n_bytes``, uint8, not initialised."""
        capacity = _round_up(n_bytes)
        with self._lock:
            self._collect()
            memory = self._find(capacity)
        if memory is None:
            memory = np.empty(capacity, np.uint8)
        return np.asarray(_Loan(memory, self._returned))

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._free.setdefault(memory.size, []).append(memory)

    def _find(self, capacity: int) -> Bytes | None:
        fitting = [size for size, free in self._free.items() if free and size >= capacity]
        if fitting and min(fitting) <= 2 * capacity:
            return self._free[min(fitting)].pop()
        # What is kept for later must not grow: new memory takes the place of some that is free.
        free = [size for size, free in self._free.items() if free]
        freed = 0
        while free and freed < capacity:
            size = max(free)
            self._free[size].pop()
            freed += size
            free = [size for size, free in self._free.items() if free]
        return None


class _Loan:
    """What an array over borrowed memory refers to; the memory returns when it is gone."""

    __slots__ = ("__array_interface__", "_memory", "_returned")

    def __init__(self, memory: Bytes, returned: deque[Bytes]) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
        self._memory = memory
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._memory)


def _round_up(n_bytes: int) -> int:
    """Return a capacity at most an eighth above ``n_bytes``, so that sizes meet again."""
    if n_bytes <= _SMALLEST:
        return _SMALLEST
    step = (1 << (n_bytes - 1).bit_length()) // (2 * _CLASSES_OF_A_DOUBLING)
    return -(-n_bytes // step) * step
