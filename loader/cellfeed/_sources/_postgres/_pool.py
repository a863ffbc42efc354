"""Rows by key over the connections of a process: which connection requests what, and retries."""

import os
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import LOOK_UP_SECONDS, Location, is_awaited
from cellfeed._errors import FormatError, RemoteError
from cellfeed._sources._postgres._connection import Connection, Request
from cellfeed._sources._postgres._database import Database, may_pass
from cellfeed._sources._postgres._loop import loop

__all__ = ["Coming", "Pool", "PoolOfProcess"]

_IDS_PER_REQUEST = 128  # rows of some 0.3 MB
_REQUESTS_PER_CONNECTION = 4  # in flight: while one is answered, others cross the network
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_TOO_MANY = ("too many", "slots are reserved")  # too many connections, in the server's words
_NAMED = 3  # missing cells


class Coming:
    """Rows of a column that were requested; cancelled when this object is dropped.

    Parameters
    ----------
    ids
        Ids of the rows, ascending, int64.
    requests
        Requests for consecutive parts of the ids.
    """

    def __init__(self, ids: NDArray[np.int64], requests: Sequence[Request]) -> None:
        self.ids, self.requests = ids, requests

    def __del__(self) -> None:
        for request in self.requests:
            request.give_up()

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the positions of ids among these; None unless all are found."""
        if not self.ids.size:
            return None
        at = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return at if np.array_equal(self.ids[at], ids) else None

    def packed(self, location: Location) -> list[bytes]:
        """Wait for the rows; return them in the order of `ids`.

        Raises
        ------
        RemoteError
            The database does not answer.
        FormatError
            Rows are missing.
        """
        rows = list[bytes]()
        for request in self.requests:
            while not wait([request.answer], LOOK_UP_SECONDS).done:
                if not is_awaited():
                    msg = f"{location}: reading was cancelled, since the process is exiting"
                    raise RemoteError(msg)
            found, packed = request.answer.result()
            if not np.array_equal(found, request.ids) or None in packed:
                there = found[[each is not None for each in packed]]
                raise _missing(location, np.setdiff1d(request.ids, there))
            rows += packed  # type: ignore[arg-type]  # none is None
        return rows


class Pool:
    """The connections of one process to one database, opened as the load requires.

    Parameters
    ----------
    database
        The database.
    """

    def __init__(self, database: Database) -> None:
        self.process = os.getpid()
        self._failure, self._arguments = database.failure, database.arguments
        self._most, self._retry_seconds = database.n_connections, database.retry_seconds
        self._connections = list[Connection]()
        self._queue = deque[Request]()
        self._pause, self._not_before = _FIRST_PAUSE, 0.0
        self._loop = loop()

    def ask(self, query: str, ids: NDArray[np.int64], *, is_urgent: bool) -> Coming:
        """Request rows, without waiting.

        Parameters
        ----------
        query
            The query, with ``ANY($1)`` for the ids; returns id and packed row.
        ids
            Ascending, int64.
        is_urgent
            Whether to serve it before the queued requests.
        """
        text = query.encode()
        requests = [
            Request(text, ids[k : k + _IDS_PER_REQUEST])
            for k in range(0, ids.size, _IDS_PER_REQUEST)
        ]
        self._loop.call_soon_threadsafe(self._add, requests, is_urgent)
        return Coming(ids, requests)

    def close(self) -> None:
        """Close the connections."""
        if self.process == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _add(self, requests: Sequence[Request], is_urgent: bool) -> None:  # noqa: FBT001 - for the loop
        if is_urgent:
            self._queue.extendleft(reversed(requests))
        else:
            self._queue.extend(requests)
        self._dispatch()

    def _dispatch(self) -> None:
        """Assign requests to the connections with the fewest, or to new ones."""
        pause = self._not_before - self._loop.time()
        if pause > 0:
            self._loop.call_later(pause, self._dispatch)
            return
        while self._queue:
            request = self._queue[0]
            if request.answer.done():  # cancelled
                self._queue.popleft()
                continue
            least = min(self._connections, key=lambda each: len(each.asked), default=None)
            if (least is None or least.asked) and len(self._connections) < self._most:
                least = Connection(self._arguments, self._answered, self._ended)
                self._connections.append(least)
            if least is None or len(least.asked) >= _REQUESTS_PER_CONNECTION:
                return
            least.ask(self._queue.popleft())

    def _answered(self) -> None:
        self._pause = _FIRST_PAUSE
        self._dispatch()

    def _ended(self, connection: Connection, error: Exception) -> None:
        """Move unanswered requests of a connection to others, where that may help."""
        self._connections.remove(connection)
        now = self._loop.time()
        again = list[Request]()
        for request in connection.asked:
            if request.failed_at is None:
                request.failed_at = now
            if may_pass(error) and now - request.failed_at < self._retry_seconds:
                again.append(request)
            else:
                request.fail(self._failure(error, _cells(request.ids)))
        self._queue.extendleft(reversed(again))
        if self._connections and any(word in str(error) for word in _TOO_MANY):
            self._most = len(self._connections)
        else:
            self._not_before = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._dispatch()

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()


class PoolOfProcess:
    """The pool of the calling process; closed when this object is dropped, or the process exits.

    Parameters
    ----------
    database
        The database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pool: Pool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def __call__(self) -> Pool:
        """Return the pool of this process."""
        if self._pool is None or self._pool.process != os.getpid():
            self._pool = Pool(self._database)
            weakref.finalize(self, self._pool.close).atexit = False
        return self._pool


def _cells(ids: NDArray[np.int64]) -> str:
    return f"cell {ids[0]}" if ids.size == 1 else f"cells {ids[0]} to {ids[-1]}"


def _missing(location: Location, ids: NDArray[np.int64]) -> FormatError:
    named = ", ".join(map(str, ids[:_NAMED].tolist()))
    more = f" and {ids.size - _NAMED} more" if ids.size > _NAMED else ""
    msg = f"{location}: packed rows of cells {named}{more} are missing"
    return FormatError(f"{msg}; load the collection again")
