"""A database that a URL names: connecting to it, and describing its errors."""

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from cellfeed.bytes import Location, is_cancelled
from cellfeed.extending import CellfeedError, ParameterError, RemoteError, one_line
from cellfeed.rows import Layout
from cellfeed.sources import library

_Result = TypeVar("_Result")

_OWN_OPTIONS = ("connections", "retry_seconds")
_DEFAULTS: dict[str, Any] = {
    "application_name": "cellfeed",
    "connect_timeout": 10,
    # A server that disappears silently is noticed after some 30 seconds.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
_STATEMENT_SECONDS = 600  # for one query of metadata or obs
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # in seconds, before asking again
# SQLSTATEs, or their prefixes: connections, resources, server starting or stopping, time-outs.
_PASSING = ("08", "53", "57P", "57014", "40", "58", "XX")
_NOT_GRANTED, _DROPPED = "42501", ("42P01", "42703", "3F000")  # undefined table, column, schema
_LASTING = (
    "password",
    "authentication",
    "pg_hba",
    "does not exist",
    "no encryption",
    "certificate",
)


def psycopg(location: Location) -> Any:
    """Return the psycopg library.

    Raises
    ------
    FormatError
        psycopg is not installed.
    """
    return library("psycopg", location, what="PostgreSQL", extra="postgres")


class Database:
    """A database; each process that receives a copy opens its own connections.

    Parameters
    ----------
    location
        A URL as libpq takes it, with ``collection=NAME`` in its query. Its options are further
        options of libpq, such as ``password``; ``connections``, the maximum number of connections
        of a process; and ``retry_seconds``, how long to retry if the server does not answer.
    options_name
        Name of the parameter by which the user passed them, for messages.
    """

    def __init__(self, location: Location, options_name: str = "storage_options") -> None:
        self.location, self._options_name = location, options_name
        values = location.options.values
        self.n_connections = int(_number(values, "connections", 8, int))
        self.retry_seconds = _number(values, "retry_seconds", 120, float)
        if self.n_connections < 1:
            msg = f"`connections >= 1` must hold, but got connections={self.n_connections}"
            raise ParameterError(msg)
        shown, _, query = location.text.partition("?")
        url = location.scheme + shown[len(location.scheme) :]  # libpq accepts only lower case
        in_url = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))
        self.collection = in_url.pop("collection", None)
        if in_url:
            url += f"?{urlencode(in_url, quote_via=quote, safe='/')}"
        given = {key: value for key, value in values.items() if key not in _OWN_OPTIONS}
        usual = {key: value for key, value in _DEFAULTS.items() if key not in in_url}
        # Arguments of psycopg's connect; they may contain a password.
        fixed = {"autocommit": True, "prepare_threshold": None}
        self.arguments: dict[str, Any] = {"conninfo": url, **usual, **given, **fixed}
        self.has_connected = False

    def retried(self, ask: Callable[[], _Result], what: str = "") -> _Result:
        """Call a function, and retry it while the error may pass and there is time.

        Parameters
        ----------
        what
            What is read, for messages; see `failure`.

        Raises
        ------
        RemoteError
            The last attempt failed.
        """
        driver = psycopg(self.location)
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return ask()
            except (driver.Error, TimeoutError) as error:
                is_late = time.monotonic() - began > self.retry_seconds
                if not may_pass(error) or is_late or is_cancelled():
                    raise self.failure(error, what) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def failure(self, error: BaseException, what: str = "") -> CellfeedError:
        """Return a one-line error for an exception of psycopg.

        Parameters
        ----------
        what
            What could not be read, such as "cells 3 to 9"; empty for the database itself.
        """
        state = str(getattr(error, "sqlstate", None) or "")
        if may_pass(error):
            remedy = f"check that the server runs, and `{self._options_name}`"
        elif state == _NOT_GRANTED:
            remedy = "GRANT that to the user"
        elif state in _DROPPED:
            remedy = "load the collection again"
        else:
            remedy = f"check user, password, name of the database, and `{self._options_name}`"
        named = f"{self.location}: {what}" if what else f"{self.location}:"
        return RemoteError(f"{named} cannot be read ({one_line(error)}); {remedy}")


@cache
def _connection_class(driver: Any) -> Any:
    """Return a class of connections that do not wait forever, which those of psycopg do."""

    class Connection(driver.Connection):  # type: ignore[misc]
        seconds = _STATEMENT_SECONDS

        def wait(self, steps: Any, *args: Any, **options: Any) -> Any:
            return super().wait(_unless_silent(steps, self.seconds), *args, **options)

    return Connection


def _unless_silent(steps: Any, seconds: float) -> Generator[Any, Any, Any]:
    """Go through the steps of a query; raise if the server sends nothing, or nobody waits for it.

    Raises
    ------
    TimeoutError
        The server sent nothing for ``seconds``, or the process is exiting.
    """
    heard = time.monotonic()
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if ready:
                heard = time.monotonic()
            elif time.monotonic() - heard > seconds or is_cancelled():
                raise TimeoutError(f"no answer in {time.monotonic() - heard:.0f} s")
            wanted = steps.send(ready)
    except StopIteration as end:
        return end.value


