"""Delivering minibatches from worker processes: in shared memory, which is reused."""

import contextlib
import io
import itertools
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cellfeed._errors import DeliveryError
from cellfeed._torch import HAS_TORCH, torch
from cellfeed.bytes._buffers import Buffer, Lease, Piece, Remains, Segment, SharedPool
from cellfeed.bytes._store import closed_with
from cellfeed.rows._minibatch import Minibatch, csr_tensor

# The connection on which workers announce shared memory, by its descriptor.

ANNOUNCED = struct.Struct("4q")
"""Worker, number of the segment, size of a piece in bytes, and number of pieces."""


class Lent(NamedTuple):
    """A piece of shared memory, as messages refer to it."""

    worker: int
    segment: int
    piece: int


def can_lend() -> bool:
    """Whether the system has memory that can be passed to another process by descriptor."""
    return hasattr(os, "memfd_create")


def connected() -> tuple[Connection, Connection]:
    """Return the receiving and the sending end of a connection for segments."""
    receiving, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # They close with the last reference, and can be pickled for a process that starts.
    return Connection(receiving.detach()), Connection(sending.detach())


def as_socket(connection: Connection) -> socket.socket:
    """Return a non-blocking socket of the same connection, to be closed."""
    line = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(0)
    return line


# Lending memory to the training process: the pool of shared memory of a loader's worker.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkerStart:
    """What a worker does first, and how it lends memory to the process that uses its minibatches.

    It is the ``worker_init_fn`` of its DataLoader.

    Parameters
    ----------
    are_rows_placed
        Whether rows may be read into lent memory directly, since only the consumer sees them.
    connection, key
        Where segments of memory are announced, and for which `Arrivals`; None if none can be lent.
    then
        The user's ``worker_init_fn``, if any.
    worker, num_workers
        Number of the worker, and the number of workers.
    pool
        Memory shared by both processes.
    """

    are_rows_placed: bool
    connection: Connection | None = None
    key: int = 0
    then: Callable[[int], None] | None = None
    worker: int = 0
    num_workers: int = 1
    pool: SharedPool = field(default_factory=SharedPool)

    def __call__(self, _: int) -> None:
        parent = multiprocessing.parent_process()
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        # The terminal sends Ctrl-C to all processes; only the training process decides what ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _OF_THIS_PROCESS[os.getpid()] = replace(self, pool=SharedPool())
        if self.then is not None:
            self.then(self.worker)

    @property
    def can_lend(self) -> bool:
        """Whether memory can be lent to the consumer."""
        return self.connection is not None

    def lend(self, pieces: Iterable[Piece]) -> list[Lent] | None:
        """Lend pieces, announcing their segments if they are new.

        Returns
        -------
        Handles of the pieces; None if too many segments wait for the consumer.
        """
        pieces = list(pieces)
        for segment in {each.segment.number: each.segment for each in pieces}.values():
            if segment.number in self.pool.unsent and not self._announce(segment):
                return None
        for each in pieces:
            each.segment.is_lent[each.index] = 1
        return [Lent(self.worker, each.segment.number, each.index) for each in pieces]

    def _announce(self, segment: Segment) -> bool:
        descriptor = self.pool.unsent[segment.number]
        content = ANNOUNCED.pack(self.worker, segment.number, segment.piece_bytes, segment.n_pieces)
        assert self.connection is not None  # noqa: S101 - as memory is lent
        try:
            with as_socket(self.connection) as line:
                socket.send_fds(line, [content], [descriptor])
        except OSError:
            return False
        del self.pool.unsent[segment.number]
        os.close(descriptor)
        return True


_OF_THIS_PROCESS = dict[int, WorkerStart]()  # by process, since it may be forked


def _end_with(parent: Any) -> None:
    """End this process when the one that started it has ended, however it did."""
    parent.join()
    os._exit(1)


def pool_of_minibatches() -> SharedPool | None:
    """Return the pool into which rows of minibatches are read, if they are lent from there."""
    found = _OF_THIS_PROCESS.get(os.getpid())
    return found.pool if found is not None and found.can_lend and found.are_rows_placed else None


def num_workers_of_loader() -> int | None:
    """Return how many workers the loader of this process has; None if it is no worker of one."""
    found = _OF_THIS_PROCESS.get(os.getpid())
    return None if found is None else found.num_workers


# Shared memory that workers lend to this process, until nothing here refers to it.


