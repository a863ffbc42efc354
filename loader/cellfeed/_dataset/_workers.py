"""Delivering minibatches from worker processes: in shared memory, which is reused."""

import contextlib
import io
import itertools
import os
import pickle
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import Buffer, Lease, Piece, Remains, Segment, SharedPool
from cellfeed._errors import DeliveryError
from cellfeed._rows._minibatch import Minibatch, csr_tensor
from cellfeed._torch import HAS_TORCH, torch

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


@dataclass(frozen=True, slots=True, eq=False)
class Departures:
    """How a worker lends memory to the process that uses its minibatches.

    Parameters
    ----------
    connection, key, worker
        Where segments are announced, for which `Arrivals`, and by which worker.
    pool
        Memory shared by both processes.
    are_rows_placed
        Whether rows may be read into it directly, since only the consumer sees them.
    are_persistent
        Whether workers continue with the next epoch.
    """

    connection: Connection
    key: int
    worker: int
    pool: SharedPool
    are_rows_placed: bool
    are_persistent: bool

    def lend(self, pieces: Iterable[Piece]) -> list[Lent] | None:
        """Lend pieces, announcing their segments if they are new.

        Returns
        -------
        Handles of the pieces; None if too many segments wait for the consumer.
        """
        pieces = list(pieces)
        for each in pieces:
            if not self._announced(each):
                return None
        for each in pieces:
            each.segment.is_lent[each.index] = 1
        return [Lent(self.worker, each.segment.number, each.index) for each in pieces]

    def _announced(self, piece: Piece) -> bool:
        segment = piece.segment
        descriptor = self.pool.unsent.get(segment.number)
        if descriptor is None:
            return True
        content = ANNOUNCED.pack(self.worker, segment.number, segment.piece_bytes, segment.n_pieces)
        try:
            with as_socket(self.connection) as line:
                socket.send_fds(line, [content], [descriptor])
        except OSError:
            return False
        del self.pool.unsent[segment.number]
        os.close(descriptor)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class WorkerStart:
    """A ``worker_init_fn`` that enables a worker to lend memory.

    Parameters
    ----------
    connection, key, are_rows_placed, are_persistent
        See `Departures`.
    then
        The user's ``worker_init_fn``, if any.
    """

    connection: Connection
    key: int
    are_rows_placed: bool
    are_persistent: bool
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        _OF_THIS_PROCESS[os.getpid()] = Departures(
            self.connection,
            self.key,
            worker,
            SharedPool(),
            self.are_rows_placed,
            self.are_persistent,
        )
        if self.then is not None:
            self.then(worker)


_OF_THIS_PROCESS = dict[int, Departures]()  # by process, since it may be forked


def departures() -> Departures | None:
    """Return the departures of this process, None unless it is a worker that lends memory."""
    return _OF_THIS_PROCESS.get(os.getpid())


def pool_of_minibatches() -> SharedPool | None:
    """Return the pool into which rows of minibatches are read, if they are lent from there."""
    found = departures()
    return found.pool if found is not None and found.are_rows_placed else None


# Whether processes that were forked from this one still exist.


class Fork:
    """The next forked process, and all processes forked from it.

    They inherit one end of a pipe, which the system closes when the last of them exits or executes
    another program. If no pipe can be opened, they are assumed to live for ever.
    """

    _beginning: ClassVar[list[int]] = []  # descriptors that forks keep, and this process closes

    def __init__(self) -> None:
        self._ended: int | None = None

    def begin(self, is_asked: bool) -> None:  # noqa: FBT001 - the only argument
        """Open the pipe, if `has_ended` will be used."""
        if is_asked:
            with contextlib.suppress(OSError):
                self._ended, alive = os.pipe()
                self._beginning.append(alive)

    @classmethod
    def has_begun(cls) -> None:
        """Close the end of the pipe that belongs to the fork."""
        while cls._beginning:
            os.close(cls._beginning.pop())

    @classmethod
    def has_begun_here(cls) -> None:
        """Keep that end: this is the fork."""
        cls._beginning.clear()

    def has_ended(self) -> bool:
        """Whether all of these processes have exited."""
        if self._ended is None:
            return False
        ends = select.poll()
        ends.register(self._ended, 0)  # the closing of the other end is always reported
        return bool(ends.poll(0))

    def __del__(self) -> None:
        if self._ended is not None:
            os.close(self._ended)


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
        _give_back_what_was_left()

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
        _give_back_what_was_left()
        with self.borrowed.lock:
            self.borrowed.give_back()
            return [self.borrowed.add(self._segment(each), each) for each in lent]

    def __del__(self) -> None:
        if not self.borrowed.is_own:
            return
        # The workers have exited. Only the pieces still in use keep their segments.
        used = self.borrowed.end()
        for (worker, number), segment in self._segments.items():
            for index in range(segment.n_pieces):
                if Lent(worker, number, index) not in used:
                    segment.discard(index)
        if used:
            _LEFT.append(self.borrowed)

    def _segment(self, lent: Lent) -> Segment:
        place = lent.worker, lent.segment
        while place not in self._segments:
            self._receive()
        return self._segments[place]

    def _receive(self) -> None:
        """Receive an announced segment; its announcement precedes the message that uses it."""
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
                f"memory of a worker cannot be received ({error}); allow more open files (ulimit "
                "-n), keep fewer minibatches, or use num_workers=0"
            )
            raise DeliveryError(msg) from error
        self._segments[worker, number] = segment


