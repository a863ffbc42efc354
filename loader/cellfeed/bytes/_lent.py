"""Shared memory that worker processes lend to this process, until nothing here refers to it."""

import contextlib
import itertools
import os
import select
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from cellfeed._errors import DeliveryError
from cellfeed.bytes._buffers import (
    PAGE,
    Buffer,
    Lease,
    PieceHandle,
    Segment,
    SegmentPlace,
    SharedFile,
)
from cellfeed.bytes._store import closed_with


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


def can_lend() -> bool:
    """Whether the system has memory that can be passed to another process by descriptor."""
    return hasattr(os, "memfd_create")


class Arrivals:
    """Memory that the workers of one iterator lend, and which parts are still in use here.

    A piece of memory is returned to its worker with the first message after the last array that
    uses it is gone. Memory still in use when the workers have exited is returned to the system
    later, with the next message of any worker.

    Parameters
    ----------
    num_workers
        Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self.key = next(_KEYS)
        self.files = [SharedFile() for _ in range(num_workers)]
        self._segments = dict[tuple[int, SegmentPlace], Segment]()
        self.borrowed = _Borrowed()
        ARRIVALS[self.key] = self
        _return_of_exited_workers()

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
        _return_of_exited_workers()
        with self.borrowed.lock:
            self.borrowed.return_unused()
            return [self.borrowed.add(self._segment(each), each) for each in lent]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python ends, the system frees everything, and modules are emptied already.
        if is_finalizing() or not self.borrowed.is_own:
            return
        # The workers have exited. Only the pieces still in use keep their memory.
        used = self.borrowed.end()
        for worker, file in enumerate(self.files):
            file.keep_only(each.range for each in used if each.worker == worker)
        if used:
            _OF_EXITED_WORKERS.append(self.borrowed)

    def _segment(self, lent: Lent) -> Segment:
        found = self._segments.get((lent.worker, lent.place))
        if found is None:
            try:
                found = self.files[lent.worker].segment(lent.place)
            except OSError as error:
                msg = (
                    f"memory of a worker cannot be received ({error}); allow more open files "
                    "(ulimit -n), keep fewer minibatches, or use num_workers=0"
                )
                raise DeliveryError(msg) from error
            self._segments[lent.worker, lent.place] = found
        return found


class _Borrowed:
    """Pieces that this process, or a fork of it, may be using."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process = os.getpid()
        self._in_use = dict[weakref.ref[Buffer], tuple[Segment | PieceHandle, Lent]]()
        self._dropped = deque[Any]()  # references to buffers that are gone
        self._unused = list[tuple[Segment | PieceHandle, Lent]]()  # here; a fork may use them
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
            elif isinstance(segment, PieceHandle):
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


def _remains(segment: Segment | PieceHandle, lent: Lent) -> PieceHandle:
    return segment if isinstance(segment, PieceHandle) else segment.remains(lent.piece)


def _return_of_exited_workers() -> None:
    for borrowed in list(_OF_EXITED_WORKERS):
        if borrowed.is_own:
            with borrowed.lock:
                borrowed.return_unused()
        if not (borrowed.is_own and borrowed.pieces):
            with contextlib.suppress(ValueError):  # another thread is doing it
                _OF_EXITED_WORKERS.remove(borrowed)


_KEYS = itertools.count()
ARRIVALS = weakref.WeakValueDictionary[int, Arrivals]()
"""Those of all iterators, by key."""
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
    for borrowed in (*(each.borrowed for each in list(ARRIVALS.values())), *_OF_EXITED_WORKERS):
        borrowed.share(fork)


def _after_fork() -> None:
    """Close the end of the pipe that belongs to the fork."""
    while _Fork.beginning:
        os.close(_Fork.beginning.pop())


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_Fork.beginning.clear
)