class Session:
    """A connection that is opened when needed, reopened if it was dropped, and closed at the end.

    Parameters
    ----------
    database
        The database.
    for_writing
        Whether to allow changes.
    seconds
        How long the server may send nothing before another connection is opened.
    """

    def __init__(
        self,
        database: Database,
        *,
        for_writing: bool = False,
        seconds: float = _STATEMENT_SECONDS,
    ) -> None:
        self._database, self._for_writing, self._seconds = database, for_writing, seconds
        self._connection: Any = None
        self._process = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None and not self._connection.closed

    def connection(self) -> Any:
        """Return the connection.

        Raises
        ------
        RemoteError
            None was ever opened; this is not retried.
        """
        if not self.is_open:
            database, driver = self._database, psycopg(self._database.location)
            try:
                self._connection = _connection_class(driver).connect(**database.arguments)
            except driver.Error as error:
                if database.has_connected:
                    raise
                raise database.failure(error) from None
            database.has_connected = True
            self._connection.seconds = self._seconds
            self._connection.execute(
                f"SET statement_timeout = {_STATEMENT_SECONDS * 1000}; "
                f"SET default_transaction_read_only = {'off' if self._for_writing else 'on'}"
            )
        return self._connection

    def ask(
        self, query: str, parameters: tuple[Any, ...] = (), what: str = "", *, binary: bool = False
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a read-only query.

        Parameters
        ----------
        query, parameters
            The query, and what stands for its placeholders.
        what
            What is read, for messages; see `Database.failure`.
        binary
            Whether values are sent in binary form.

        Raises
        ------
        RemoteError
            The server does not answer.
        """

        def ask() -> list[tuple[Any, ...]]:
            try:
                found = self.connection().execute(query, parameters or None, binary=binary)
                rows: list[tuple[Any, ...]] = found.fetchall()
            except TimeoutError:
                self.close()
                raise
            return rows

        return self._database.retried(ask, what)

    def close(self) -> None:
        """Close the connection; in a fork, it is that of the other process."""
        if self._connection is not None and self._process == os.getpid():
            self._connection.close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def may_pass(error: BaseException) -> bool:
    """Return whether connecting or asking again may help."""
    if isinstance(error, OSError | TimeoutError):
        return not isinstance(error, CellfeedError)
    state = getattr(error, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_PASSING)
    if type(error).__name__ not in ("OperationalError", "InterfaceError", "ConnectionTimeout"):
        return False
    said = str(error).lower()
    return "starting up" in said or not any(word in said for word in _LASTING)


def _number(values: Mapping[str, Any], name: str, usual: float, kind: type[float]) -> float:
    given = values.get(name, usual)
    try:
        return kind(given)
    except (TypeError, ValueError, OverflowError):
        msg = f"`{name}` must be a number, but got {name}={given!r}"
    raise ParameterError(msg)


# The layout of a collection in a database: tables, columns, and the metadata that names them.
#
# A collection is a schema of the database, with the collection's name and three tables:
#
# - ``cellfeed (key text PRIMARY KEY, value jsonb)``: the metadata;
# - ``cells (id bigint PRIMARY KEY, name text, ...)``: a row for each cell, numbered from 0, and a
#   column for each obs column;
# - ``packed (id bigint PRIMARY KEY, ...)``: a row for each cell, and a bytea column for each
#   element; `cellfeed.storages.postgres._packed` describes its contents.
#
# docs/how-to/postgres.md documents the layout.

VERSION = 1
_LONGEST = 63  # maximum length of a name in PostgreSQL
_RESERVED = (
    "id", "name", "tableoid", "xmin", "cmin", "xmax", "cmax", "ctid",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ObsColumn:
    """An obs column, and its column in the table of cells.

    Parameters
    ----------
    name, column
        Names in obs, and in the table.
    dtype
        Pandas' name of the dtype; "text", or "category".
    categories
        Categories of "category", text or numbers; None for other dtypes.
    is_ordered
        Whether categories have an order.
    """

    name: str
    column: str
    dtype: str
    categories: Sequence[Any] | None = None
    is_ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementColumn:
    """An element, and its column in the table of packed rows.

    Parameters
    ----------
    name, column
        Name of the element, and of its column in the table.
    layout, dtype
        Layout and dtype of the element; the dtype by its NumPy name.
    row_shape
        Shape of a row.
    genes
        Key of the metadata with the names of its columns; None if they have none.
    n_bytes
        Size of all packed rows; 0 while they are being written.
    """

    name: str
    column: str
    layout: Layout
    dtype: str
    row_shape: Sequence[int]
    genes: str | None
    n_bytes: int = 0


def column_names(names: Iterable[str], otherwise: str) -> list[str]:
    """Return a column name for each name: the name itself if PostgreSQL accepts it.

    Examples
    --------
    >>> column_names(["plate", "id", "x" * 70], "obs")
    ['plate', 'obs_1', 'obs_2']
    """
    taken = list[str]()
    for number, name in enumerate(names):
        own = name
        if not name or len(name.encode()) > _LONGEST or name in _RESERVED or name in taken:
            own = f"{otherwise}_{number}"
        while own in taken:
            own += "_"
        taken.append(own)
    return taken


def escaped(sql: str) -> str:
    """Return SQL without placeholders, escaped for use with parameters of psycopg.

    Examples
    --------
    >>> escaped(quoted("% mito"))
    '"%% mito"'
    """
    return sql.replace("%", "%%")


def quoted(*names: str) -> str:
    """Return names quoted for SQL, joined by dots.

    Examples
    --------
    >>> quoted("plates", "packed")
    '"plates"."packed"'
    """
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)
