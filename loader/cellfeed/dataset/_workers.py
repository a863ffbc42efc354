"""Delivering minibatches from worker processes: in shared memory, which is reused."""

import contextlib
import io
import itertools
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cellfeed._errors import DeliveryError
from cellfeed._torch import HAS_TORCH, torch
from cellfeed.bytes._buffers import (
    PAGE,
    Buffer,
    Lease,
    Piece,
    SegmentPlace,
    SharedFile,
    SharedPool,
)
from cellfeed.bytes._store import closed_with
from cellfeed.rows._minibatch import csr_tensor


class Event:
    """An event without a lock, which a process that ends at any moment would keep.

    That of multiprocessing has one: a worker that was ended while it looked at its event left it
    locked, and the training process, which sets it when it drops the worker, waited without end.
    """

    def __init__(self, context: BaseContext) -> None:
        self.reader, self._writer = context.Pipe(duplex=False)

    def is_set(self) -> bool:
        """Return whether it was set, or the process that would set it has ended."""
        with contextlib.suppress(OSError):  # of one that garbage collection has closed before
            return self.reader.poll()
        return True

    def set(self) -> None:
        """Set it, for good."""
        with contextlib.suppress(OSError):
            self._writer.send_bytes(b"")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkerStart:
    """What a worker does first, and which memory it lends to the process that uses its minibatches.

    It is the ``worker_init_fn`` of its DataLoader.

    Parameters
    ----------
    are_rows_placed
        Whether rows may be read into lent memory directly, since only the consumer sees them.
    file, key
        Memory shared by both processes, and of which `Arrivals` there; None if none can be lent.
    leave
        Set when the worker is to end at once.
    then
        The user's ``worker_init_fn``, if any.
    worker, num_workers
        Number of the worker, and the number of workers.
    pool
        Pool of this memory, in the worker.
    """

    are_rows_placed: bool
    leave: Event
    file: SharedFile | None = None
    key: int = 0
    then: Callable[[int], None] | None = None
    worker: int = 0
    num_workers: int = 1
    pool: SharedPool | None = None

    def __call__(self, _: int) -> None:
        parent = multiprocessing.parent_process()
        threading.Thread(target=_end_with, args=(parent, self.leave), daemon=True).start()
        # The terminal sends Ctrl-C to all processes; only the training process decides what ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pool = None if self.file is None else SharedPool(self.file)
        _OF_THIS_PROCESS[os.getpid()] = replace(self, pool=pool)
        if self.then is not None:
            self.then(self.worker)


_OF_THIS_PROCESS = dict[int, WorkerStart]()  # by process, since it may be forked


def _end_with(parent: Any, leave: Event) -> None:
    """End this process when the one that started it has ended, however it did, or asks for it.

    In the latter case with status 0: of any other end, torch raises an error in the main thread of
    the training process, wherever that is.
    """
    ready = wait([parent.sentinel, leave.reader])
    os._exit(int(parent.sentinel in ready))


def start_here() -> WorkerStart | None:
    """Return how this worker of a loader has started; None if this process is none."""
    return _OF_THIS_PROCESS.get(os.getpid())


# Memory that workers lend, in the process that uses their minibatches.


class Lent(NamedTuple):
    """A piece of shared memory, as messages refer to it: worker, segment, and number there."""

    worker: int
    place: SegmentPlace
    piece: int

    @property
    def range(self) -> tuple[int, int]:
        """Its first byte in the worker's file, and its number of bytes."""
        n_bytes = self.place.piece_bytes
        return self.place.start + PAGE + self.piece * n_bytes, n_bytes


