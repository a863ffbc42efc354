"""Memory pools, and destinations in memory that is not allocated yet."""

import contextlib
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.bytes._store import closed_with

# Memory that is reused as soon as nothing refers to it any longer.

Bytes = NDArray[np.uint8]
_Free = TypeVar("_Free")

_SMALLEST = 1 << 12
_CLASSES_OF_A_DOUBLING = 4  # few, so that minibatches of much the same size take the same piece


class BufferPool:
    """Allocates pieces of memory, and reuses each when the last array over it is gone.

    Keeping a minibatch keeps the memory of its elements, not that of other minibatches. Dropping it
    makes the memory available to the next fetch, without the system calls and page faults that new
    memory costs. All methods may be called from any thread.

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
        found = _fitting(self._free, capacity)
        if found is not None:
            return found
        for size in _sizes_replaced(self._free, capacity):
            self._free[size].pop()
        return np.frombuffer(mapped(capacity), np.uint8)

    def __reduce__(self) -> tuple[type["BufferPool"], tuple[()]]:
        return BufferPool, ()  # memory does not travel


_lock = threading.Lock()  # of all pools, for a moment each


def _fitting(free: Mapping[int, list[_Free]], n_bytes: int) -> _Free | None:
    """Remove and return a free piece of about this size, if there is one; the smallest."""
    size = min((each for each, some in free.items() if some and each >= n_bytes), default=0)
    return free[size].pop() if n_bytes <= size <= 2 * n_bytes else None


def _sizes_replaced(free: Mapping[int, Sequence[object]], n_bytes: int) -> Iterator[int]:
    """Yield sizes of free pieces that new memory replaces; the caller removes each.

    The memory that is retained for reuse must not grow. A piece of similar size is replaced one
    for one.
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


def mapped(capacity: int, how: int = mmap.MAP_PRIVATE) -> mmap.mmap:
    """Return memory from the system, to which it returns when nothing refers to it any longer.

    Memory from the heap would not: pieces of this size, allocated and freed by changing threads,
    fragment it. It is private by default, since another process may be forked.
    """
    try:
        return mmap.mmap(-1, capacity, flags=how | mmap.MAP_ANONYMOUS)
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


# Memory that two processes share: pieces of one size, each with a mark while it is lent.

PAGE = 4096
MOST_PIECES = PAGE  # of one segment: a byte each in its first page


def can_lend() -> bool:
    """Whether the system has memory that can be passed to another process by descriptor."""
    return hasattr(os, "memfd_create")