class Arrivals:
    """Segments of the workers of one iterator, and which parts are still in use here.

    A piece of memory is returned to its worker with the first message after the last array that
    uses it is gone. Memory still in use when the workers have exited is returned to the system
    later, with the next message of any worker.

    Parameters
    ----------
    connection
        Where workers announce segments.
    """

    def __init__(self, connection: Connection) -> None:
        self.key = next(_KEYS)
        self._connection = connection
        self._segments = dict[tuple[int, int], Segment]()
        self.borrowed = _Borrowed()
        _ARRIVALS[self.key] = self
        _return_of_exited_workers()

    @property
    def n_segments(self) -> int:
        """Number of announced segments."""
        return len(self._segments)

    def take(self, lent: Sequence[Lent]) -> list[Buffer]:
        """Return the memory that a message refers to.

        Raises
        ------
        DeliveryError
            The process has too many open files.
        """
        _return_of_exited_workers()
        with self.borrowed.lock:
            self.borrowed.return_unused()
            return [self.borrowed.add(self._segment(each), each) for each in lent]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python ends, the system frees everything, and modules are emptied already.
        if is_finalizing() or not self.borrowed.is_own:
            return
        # The workers have exited. Only the pieces still in use keep their segments.
        used = self.borrowed.end()
        for (worker, number), segment in self._segments.items():
            for index in range(segment.n_pieces):
                if Lent(worker, number, index) not in used:
                    segment.discard(index)
        if used:
            _OF_EXITED_WORKERS.append(self.borrowed)

    def _segment(self, lent: Lent) -> Segment:
        """Return a segment, whose announcement precedes the message that uses it."""
        while (lent.worker, lent.segment) not in self._segments:
            try:
                with as_socket(self._connection) as line:
                    content, (descriptor,), _, _ = socket.recv_fds(line, ANNOUNCED.size, 1)
                worker, number, piece_bytes, n_pieces = ANNOUNCED.unpack(content)
                try:
                    segment = Segment(descriptor, number, piece_bytes, n_pieces)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError) as error:  # there are none if none can be opened
                msg = (
                    f"memory of a worker cannot be received ({error}); allow more open files "
                    "(ulimit -n), keep fewer minibatches, or use num_workers=0"
                )
                raise DeliveryError(msg) from error
            self._segments[worker, number] = segment
        return self._segments[lent.worker, lent.segment]


