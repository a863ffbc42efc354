"""One connection that reads rows by key, with several queries in libpq's pipeline.

All of it runs in the thread of `loop`.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Connection", "Request", "Rows"]

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

    def give_up(self) -> None:
        """Cancel the request."""
        self.answer.cancel()

    def give(self, rows: Rows) -> None:
        """Set the answer, unless the request was cancelled."""
        with suppress(InvalidStateError):
            self.answer.set_result(rows)

    def fail(self, error: Exception) -> None:
        """Set the error."""
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


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
        from psycopg.pq import ExecStatus  # noqa: PLC0415 - optional

        self._heard = self._loop.time()
        self._pq.consume_input()
        n_asked = len(self.asked)
        while self.asked and not self._pq.is_busy():
            result = self._pq.get_result()
            if result is None:
                continue
            if result.status == ExecStatus.PIPELINE_SYNC:
                self.asked.popleft().give(_rows(self._answered))
                self._answered = None
            elif result.status == ExecStatus.TUPLES_OK:
                self._answered = result
            else:
                raise _error_of(result, self._connection)
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


def _error_of(result: Any, connection: Any) -> Exception:
    from psycopg import errors  # noqa: PLC0415 - optional

    error: Exception = errors.error_from_result(result, encoding=connection.info.encoding)
    return error