class Arrivals:
    """Memory that the workers of one iterator lend, and which pieces are still in use here.

    A piece is returned to its worker with the first message after the last array over it is gone.
    When the workers have exited, pieces that are in use keep their memory, and no other does. It
    returns to the system with the last piece of a worker.

    Parameters
    ----------
    num_workers
        Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self.key = next(_KEYS)
        self.files = [SharedFile() for _ in range(num_workers)]
        self._segments = dict[tuple[int, SegmentPlace], mmap.mmap]()
        self._process, self._lock = os.getpid(), threading.Lock()
        self._in_use = dict[Lease, Lent]()
        self._dropped = deque[Lease]()  # of buffers that are gone
        self._unused = set[Lent]()  # here; a fork may use them
        self._forks = list[tuple[_Fork, set[Lent]]]()
        ARRIVALS[self.key] = self

    @property
    def n_segments(self) -> int:
        """Number of segments that are mapped here."""
        return len(self._segments)

    def take(self, lent: Sequence[Lent]) -> list[Buffer]:
        """Return the memory that a message refers to.

        Raises
        ------
        DeliveryError
            The process has too many open files.
        """
        buffers = list[Buffer]()
        with self._lock:
            self._return_unused()
            for each in lent:
                memory = self._piece(each).memory
                buffers.append(Buffer(memory))
                self._in_use[Lease(buffers[-1], self._dropped, memory)] = each
        return buffers

    def _piece(self, lent: Lent) -> Piece:
        segment = self._segments.get((lent.worker, lent.place))
        if segment is None:
            try:
                segment = self.files[lent.worker].map(lent.place)
            except OSError as error:
                msg = (
                    f"memory of a worker cannot be received ({error}); allow more open files "
                    "(ulimit -n), keep fewer minibatches, or use num_workers=0"
                )
                raise DeliveryError(msg) from error
            self._segments[lent.worker, lent.place] = segment
        return Piece(segment, lent.place, lent.piece)

    def _return_unused(self) -> None:
        """Return pieces to their workers that are used neither here nor in a fork."""
        while self._dropped:
            self._unused.add(self._in_use.pop(self._dropped.popleft()))
        self._forks = [(fork, seen) for fork, seen in self._forks if not fork.has_ended()]
        seen_by_forks = set[Lent]().union(*(seen for _, seen in self._forks))
        for each in self._unused - seen_by_forks:
            self._piece(each).mark(is_lent=False)
        self._unused &= seen_by_forks

    def share(self, fork: "_Fork") -> None:
        """Keep the pieces that are in use now as long as processes of a fork live."""
        with self._lock:
            self._return_unused()
            if self._in_use:
                self._forks.append((fork, {*self._in_use.values()}))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python ends, the system frees everything, and modules are emptied already.
        if is_finalizing() or self._process != os.getpid():
            return
        self._return_unused()
        used = {*self._in_use.values(), *self._unused}
        for worker, file in enumerate(self.files):
            file.keep_only(each.range for each in used if each.worker == worker)


_KEYS = itertools.count()
ARRIVALS = weakref.WeakValueDictionary[int, Arrivals]()
"""Those of all iterators, by key."""


class _Fork:
    """A process that is forked from this one, and all processes forked from it.

    They inherit one end of a pipe, which the system closes when the last of them exits or executes
    another program. If no pipe can be opened, they are assumed to live for ever.
    """

    beginning: ClassVar[list[int]] = []  # descriptors that forks keep, and this process closes

    def __init__(self) -> None:
        self._ended: int | None = None
        with contextlib.suppress(OSError):
            self._ended, alive = os.pipe()
            self._closing = closed_with(self._ended)
            self.beginning.append(alive)

    def has_ended(self) -> bool:
        """Whether all of these processes have exited."""
        if self._ended is None:
            return False
        ends = select.poll()
        ends.register(self._ended, 0)  # the closing of the other end is always reported
        return bool(ends.poll(0))


def _before_fork() -> None:
    """Keep pieces that are in use now: a forked process shares the same memory."""
    current = list(ARRIVALS.values())
    if current:
        fork = _Fork()
        for each in current:
            each.share(fork)


def _after_fork() -> None:
    """Close the end of the pipe that belongs to the fork."""
    while _Fork.beginning:
        os.close(_Fork.beginning.pop())


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_Fork.beginning.clear
)


# Minibatches as messages: large arrays in lent memory, everything else pickled.

_LEAST = 1 << 15  # bytes; smaller arrays are pickled


class Message:
    """What a worker sends, which is unpickled as the result of a function.

    Parameters
    ----------
    function, arguments
        The function, and its arguments.
    """

    __slots__ = ("_reduced",)

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def sent(minibatches: Any) -> Message:
    """Return minibatches as a worker sends them: a message, or a pickle if no memory can be lent.

    They are pickled here, where errors are raised: the queue of a worker pickles in a background
    thread, which only prints an error and goes on.
    """
    lending = start_here()
    if lending is not None and lending.pool is not None:
        return message_of(minibatches, lending, lending.pool)
    return Message(pickle.loads, pickle.dumps(minibatches, pickle.HIGHEST_PROTOCOL))


def message_of(minibatches: Any, lending: WorkerStart, pool: SharedPool) -> Message:
    """Return minibatches as a message, and lend the memory that they use.

    Arrays and tensors in memory of the pool are not copied, unless that memory is lent already;
    others are copied into the pool if they are large.
    """
    file, placed = io.BytesIO(), _Placed(pool)
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=placed.is_pickled)
    pickler.dump(minibatches)
    lent = list[Lent]()
    for piece in placed.numbers:
        piece.mark(is_lent=True)
        lent.append(Lent(lending.worker, piece.place, piece.index))
    return Message(_opened, lending.key, lent, placed.ranges, file.getvalue())


class _Placed:
    """The memory of a message's arrays and tensors, in pieces of a pool."""

    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._copies = list[Buffer]()  # until they are lent
        self.numbers = dict[Piece, int]()
        # Number of a piece in the message, first byte in it, and number of bytes.
        self.ranges = list[tuple[int, int, int]]()

    def is_pickled(self, buffer: pickle.PickleBuffer) -> bool:
        """Place memory in a piece; return whether it is pickled instead."""
        content = buffer.raw()
        if not content.nbytes:
            return True
        array = np.frombuffer(content, np.uint8)
        found = self._pool.find(array.ctypes.data)
        if found is None or found[0].is_lent:
            if array.size < _LEAST:
                return True
            copy = self._pool.acquire(array.size)
            self._copies.append(copy)
            copy.array(array.dtype, array.size)[...] = array
            found = self._pool.find(copy.address)
            assert found is not None  # noqa: S101 - it is of this pool
        piece, start = found
        number = self.numbers.setdefault(piece, len(self.numbers))
        self.ranges.append((number, start, array.size))
        return False


class _Pickler(pickle.Pickler):
    """Pickles other tensors with their values, which torch would put into ``/dev/shm``."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors that are nothing but their values, in CPU memory, and sparse rows."""
        if not HAS_TORCH or type(obj) is not torch.Tensor or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.is_quantized or obj.is_nested:
            return NotImplemented
        if obj.layout == torch.sparse_csr:
            parts = obj.crow_indices(), obj.col_indices(), obj.values()
            return csr_tensor, (*parts, tuple(obj.shape))
        if obj.layout != torch.strided:
            return NotImplemented
        # Unlike torch, which takes separate shared memory for each tensor.
        content = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content.data), obj.dtype, tuple(obj.shape))


def _tensor(content: Any, dtype: "torch.dtype", shape: tuple[int, ...]) -> "torch.Tensor":
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _opened(
    key: int, lent: Sequence[Lent], ranges: Sequence[tuple[int, int, int]], content: bytes
) -> Any:
    pieces, dtype = ARRIVALS[key].take(lent), np.dtype(np.uint8)
    buffers = [pieces[number].array(dtype, n, start=start) for number, start, n in ranges]
    return pickle.loads(content, buffers=buffers)  # noqa: S301 - of a worker
