"""A database that a URL names: connecting to it, asking again, and describing its errors."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl, quote, urlencode

from cellfeed.bytes import Location, is_cancelled
from cellfeed.extending import CellfeedError, RemoteError, one_line
from cellfeed.rows import Layout
from cellfeed.sources import library

_DEFAULTS: dict[str, Any] = {
    "application_name": "cellfeed",
    "connect_timeout": 10,
    # A server that disappears silently is noticed after some 30 seconds.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
_STATEMENT_SECONDS = 600  # for one query
_RETRY_SECONDS = 120.0  # how long to ask again
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # in seconds, before asking again
# SQLSTATEs, or their prefixes: connections, resources, server starting or stopping, time-outs.
_PASSING = ("08", "53", "57P", "57014", "40", "58", "XX")
_REMEDIES = {
    "42501": "GRANT that to the user",
    **dict.fromkeys(("42P01", "42703", "3F000"), "load the collection again"),  # no such table
}


class Database:
    """A database; each process that receives a copy opens its own connections.

    Parameters
    ----------
    location
        A URL as libpq takes it, with ``collection=NAME`` in its query. Its options are further
        options of libpq, such as ``password``.
    options_name
        Name of the parameter by which the user passed them, for messages.

    Attributes
    ----------
    collection
        The name in the URL; None if it has none.
    """

    def __init__(self, location: Location, options_name: str = "storage_options") -> None:
        self.location, self._options_name = location, options_name
        shown, _, query = location.text.partition("?")
        url = location.scheme + shown[len(location.scheme) :]  # libpq accepts only lower case
        in_url = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))
        self.collection = in_url.pop("collection", None)
        if in_url:
            url += f"?{urlencode(in_url, quote_via=quote, safe='/')}"
        usual = {key: value for key, value in _DEFAULTS.items() if key not in in_url}
        # Arguments of psycopg's connect; they may contain a password.
        fixed = {"autocommit": True, "prepare_threshold": None}
        self.arguments: dict[str, Any] = {
            "conninfo": url, **usual, **location.options.values, **fixed
        }  # fmt: skip
        self.has_connected = False

    @property
    def driver(self) -> Any:
        """The psycopg library.

        Raises
        ------
        FormatError
            It is not installed.
        """
        return library("psycopg", self.location, what="PostgreSQL", extra="postgres")

    def failure(self, error: Any, what: str = "") -> CellfeedError:
        """Return a one-line error for an exception of psycopg.

        Parameters
        ----------
        what
            What could not be read, such as "cells 3 to 9"; empty for the database itself.
        """
        usual = f"check server, user, password, name of the database, and `{self._options_name}`"
        remedy = _REMEDIES.get(error.sqlstate, usual)
        named = f"{self.location}: {what}" if what else f"{self.location}:"
        return RemoteError(f"{named} cannot be read ({one_line(error)}); {remedy}")


class Session:
    """A connection that is opened when needed, reopened if it was dropped, and closed at the end.

    Parameters
    ----------
    database
        The database.
    for_writing
        Whether to allow changes.
    """

    def __init__(self, database: Database, *, for_writing: bool = False) -> None:
        self._database, self._for_writing = database, for_writing
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
            database, driver = self._database, self._database.driver
            try:
                arguments = {**database.arguments, "cursor_factory": driver.RawCursor}
                self._connection = driver.connect(**arguments)
            except driver.Error as error:
                if database.has_connected:
                    raise
                raise database.failure(error) from None
            database.has_connected = True
            self._connection.execute(
                f"SET statement_timeout = {_STATEMENT_SECONDS * 1000}; "
                f"SET default_transaction_read_only = {'off' if self._for_writing else 'on'}"
            )
        return self._connection

    def ask(
        self,
        query: str,
        parameters: tuple[Any, ...] = (),
        what: str = "",
        gives_up: Callable[[Exception], bool] = lambda error: False,  # noqa: ARG005
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a read-only query; ask again while the error may pass.

        Parameters
        ----------
        query, parameters
            The query, and the values of ``$1``, ``$2`` and so on.
        what
            What is read, for messages; see `Database.failure`.
        gives_up
            Called with each error that may pass; if it returns True, the query is not retried.

        Raises
        ------
        RemoteError
            The server does not answer.
        """
        driver, pause = self._database.driver, _FIRST_PAUSE
        latest = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                found = self.connection().execute(query, parameters or None, binary=True)
                rows: list[tuple[Any, ...]] = found.fetchall()
            except driver.Error as error:
                of_connection = isinstance(error, driver.OperationalError | driver.InterfaceError)
                state = error.sqlstate
                may_pass = state.startswith(_PASSING) if state else of_connection
                if not may_pass or gives_up(error) or time.monotonic() > latest or is_cancelled():
                    raise self._database.failure(error, what) from None
            else:
                return rows
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObsColumn:
    """An obs column; its column in the table of cells has the same name.

    Parameters
    ----------
    name
        Its name.
    dtype
        Pandas' name of the dtype; "text", or "category".
    categories
        Categories of "category", text or numbers; None for other dtypes.
    is_ordered
        Whether categories have an order.
    """

    name: str
    dtype: str
    categories: list[Any] | None = None
    is_ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementColumn:
    """An element; its column in the table of packed rows has the same name.

    Parameters
    ----------
    name
        Name of the element.
    layout, dtype
        Layout and dtype of the element; the dtype by its NumPy name.
    row_shape
        Shape of a row.
    genes
        Key of the metadata with the names of its columns; None if they have none.
    n_bytes
        Size of all packed rows.
    """

    name: str
    layout: Layout
    dtype: str
    row_shape: Sequence[int]
    genes: str | None
    n_bytes: int


def quoted(*names: str) -> str:
    """Return names quoted for SQL, joined by dots.

    Examples
    --------
    >>> quoted("plates", "packed")
    '"plates"."packed"'
    """
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)