class _Borrowed:
    """Pieces that this process, or a fork of it, may be using."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process = os.getpid()
        self._in_use = dict[weakref.ref[Buffer], tuple[Segment | Remains, Lent]]()
        self._returned = deque[Any]()  # references to buffers that are gone
        self._let_go = list[tuple[Segment | Remains, Lent]]()  # here; a fork may use them
        self._forks = list[tuple[Fork, set[Lent]]]()

    @property
    def is_own(self) -> bool:
        """Whether they were lent to this process, and not to one that it was forked from."""
        return self._process == os.getpid()

    @property
    def pieces(self) -> set[Lent]:
        """Pieces that have not been returned."""
        return {lent for _, lent in (*self._in_use.values(), *self._let_go)}

    def add(self, segment: Segment, lent: Lent) -> Buffer:
        """Return the memory of a piece."""
        memory = segment.piece(lent.piece)
        buffer = Buffer(memory)
        self._in_use[Lease(buffer, self._returned, memory)] = segment, lent
        return buffer

    def give_back(self) -> None:
        """Return unused pieces to the worker, or to the system if the worker has exited."""
        while self._returned:
            place = self._in_use.pop(self._returned.popleft(), None)
            if place is not None:  # otherwise this was noted when the workers exited
                self._let_go.append(place)
        self._forks = [(fork, seen) for fork, seen in self._forks if not fork.has_ended()]
        free, seen_by_forks = self._let_go, set[Lent]().union(*(seen for _, seen in self._forks))
        self._let_go = [(segment, lent) for segment, lent in free if lent in seen_by_forks]
        for segment, lent in free:
            if lent in seen_by_forks:
                continue
            if isinstance(segment, Remains):
                segment.discard()
            else:
                segment.is_lent[lent.piece] = 0

    def end(self) -> set[Lent]:
        """Release the segments of exited workers; return the pieces still in use."""
        with self.lock:
            self.give_back()
            in_use, self._in_use = self._in_use, {}
            for lease, (segment, lent) in in_use.items():
                buffer = lease()
                if buffer is None:  # it is no longer in use
                    self._let_go.append((segment, lent))
                else:  # a lease would keep the memory alive
                    kept = weakref.ref(buffer, self._returned.append)
                    self._in_use[kept] = _remains(segment, lent), lent
                del buffer
            self._let_go = [(_remains(segment, lent), lent) for segment, lent in self._let_go]
            return self.pieces

    def seen_by(self, fork: Fork) -> bool:
        """Keep pieces in use while processes of a fork live; return whether there are any."""
        if not self.is_own:
            return False
        with self.lock:
            self.give_back()
            used = {lent for _, lent in self._in_use.values()}
            if used:
                self._forks.append((fork, used))
        return bool(used)


def _remains(segment: Segment | Remains, lent: Lent) -> Remains:
    return segment if isinstance(segment, Remains) else segment.remains(lent.piece)


def arrivals_of(key: int) -> Arrivals:
    """Return the arrivals of an iterator."""
    return _ARRIVALS[key]


def _give_back_what_was_left() -> None:
    for borrowed in list(_LEFT):
        if borrowed.is_own:
            with borrowed.lock:
                borrowed.give_back()
        if not (borrowed.is_own and borrowed.pieces):
            with contextlib.suppress(ValueError):  # another thread is doing it
                _LEFT.remove(borrowed)


def _keep_for_fork() -> None:
    """Keep pieces that are in use now: a forked process shares the same memory."""
    fork = Fork()
    borrowed = [*(each.borrowed for each in list(_ARRIVALS.values())), *_LEFT]
    is_seen = [each.seen_by(fork) for each in borrowed]
    fork.begin(any(is_seen))


_KEYS = itertools.count()
_ARRIVALS = weakref.WeakValueDictionary[int, Arrivals]()
_LEFT = list[_Borrowed]()  # of iterators that have ended

os.register_at_fork(
    before=_keep_for_fork, after_in_parent=Fork.has_begun, after_in_child=Fork.has_begun_here
)


# Minibatches as messages: large arrays in lent memory, the rest pickled.

_LEAST = 1 << 15  # bytes; smaller arrays are pickled

# The number of the piece in the message and the first byte in it, or the bytes themselves; number
# of bytes; shape and dtype.
_Placed: TypeAlias = tuple[tuple[int, int] | bytearray, int, tuple[int, ...], Any]


class Message:
    """A message that the consumer unpickles as the original minibatch."""

    __slots__ = ("_content", "_key", "_lent")

    def __init__(self, key: int, lent: Sequence[Lent], content: bytes) -> None:
        self._key, self._lent, self._content = key, lent, content

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self._key, self._lent, self._content)


def message_of(minibatch: Any, departures: Departures) -> Message | None:
    """Return a minibatch as a message, and lend the memory that it uses.

    Arrays and tensors in memory of the pool are not copied, unless that memory is lent already;
    others are copied into the pool if they are large.

    Returns
    -------
    None if memory cannot be lent, so the minibatch has to be sent another way.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, departures)
    pickler.dump(minibatch)
    lent = departures.lend(pickler.pieces)
    return None if lent is None else Message(departures.key, lent, file.getvalue())


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, departures: Departures) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._pool = departures.pool
        self._numbers = dict[Piece, int]()
        self._copies = list[Buffer]()  # kept until they are lent

    @property
    def pieces(self) -> list[Piece]:
        """Pieces of memory that the message refers to."""
        return list(self._numbers)

    def persistent_id(self, obj: Any) -> _Placed | None:
        """Place the memory of arrays and tensors."""
        if type(obj) is np.ndarray:
            if obj.dtype.hasobject or not obj.flags.c_contiguous or not obj.nbytes:
                return None
            where = self._where(obj.reshape(-1).view(np.uint8))
            return None if where is None else (where, obj.nbytes, obj.shape, obj.dtype)
        if HAS_TORCH and type(obj) is torch.Tensor and _is_plain(obj):
            content = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
            # Unlike torch, which takes separate shared memory for each tensor.
            placed = self._where(content) or bytearray(content)
            return placed, content.size, tuple(obj.shape), obj.dtype
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce objects that consist of tensors."""
        if type(obj) is Minibatch:
            return Minibatch, (obj.elements, obj.obs, obj.rows)
        if HAS_TORCH and type(obj) is torch.Tensor and obj.layout == torch.sparse_csr:
            if obj.requires_grad:
                return NotImplemented
            parts = obj.crow_indices(), obj.col_indices(), obj.values()
            return csr_tensor, (*parts, tuple(obj.shape))
        return NotImplemented

    def _where(self, content: NDArray[np.uint8]) -> tuple[int, int] | None:
        found = self._pool.find(content.ctypes.data) if content.size else None
        if found is None or found[0].is_lent:
            if content.size < _LEAST:
                return None
            buffer = self._pool.acquire(content.size)
            self._copies.append(buffer)
            copy = buffer.array(content.dtype, content.size)
            copy[...] = content
            return self._where(copy)
        piece, start = found
        return self._numbers.setdefault(piece, len(self._numbers)), start


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[Buffer]) -> None:
        super().__init__(file)
        self._buffers = buffers

    def persistent_load(self, pid: _Placed) -> Any:
        """Return an array or a tensor over lent memory."""
        where, n_bytes, shape, dtype = pid
        if isinstance(where, bytearray):
            return (
                torch.frombuffer(where, dtype=dtype).view(shape) if where else _empty(shape, dtype)
            )
        number, start = where
        content = self._buffers[number].array(np.dtype(np.uint8), n_bytes, start=start)
        if isinstance(dtype, np.dtype):
            return content.view(dtype).reshape(shape)
        return torch.from_numpy(content).view(dtype).view(shape)


def _empty(shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    return torch.empty(shape, dtype=dtype)


def _opened(key: int, lent: Sequence[Lent], content: bytes) -> Any:
    return _Unpickler(io.BytesIO(content), arrivals_of(key).take(lent)).load()


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
