"""Lending memory to the training process: the pool of shared memory of a loader's worker."""

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from cellfeed._buffers import Piece, SharedPool
from cellfeed._workers._line import ANNOUNCED, Lent, as_socket

__all__ = ["Departures", "WorkerStart", "departures", "pool_of_minibatches"]


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