class _Borrowed:
    """Pieces that this process, or a fork of it, may be using."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process = os.getpid()
        self._in_use = dict[weakref.ref[Buffer], tuple[Segment | Remains, Lent]]()
        self._dropped = deque[Any]()  # references to buffers that are gone
        self._unused = list[tuple[Segment | Remains, Lent]]()  # here; a fork may use them
        self._forks = list[tuple[_Fork, set[Lent]]]()

    @property
    def is_own(self) -> bool:
        """Whether they were lent to this process, and not to one that it was forked from."""
        return self._process == os.getpid()

    @property
    def pieces(self) -> set[Lent]:
        """Pieces that have not been returned."""
        return {lent for _, lent in (*self._in_use.values(), *self._unused)}

    def add(self, segment: Segment, lent: Lent) -> Buffer:
        """Return the memory of a piece."""
        memory = segment.piece(lent.piece)
        buffer = Buffer(memory)
        self._in_use[Lease(buffer, self._dropped, memory)] = segment, lent
        return buffer

    def return_unused(self) -> None:
        """Return unused pieces to the worker, or to the system if the worker has exited."""
        while self._dropped:
            piece = self._in_use.pop(self._dropped.popleft(), None)
            if piece is not None:  # otherwise this was noticed when the workers exited
                self._unused.append(piece)
        self._forks = [(fork, seen) for fork, seen in self._forks if not fork.has_ended()]
        seen_by_forks = set[Lent]().union(*(seen for _, seen in self._forks))
        unused, self._unused = self._unused, []
        for segment, lent in unused:
            if lent in seen_by_forks:
                self._unused.append((segment, lent))
            elif isinstance(segment, Remains):
                segment.discard()
            else:
                segment.is_lent[lent.piece] = 0

    def end(self) -> set[Lent]:
        """Release the segments of exited workers; return the pieces still in use."""
        with self.lock:
            self.return_unused()
            in_use, self._in_use = self._in_use, {}
            for lease, (segment, lent) in in_use.items():
                buffer = lease()
                if buffer is None:  # it is no longer in use
                    self._unused.append((segment, lent))
                else:  # a lease would keep the memory alive
                    reference = weakref.ref(buffer, self._dropped.append)
                    self._in_use[reference] = _remains(segment, lent), lent
                del buffer
            self._unused = [(_remains(segment, lent), lent) for segment, lent in self._unused]
            return self.pieces

    def share(self, fork: "_Fork") -> None:
        """Keep the pieces that are in use now as long as processes of a fork live."""
        if self.is_own:
            with self.lock:
                self.return_unused()
                used = {lent for _, lent in self._in_use.values()}
                if used:
                    fork.open()
                    self._forks.append((fork, used))


def _remains(segment: Segment | Remains, lent: Lent) -> Remains:
    return segment if isinstance(segment, Remains) else segment.remains(lent.piece)


def _return_of_exited_workers() -> None:
    for borrowed in list(_OF_EXITED_WORKERS):
        if borrowed.is_own:
            with borrowed.lock:
                borrowed.return_unused()
        if not (borrowed.is_own and borrowed.pieces):
            with contextlib.suppress(ValueError):  # another thread is doing it
                _OF_EXITED_WORKERS.remove(borrowed)


_KEYS = itertools.count()
_ARRIVALS = weakref.WeakValueDictionary[int, Arrivals]()
_OF_EXITED_WORKERS = list[_Borrowed]()


class _Fork:
    """A process that is forked from this one, and all processes forked from it.

    They inherit one end of a pipe, which the system closes when the last of them exits or executes
    another program. If no pipe can be opened, they are assumed to live for ever.
    """

    beginning: ClassVar[list[int]] = []  # descriptors that forks keep, and this process closes

    def __init__(self) -> None:
        self._ended: int | None = None

    def open(self) -> None:
        """Open the pipe, unless it is open."""
        if self._ended is None:
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
    fork = _Fork()
    for borrowed in (*(each.borrowed for each in list(_ARRIVALS.values())), *_OF_EXITED_WORKERS):
        borrowed.share(fork)


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
    lending = _OF_THIS_PROCESS.get(os.getpid())
    if lending is not None and lending.can_lend:
        message = message_of(minibatches, lending)
        if message is not None:
            return message
    return Message(pickle.loads, pickle.dumps(minibatches, pickle.HIGHEST_PROTOCOL))


def message_of(minibatches: Any, lending: WorkerStart) -> Message | None:
    """Return minibatches as a message, and lend the memory that they use.

    Arrays and tensors in memory of the pool are not copied, unless that memory is lent already;
    others are copied into the pool if they are large.

    Returns
    -------
    None if memory cannot be lent, so they have to be sent another way.
    """
    file, placed = io.BytesIO(), _Placed(lending.pool)
    _Pickler(file, pickle.HIGHEST_PROTOCOL, True, placed.is_pickled).dump(minibatches)  # noqa: FBT003
    lent = lending.lend(placed.numbers)
    if lent is None:
        return None
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


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors, and objects that consist of tensors."""
        if type(obj) is Minibatch:
            own = obj.elements, obj.obs, obj.rows, obj.obs_names
            return Minibatch, (*own, obj.controls, obj.neighbors)
        if not HAS_TORCH or not isinstance(obj, torch.Tensor | torch.UntypedStorage):
            return NotImplemented
        if type(obj) is not torch.Tensor:
            return _by_itself(obj)
        if obj.layout == torch.sparse_csr and not obj.requires_grad:
            parts = obj.crow_indices(), obj.col_indices(), obj.values()
            return csr_tensor, (*parts, tuple(obj.shape))
        if _is_plain(obj):  # unlike torch, which takes separate shared memory for each tensor
            content = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(content.data), obj.dtype, tuple(obj.shape))
        return _by_itself(obj)


def _by_itself(obj: Any) -> Any:
    """Return how to pickle a tensor with its values; torch would put them into ``/dev/shm``."""
    if obj.device.type != "cpu":
        return NotImplemented
    if isinstance(obj, torch.UntypedStorage):
        content = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
        return _storage, (pickle.PickleBuffer(content.data),)
    return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _storage(content: Any) -> "torch.UntypedStorage":
    return _tensor(content, torch.uint8, (len(content),)).untyped_storage()


def _tensor(content: Any, dtype: "torch.dtype", shape: tuple[int, ...]) -> "torch.Tensor":
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _opened(
    key: int, lent: Sequence[Lent], ranges: Sequence[tuple[int, int, int]], content: bytes
) -> Any:
    pieces, dtype = _ARRIVALS[key].take(lent), np.dtype(np.uint8)
    buffers = [pieces[number].array(dtype, n, start=start) for number, start, n in ranges]
    return pickle.loads(content, buffers=buffers)  # noqa: S301 - of a worker


def _is_plain(tensor: "torch.Tensor") -> bool:
    """Whether a tensor is nothing but its values, in CPU memory."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
    )
