"""Rows by key over the connections of a process: which connection requests what, and retries."""

import asyncio
import atexit
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import LOOK_UP_SECONDS, Location, is_awaited
from cellfeed.extending import FormatError, RemoteError
from cellfeed.sources import OpenedPerProcess
from cellfeed.storages.postgres._database import Database, may_pass

# The thread that serves the connections of a process: one event loop, started when needed.

_END_SECONDS = 2.0

_lock = threading.Lock()
_started: tuple[int, asyncio.AbstractEventLoop, threading.Thread] | None = None


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; a fork starts its own."""
    global _started, _lock  # noqa: PLW0603 - one loop for the process
    if _started is not None and _started[0] == os.getpid():
        return _started[1]
    if _started is not None:
        _lock = threading.Lock()  # another thread may have held the old lock at the fork
    with _lock:
        if _started is None or _started[0] != os.getpid():
            made = asyncio.SelectorEventLoop()
            thread = threading.Thread(
                target=made.run_forever, name="cellfeed-postgres", daemon=True
            )
            thread.start()
            _started = os.getpid(), made, thread
        return _started[1]


@atexit.register
def _end() -> None:
    """Stop the thread before Python stops it at an arbitrary point."""
    if _started is None or _started[0] != os.getpid():
        return
    _, made, thread = _started

    def cancel() -> None:
        for task in asyncio.all_tasks(made):
            task.cancel()
        made.call_soon(made.stop)

    made.call_soon_threadsafe(cancel)
    thread.join(_END_SECONDS)
    if not thread.is_alive():
        made.close()


# One connection that reads rows by key, with several queries in libpq's pipeline.
#
# All of it runs in the thread of `loop`.

_ANSWER_SECONDS = 30.0  # without a byte from the server, after which a connection is closed
_INT8, _INT8_ARRAY, _BINARY = 20, 1016, 1
_ELEMENT = np.dtype([("size", ">i4"), ("id", ">i8")])

Rows = tuple[NDArray[np.int64], Sequence[bytes | None]]


@dataclass(slots=True, eq=False)
class Request:
    """Rows that are requested together.

    Parameters
    ----------
    query
        The query, with ``ANY($1)`` for the ids.
    ids
        Ascending, int64.
    answer
        The ids that were found, ascending, and the packed row of each.
    failed_at
        Time of the first failure, by the loop's clock.
    """

    query: bytes
    ids: NDArray[np.int64]
    answer: Future[Rows] = field(default_factory=Future)
    failed_at: float | None = None

    def end(self, rows: Rows | None, error: Exception | None = None) -> None:
        """Set the answer or the error, unless the request was cancelled."""
        with suppress(InvalidStateError):
            if rows is None:
                self.answer.set_exception(error)
            else:
                self.answer.set_result(rows)


class Connection:
    """A connection that is opened, and answers requests in order.

    Parameters
    ----------
    arguments
        Arguments of psycopg's connect.
    on_free
        Called when it has opened, and after each answer.
    on_end
        Called once with the connection, and the error that ended it.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        on_free: Callable[[], object],
        on_end: Callable[["Connection", Exception], object],
    ) -> None:
        self.asked = deque[Request]()
        self.is_open = self._has_ended = False
        self._arguments, self._on_free, self._on_end = arguments, on_free, on_end
        self._connection: Any = None
        self._answered: Any = None
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._opening = self._loop.create_task(self._open())

    def ask(self, request: Request) -> None:
        """Request rows, now or once the connection is open."""
        if not self.asked:
            self._heard = self._loop.time()
        self.asked.append(request)
        if self.is_open:
            self._guarded(self._send, request)

    def close(self) -> None:
        """Close it; pending requests get no answer."""
        self._opening.cancel()
        if self._connection is None:
            return
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._connection.pgconn.finish()

    async def _open(self) -> None:
        import psycopg  # noqa: PLC0415 - optional

        try:
            self._connection = await psycopg.AsyncConnection.connect(**self._arguments)
            self._pq = self._connection.pgconn
            self._socket = self._pq.socket
            self._pq.enter_pipeline_mode()
            self.is_open = True
            self._loop.add_reader(self._socket, self._guarded, self._read)
            self._heard = self._loop.time()
            for request in self.asked:
                self._send(request)
            self._watch()
        except Exception as error:  # noqa: BLE001 - reported to the requests
            self._end(error)
        else:
            self._on_free()

    def _guarded(self, do: Callable[..., object], *arguments: Any) -> None:
        try:
            do(*arguments)
        except Exception as error:  # noqa: BLE001 - reported to the requests
            self._end(error)

    def _send(self, request: Request) -> None:
        self._pq.send_query_params(
            request.query,
            [_array(request.ids)],
            param_types=[_INT8_ARRAY],
            param_formats=[_BINARY],
            result_format=_BINARY,
        )
        self._pq.pipeline_sync()
        self._flush()

    def _flush(self) -> None:
        if self._pq.flush():
            self._loop.add_writer(self._socket, self._guarded, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        import psycopg  # noqa: PLC0415 - optional

        statuses = psycopg.pq.ExecStatus
        self._heard = self._loop.time()
        self._pq.consume_input()
        n_asked = len(self.asked)
        while self.asked and not self._pq.is_busy():
            result = self._pq.get_result()
            if result is None:
                continue
            if result.status == statuses.PIPELINE_SYNC:
                self.asked.popleft().end(_rows(self._answered))
                self._answered = None
            elif result.status == statuses.TUPLES_OK:
                self._answered = result
            else:
                encoding = self._connection.info.encoding
                raise psycopg.errors.error_from_result(result, encoding=encoding)
        if not self.asked:  # a server that shuts down reports it, and then closes the connection
            self._pq.is_busy()
        if len(self.asked) < n_asked:
            self._on_free()

    def _watch(self) -> None:
        """Close a connection that has requests but sends nothing."""
        if not self.is_open:
            return
        if self.asked and self._loop.time() - self._heard > _ANSWER_SECONDS:
            self._end(TimeoutError(f"no answer in {_ANSWER_SECONDS:.0f} s"))
        else:
            self._loop.call_later(1, self._watch)

    def _end(self, error: Exception) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.close()
            self._on_end(self, error)


def _array(ids: NDArray[np.int64]) -> bytes:
    """Return ids as PostgreSQL's binary form of an array of bigint."""
    elements = np.empty(ids.size, _ELEMENT)
    elements["size"], elements["id"] = 8, ids
    return struct.pack(">5i", 1, 0, _INT8, ids.size, 1) + elements.tobytes()


def _rows(result: Any) -> Rows:
    if result is None:
        return np.empty(0, np.int64), []
    n = result.ntuples
    get = result.get_value
    ids = np.frombuffer(b"".join([get(k, 0) for k in range(n)]), ">i8").astype(np.int64)
    packed = [get(k, 1) for k in range(n)]
    if np.all(ids[1:] > ids[:-1]):
        return ids, packed
    order = np.argsort(ids, kind="stable")
    return ids[order], [packed[k] for k in order.tolist()]


_IDS_PER_REQUEST = 128  # rows of some 0.3 MB
_REQUESTS_PER_CONNECTION = 4  # in flight: while one is answered, others cross the network
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_TOO_MANY = ("too many", "slots are reserved")  # too many connections, in the server's words
_NAMED = 3  # missing cells


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

    def ask(self, query: str, ids: NDArray[np.int64], *, is_urgent: bool) -> PendingRows:
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
        return PendingRows(ids, requests)

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
                request.end(None, self._failure(error, _cells(request.ids)))
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
        weakref.finalize(self, pool.close).atexit = False
        return pool


def _cells(ids: NDArray[np.int64]) -> str:
    return f"cell {ids[0]}" if ids.size == 1 else f"cells {ids[0]} to {ids[-1]}"


def _missing(location: Location, ids: NDArray[np.int64]) -> FormatError:
    named = ", ".join(map(str, ids[:_NAMED].tolist()))
    more = f" and {ids.size - _NAMED} more" if ids.size > _NAMED else ""
    msg = f"{location}: packed rows of cells {named}{more} are missing"
    return FormatError(f"{msg}; load the collection again")
