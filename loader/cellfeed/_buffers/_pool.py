"""Memory that is reused as soon as nothing refers to it any longer."""

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError

__all__ = ["Buffer", "BufferPool", "Bytes", "Lease", "array_at", "locked", "sizes_replaced"]

Bytes = NDArray[np.uint8]

_SMALLEST = 1 << 12
_CLASSES_OF_A_DOUBLING = 4  # few, so that minibatches of much the same size take the same piece


class BufferPool:
    """Allocates pieces of memory, and reuses each when the last array over it is gone.

    Keeping a minibatch keeps only its own memory; dropping it makes the memory available to the
    next fetch, without the system calls and page faults that new memory costs. All methods may be
    called from any thread.

    Examples
    --------
    >>> pool = BufferPool()
    >>> numbers = pool.acquire(10_000).array(np.dtype("int32"), 2_500)
    >>> address = numbers.ctypes.data
    >>> del numbers
    >>> pool.acquire(9_900).address == address
    True
    """

    def __init__(self) -> None:
        self._leased = set[Lease]()
        self._returned = deque[Lease]()  # appending is atomic, so that returning needs no lock
        self._free: dict[int, list[Bytes]] = {}
        self._process = os.getpid()

    def acquire(self, n_bytes: int) -> "Buffer":
        """Return memory of at least ``n_bytes``, not initialised."""
        capacity = _round_up(n_bytes)
        with _lock:
            self._collect()
            memory = self._take(capacity)
        buffer = Buffer(memory)
        self._leased.add(Lease(buffer, self._returned, memory))
        return buffer

    def _collect(self) -> None:
        if self._process != os.getpid():
            self._process, self._free = os.getpid(), {}  # it is the parent's, to be copied
        while self._returned:
            leased = self._returned.popleft()
            self._leased.discard(leased)
            self._free.setdefault(leased.memory.size, []).append(leased.memory)

    def _take(self, capacity: int) -> Bytes:
        """Return free memory, or new memory."""
        if self._free.get(capacity):
            return self._free[capacity].pop()
        fitting = [size for size, free in self._free.items() if free and size >= capacity]
        if fitting and min(fitting) <= 2 * capacity:
            return self._free[min(fitting)].pop()
        for size in sizes_replaced(self._free, capacity):
            self._free[size].pop()
        return _map(capacity)

    def __reduce__(self) -> tuple[type["BufferPool"], tuple[()]]:
        return BufferPool, ()  # memory does not travel


_lock = threading.Lock()  # of all pools, for a moment each


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of all pools."""
    with _lock:
        yield


def sizes_replaced(free: Mapping[int, Sequence[object]], n_bytes: int) -> Iterator[int]:
    """Yield sizes of free pieces that new memory replaces; the caller removes each.

    The memory that is kept for reuse must not grow. A piece of similar size is replaced one for
    one.
    """
    replaced = 0
    while 2 * replaced < n_bytes:
        largest = max((size for size, pieces in free.items() if pieces), default=0)
        if not largest:
            return
        yield largest
        replaced += largest


def _enter_process() -> None:
    """Reset in a forked process, since a thread of the parent may hold the lock."""
    global _lock  # noqa: PLW0603 - a lock cannot be taken from a thread
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_enter_process)


class Buffer:
    """A piece of pooled memory, which returns to the pool with the last array over it.

    Parameters
    ----------
    memory
        The piece.
    """

    __slots__ = ("__weakref__", "_memory", "address")

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.address: int = memory.__array_interface__["data"][0]  # `ctypes` takes longer

    def array(self, dtype: np.dtype[Any], n: int, *, start: int = 0) -> NDArray[Any]:
        """Return ``n`` elements from byte ``start`` on, as an array that keeps the buffer alive."""
        return np.asarray(_Base(self, dtype, n, self.address + start))


class Lease(weakref.ref[Buffer]):
    """A weak reference to a buffer, and its memory.

    When the buffer is gone, `deque.append` returns this to the pool. That is C code, unlike a
    destructor, in which Ctrl-C would be printed and ignored.
    """

    __slots__ = ("memory",)

    def __new__(cls, buffer: Buffer, returned: deque["Lease"], memory: Bytes) -> Self:  # noqa: ARG004
        return super().__new__(cls, buffer, returned.append)

    def __init__(self, buffer: Buffer, returned: deque["Lease"], memory: Bytes) -> None:  # noqa: ARG002
        self.memory = memory


class _Base:
    """The base object of an array over pooled memory."""

    __slots__ = ("__array_interface__", "_buffer")

    size = 0  # SciPy copies arrays that are much smaller than their base says to be

    def __init__(self, buffer: Buffer | None, dtype: np.dtype[Any], n: int, address: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (n,),
            "typestr": dtype.str,
        }
        if dtype.names is not None:
            self.__array_interface__["descr"] = dtype.descr
        self._buffer = buffer


def array_at(address: int, dtype: np.dtype[Any], n: int) -> NDArray[Any]:
    """Return an array over memory that its caller keeps alive.

    Parameters
    ----------
    address
        Address of the array.
    dtype, n
        Dtype and number of its elements.
    """
    return np.asarray(_Base(None, dtype, n, address))


def _map(capacity: int) -> Bytes:
    """Return memory from the system, to which it returns when nothing refers to it any longer.

    Memory from the heap would not: pieces of this size, allocated and freed by changing threads,
    fragment it. It is private, since another process may be forked.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return np.frombuffer(mmap.mmap(-1, capacity, flags=private), np.uint8)
    except (OSError, OverflowError) as error:
        msg = (
            f"cannot allocate {capacity:,} bytes of memory for rows ({error}); read fewer at "
            "a time, for example with a lower `fetch_factor`"
        )
        raise ParameterError(msg) from error


def _round_up(n_bytes: int) -> int:
    """Return a capacity at most a quarter above ``n_bytes``, so that equal sizes recur.

    Pages that are not written to take no memory.
    """
    if n_bytes <= _SMALLEST:
        return _SMALLEST
    step = (1 << (n_bytes - 1).bit_length()) // (2 * _CLASSES_OF_A_DOUBLING)
    return -(-n_bytes // step) * step