class SharedFile:
    """A file in memory, without a name, of which processes map segments.

    The system frees it with the last process that has it open or mapped, however that ends. It can
    be passed to a process that starts.

    Parameters
    ----------
    descriptor
        Of a file that exists; a new one if None.
    label
        What the system shows for a new one.
    """

    def __init__(self, descriptor: int | None = None, *, label: str = "cellfeed") -> None:
        if descriptor is None:
            descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
        self.descriptor, self._closing = descriptor, closed_with(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _passed_file, (DupFd(self.descriptor),)

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all segments; a page takes memory when it is first written to."""
        return os.fstat(self.descriptor).st_size

    def map(self, place: "SegmentPlace") -> mmap.mmap:
        """Map a segment, which is added unless it is there.

        Raises
        ------
        OSError
            There is no memory or no descriptor left for it.
        """
        n_bytes = PAGE + place.piece_bytes * place.n_pieces
        if place.start == self.n_bytes:
            os.ftruncate(self.descriptor, place.start + n_bytes)
        return mmap.mmap(self.descriptor, n_bytes, offset=place.start)

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return all memory to the system but that of some ranges of bytes: start, and length."""
        end, n_bytes = 0, self.n_bytes
        with contextlib.suppress(OSError, ValueError):  # where it cannot, it is retained
            whole = mmap.mmap(self.descriptor, n_bytes)
            for start, n in [*sorted(ranges), (n_bytes, 0)]:
                if start > end:
                    whole.madvise(mmap.MADV_REMOVE, end, start - end)
                end = start + n


def _passed_file(descriptor: Any) -> SharedFile:
    return SharedFile(descriptor.detach())


class SegmentPlace(NamedTuple):
    """Where a segment begins in its file, the size of its pieces, and how many there are.

    The size is a multiple of `PAGE`, and there are at most `MOST_PIECES`.
    """

    start: int
    piece_bytes: int
    n_pieces: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece of a segment that this process has mapped.

    Parameters
    ----------
    segment, place
        The memory of the segment, and its place in its file.
    index
        Number of the piece.
    """

    segment: mmap.mmap
    place: SegmentPlace
    index: int

    @property
    def start(self) -> int:
        """Its first byte in the segment."""
        return PAGE + self.index * self.place.piece_bytes

    @property
    def memory(self) -> Bytes:
        """Its bytes, which keep the segment."""
        return np.frombuffer(self.segment, np.uint8, self.place.piece_bytes, self.start)

    @property
    def is_lent(self) -> bool:
        """Whether the other process has it, which clears this mark."""
        return self.segment[self.index] != 0

    def mark(self, *, is_lent: bool) -> None:
        """Set or clear the mark."""
        self.segment[self.index] = is_lent

    def discard(self) -> None:
        """Return its memory to the system; it is zero when used again."""
        with contextlib.suppress(OSError):  # on a system that cannot, it is retained
            self.segment.madvise(mmap.MADV_REMOVE, self.start, self.place.piece_bytes)


# Destinations in memory that is not allocated yet.
#
# The reads of a fetch are planned while the previous fetch is still being decoded, and memory is
# allocated only when it is needed. Until then, a destination is the number of a group of rows, such
# as a minibatch, and a byte offset into the future memory of that group.

_OFFSET_BITS, _GROUP_BITS = 40, 23  # 1 TiB in a group, and 8 million groups


def destination(groups: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return destinations ``offsets`` bytes into the memory of ``groups``.

    Raises
    ------
    ParameterError
        A destination does not fit into 63 bits.
    """
    if offsets.max(initial=0) >> _OFFSET_BITS or groups.max(initial=0) >> _GROUP_BITS:
        msg = (
            f"a fetch has at most {1 << _GROUP_BITS:,} minibatches of at most "
            f"{1 << _OFFSET_BITS:,} bytes; give a smaller `fetch_factor` or `batch_size`"
        )
        raise ParameterError(msg)
    return (groups << _OFFSET_BITS) | offsets


def groups_of(destinations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the groups of destinations."""
    return destinations >> _OFFSET_BITS


def bind(destinations: NDArray[np.int64], bases: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the addresses of destinations, with the memory of group ``k`` at ``bases[k]``.

    Examples
    --------
    >>> bind(destination(np.array([0, 1]), np.array([8, 16])), np.array([1000, 2000])).tolist()
    [1008, 2016]
    """
    addresses: NDArray[np.int64] = bases[groups_of(destinations)] + (
        destinations & ((1 << _OFFSET_BITS) - 1)
    )
    return addresses


# Memory that a worker process lends to the process that uses its minibatches.

_SEGMENT_BYTES = 1 << 25
_SHARE_OF_ALL = 4  # so that few descriptors are taken, however much memory is


class SharedPool(BufferPool):
    """Allocates pieces of shared memory, and reuses each when both processes have released it.

    A piece is used again once no array over it is left here, and its mark `Piece.is_lent` is
    not set, which the process that it was lent to clears. If all free pieces are too small, a new
    one is allocated, and one of them returns to the system.

    Parameters
    ----------
    file
        Where the memory is.
    """

    def __init__(self, file: SharedFile) -> None:
        super().__init__()
        self._file, self._of_forks = file, BufferPool()
        self._at = dict[int, Piece]()  # by address
        self._addresses = list[int]()  # ascending
        self._lent = list[Piece]()
        self._idle = dict[int, list[Piece]]()  # free, by size
        self._empty = dict[int, list[Piece]]()  # free, and without memory

    def acquire(self, n_bytes: int) -> Buffer:
        """See `BufferPool`; a fork of the process, which shares its memory too, gets other."""
        if self._process != os.getpid():
            return self._of_forks.acquire(n_bytes)
        return super().acquire(n_bytes)

    def find(self, address: int) -> tuple[Piece, int] | None:
        """Return the piece that has an address, and how many bytes from its start that is."""
        with _lock:
            k = bisect_right(self._addresses, address) - 1
            if k < 0:
                return None
            start = self._addresses[k]
            piece = self._at[start]
        offset = address - start
        return (piece, offset) if offset < piece.place.piece_bytes else None

    def _collect(self) -> None:
        while self._returned:
            lease = self._returned.popleft()
            self._leased.discard(lease)
            self._add_free(self._at[lease.memory.ctypes.data])

    def _add_free(self, piece: Piece) -> None:
        if piece.is_lent:
            self._lent.append(piece)
        else:
            self._idle.setdefault(piece.place.piece_bytes, []).append(piece)

    def _take(self, capacity: int) -> Bytes:
        size = -(-capacity // PAGE) * PAGE
        piece = _fitting(self._idle, size)
        if piece is None:
            lent, self._lent = self._lent, []
            for each in lent:  # of which the other process may have released some
                self._add_free(each)
            piece = _fitting(self._idle, size)
        if piece is None:
            self._discard_for(size)
            piece = _fitting(self._empty, size) or self._new(size)
        return piece.memory

    def _discard_for(self, n_bytes: int) -> None:
        """Return as much free memory to the system as new memory takes."""
        for size in _sizes_replaced(self._idle, n_bytes):
            piece = self._idle[size].pop()
            piece.discard()
            self._empty.setdefault(size, []).append(piece)

    def _new(self, size: int) -> Piece:
        """Return a piece of a new segment; its others are empty."""
        wanted = max(_SEGMENT_BYTES, self._file.n_bytes // _SHARE_OF_ALL)
        n_pieces = max(1, min(MOST_PIECES, wanted // size))
        place = SegmentPlace(self._file.n_bytes, size, n_pieces)
        try:
            segment = self._file.map(place)
        except OSError as error:
            msg = (
                f"cannot allocate {size:,} bytes of shared memory for rows ({error}); allow more "
                "open files (`ulimit -n 65536`) if there are too many, read fewer rows at a time, "
                "for example with a lower `fetch_factor`, or use num_workers=0"
            )
            raise ParameterError(msg) from error
        pieces = [Piece(segment, place, index) for index in range(n_pieces)]
        first = pieces[0].memory.ctypes.data
        self._at.update({first + each.index * size: each for each in pieces})
        self._addresses = sorted(self._at)
        self._empty.setdefault(size, []).extend(reversed(pieces[1:]))
        return pieces[0]
