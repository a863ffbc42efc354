"""Shared memory that workers lend to this process, until nothing here refers to it."""

import contextlib
import itertools
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from cellfeed._buffers import Buffer, Lease, Remains, Segment
from cellfeed._errors import DeliveryError
from cellfeed._workers._forks import Fork
from cellfeed._workers._line import ANNOUNCED, Lent, as_socket

__all__ = ["Arrivals", "arrivals_of"]


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
