"""What workers lend to this process: shared memory, until nothing here refers to it."""

import itertools
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

from cellfeed._buffers import Buffer, Lease, Segment
from cellfeed._errors import DeliveryError
from cellfeed._workers._line import ANNOUNCED, Lent, as_socket

__all__ = ["Arrivals", "arrivals_of"]


class Arrivals:
    """Segments of the workers of one iterator, and what is still in use here of them.

    Memory goes back to its worker with the next message after the last array over it is gone.

    Parameters
    ----------
    connection
        Where workers announce segments.
    """

    def __init__(self, connection: Connection) -> None:
        self.key = next(_KEYS)
        self._connection = connection
        self._segments = dict[tuple[int, int], Segment]()
        self._in_use = dict[Lease, tuple[Segment, Lent]]()
        self._returned = deque[Lease]()
        self._lock = threading.Lock()
        _ARRIVALS[self.key] = self

    @property
    def n_segments(self) -> int:
        """How many were announced."""
        return len(self._segments)

    def take(self, lent: Sequence[Lent]) -> list[Buffer]:
        """Return memory that a message names.

        Raises
        ------
        DeliveryError
            The process has too many files open.
        """
        with self._lock:
            self._give_back()
            return [self._buffer(each) for each in lent]

    def __del__(self) -> None:
        # The workers have gone. What is still in use keeps its segment, but not what else is there.
        self._give_back()
        used = {lent for _, lent in self._in_use.values()}
        for (worker, number), segment in self._segments.items():
            for index in range(segment.n_pieces):
                if Lent(worker, number, index) not in used:
                    segment.discard(index)

    def _give_back(self) -> None:
        while self._returned:
            segment, lent = self._in_use.pop(self._returned.popleft())
            segment.is_lent[lent.piece] = 0

    def _buffer(self, lent: Lent) -> Buffer:
        place = lent.worker, lent.segment
        while place not in self._segments:
            self._receive()
        segment = self._segments[place]
        memory = segment.piece(lent.piece)
        buffer = Buffer(memory)
        self._in_use[Lease(buffer, self._returned, memory)] = segment, lent
        return buffer

    def _receive(self) -> None:
        """Take a segment that was announced; its message came after it."""
        try:
            with as_socket(self._connection) as line:
                content, (descriptor,), _, _ = socket.recv_fds(line, ANNOUNCED.size, 1)
            worker, number, piece_bytes, n_pieces = ANNOUNCED.unpack(content)
            try:
                segment = Segment(descriptor, number, piece_bytes, n_pieces)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # there is none where none can be opened
            msg = (
                f"memory of a worker cannot be taken ({error}); allow more open files "
                "(ulimit -n), keep fewer minibatches, or use num_workers=0"
            )
            raise DeliveryError(msg) from error
        self._segments[worker, number] = segment


def arrivals_of(key: int) -> Arrivals:
    """Return those of an iterator."""
    return _ARRIVALS[key]


_KEYS = itertools.count()
_ARRIVALS = weakref.WeakValueDictionary[int, Arrivals]()
