"""Rows by key over the connections of a process: which connection requests what, and retries."""

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import LOOK_UP_SECONDS, Location, is_awaited
from cellfeed.extending import FormatError, RemoteError
from cellfeed.sources import OpenedPerProcess
from cellfeed.storages.postgres._database import FIRST_PAUSE, LONGEST_PAUSE, Database, may_pass

_IDS_PER_REQUEST = 128
_REQUEST_BYTES = 1 << 18  # of rows, about
_REQUESTS_PER_QUERY = 4
_ANSWER_SECONDS = 30.0  # after which a connection is closed
_END_SECONDS = 2.0
_TOO_MANY = ("too many", "slots are reserved")  # too many connections, in the server's words
_NAMED = 3  # missing cells


@dataclass(slots=True, eq=False)
class Request:
    """Rows that are requested together.

    Parameters
    ----------
    query
        The query, with ``ANY(%s)`` for the ids.
    ids
        Ascending, int64.
    answer
        The packed row of each id; None where there is none.
    failed_at
        Time of the first failure, by the loop's clock.
    """

    query: str
    ids: NDArray[np.int64]
    answer: Future[list[bytes | None]] = field(default_factory=Future)
    failed_at: float | None = None


class PendingRows:
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
            request.answer.cancel()

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
            answer = request.answer.result()
            found = [row for row in answer if row is not None]
            if len(found) < len(answer):
                missing = request.ids[[row is None for row in answer]]
                named = ", ".join(map(str, missing[:_NAMED].tolist()))
                more = f" and {missing.size - _NAMED} more" if missing.size > _NAMED else ""
                msg = f"{location}: packed rows of cells {named}{more} are missing"
                raise FormatError(f"{msg}; load the collection again")
            rows += found
        return rows


class Pool:
    """The connections of one process to one database, opened as the load requires.

    All of them are served by one thread, which runs an event loop.

    Parameters
    ----------
    database
        The database.
    """

    def __init__(self, database: Database) -> None:
        self._process = os.getpid()
        self._failure, self._arguments = database.failure, database.arguments
        self._most, self._retry_seconds = database.n_connections, database.retry_seconds
        self._queue = deque[Request]()
        self._open, self._idle, self._n_serving = set[Any](), list[Any](), 0
        self._pause, self._not_before = FIRST_PAUSE, 0.0
        self._loop = asyncio.SelectorEventLoop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="cellfeed-postgres", daemon=True)
        self._thread.start()

    def ask(
        self, query: str, ids: NDArray[np.int64], row_bytes: float, *, is_urgent: bool
    ) -> PendingRows:
        """Request rows, without waiting.

        Parameters
        ----------
        query
            The query, with ``ANY(%s)`` for the ids; returns id and packed row.
        ids
            Ascending, int64.
        row_bytes
            Mean size of a packed row in bytes.
        is_urgent
            Whether to serve it before the queued requests.
        """
        n = int(min(max(_REQUEST_BYTES // row_bytes, 1), _IDS_PER_REQUEST))
        requests = [Request(query, ids[k : k + n]) for k in range(0, ids.size, n)]

        def add() -> None:
            if is_urgent:
                self._queue.extendleft(reversed(requests))
            else:
                self._queue.extend(requests)
            self._dispatch()

        self._loop.call_soon_threadsafe(add)
        return PendingRows(ids, requests)

    def close(self) -> None:
        """Close the connections, and end the thread before Python stops it at any point."""
        if self._process != os.getpid():  # the thread did not survive the fork
            return

        async def end() -> None:
            for connection in self._open:
                await connection.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        ending = end()
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(ending))
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    # All that follows runs in the thread of the loop.

    def _dispatch(self) -> None:
        """Serve the queued requests over connections that are idle, or new ones."""
        pause = self._not_before - self._loop.time()
        if pause > 0:
            self._loop.call_later(pause, self._dispatch)
            return
        for _ in range(min(len(self._queue), self._most - self._n_serving)):
            self._n_serving += 1
            self._loop.create_task(self._serve())

    def _taken(self) -> list[Request]:
        """Take requests from the queue, of the same query, for one connection."""
        share = min(-(-len(self._queue) // self._most), _REQUESTS_PER_QUERY)
        taken = list[Request]()
        while self._queue and len(taken) < share:
            if taken and self._queue[0].query != taken[0].query:
                break
            request = self._queue.popleft()
            if not request.answer.cancelled():
                taken.append(request)
        return taken

    async def _serve(self) -> None:
        """Answer requests over one connection, until there are none."""
        import psycopg  # noqa: PLC0415 - optional

        connection, requests = None, self._taken()
        try:
            while requests:
                if connection is None and self._idle:
                    connection = self._idle.pop()
                elif connection is None:
                    connection = await psycopg.AsyncConnection.connect(**self._arguments)
                    self._open.add(connection)
                rows = await self._rows(connection, requests)
                for request in requests:
                    with suppress(InvalidStateError):  # it was cancelled
                        request.answer.set_result([*map(rows.get, request.ids.tolist())])
                self._pause, requests = FIRST_PAUSE, self._taken()
        except Exception as error:  # noqa: BLE001 - reported to the requests
            self._n_serving -= 1
            for each in filter(None, (connection, *self._idle)):  # which may be dropped as well
                self._open.discard(each)
                await each.close()
            self._idle.clear()
            self._failed(requests, error)
        else:
            self._n_serving -= 1
            if connection is not None:
                self._idle.append(connection)

    async def _rows(self, connection: Any, requests: Sequence[Request]) -> dict[int, bytes | None]:
        """Return the packed row of each id that is found."""
        ids = [each for request in requests for each in request.ids.tolist()]

        async def answer() -> dict[int, bytes | None]:
            cursor = await connection.execute(requests[0].query, (ids,), binary=True)
            return dict(await cursor.fetchall())

        answered = self._loop.create_task(answer())
        await asyncio.wait([answered], timeout=_ANSWER_SECONDS)
        if not answered.done():
            await connection.close()  # first: psycopg would wait for the server to cancel
            answered.cancel()
            raise TimeoutError(f"no answer in {_ANSWER_SECONDS:.0f} s")
        return answered.result()

    def _failed(self, requests: Sequence[Request], error: Exception) -> None:
        """Queue requests again, where that may help."""
        now = self._loop.time()
        again = list[Request]()
        for request in requests:
            if request.failed_at is None:
                request.failed_at = now
            if may_pass(error) and now - request.failed_at < self._retry_seconds:
                again.append(request)
                continue
            first, last = request.ids[[0, -1]]
            cells = f"cell {first}" if first == last else f"cells {first} to {last}"
            with suppress(InvalidStateError):
                request.answer.set_exception(self._failure(error, cells))
        self._queue.extendleft(reversed(again))
        if self._open and any(word in str(error) for word in _TOO_MANY):
            self._most = len(self._open)
        else:
            self._not_before = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._dispatch()


class PoolOfProcess(OpenedPerProcess):
    """Calling it returns the pool of this process, closed with this object or at the exit.

    Parameters
    ----------
    database
        The database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def _open(self) -> Pool:
        pool = Pool(self._database)
        weakref.finalize(self, pool.close)
        return pool
