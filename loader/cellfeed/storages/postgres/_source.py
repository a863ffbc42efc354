"""`PostgresSource`: the cells of a collection in PostgreSQL, or those that fulfil a condition."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import LifoQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import LOOK_UP_SECONDS, Location, digest_of, is_cancelled
from cellfeed.extending import FormatError, ParameterError, PathError, RemoteError, one_line, pd
from cellfeed.rows import CsrRows
from cellfeed.sources import OpenedPerProcess, Runs, Source, Storage, StoredElement, expand
from cellfeed.storages.postgres._database import (
    VERSION,
    Database,
    ElementColumn,
    ObsColumn,
    Session,
    quoted,
)
from cellfeed.storages.postgres._packed import PackedRowError, unpack_rows

# Rows by key, over the connections of a process.

_CONNECTIONS = 8  # of a process
_TOO_MANY = ("too many", "slots are reserved")  # too many connections, in the server's words
_NAMED = 3  # missing cells
_IDS_PER_REQUEST = 512
_REQUEST_BYTES = 1 << 20  # of rows, about


class Pool(OpenedPerProcess):
    """Threads of a process, each of which asks for rows over a connection, opened when needed.

    They end with this object.

    Parameters
    ----------
    database
        The database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def _open(self) -> tuple[ThreadPoolExecutor, Sequence[Session], LifoQueue[Session]]:
        sessions = [Session(self._database) for _ in range(_CONNECTIONS)]
        idle = LifoQueue[Session]()  # so that open ones are taken first
        for session in sessions:
            idle.put(session)
        threads = ThreadPoolExecutor(_CONNECTIONS, "cellfeed-postgres")
        weakref.finalize(self, _end, threads, os.getpid())
        return threads, sessions, idle

    def ask(self, query: str, ids: Sequence[int]) -> Future[list[bytes]]:
        """Request the packed row of each id.

        Parameters
        ----------
        query
            The query, with ``ANY($1)`` for the ids; returns id and packed row.
        ids
            Ids of cells, ascending.

        Returns
        -------
        The rows; or a `RemoteError` if the server does not answer, and a `FormatError` if rows are
        missing.
        """
        threads: ThreadPoolExecutor = self()[0]
        return threads.submit(self._answer, query, ids)

    def _answer(self, query: str, ids: Sequence[int]) -> list[bytes]:
        _, sessions, idle = self()

        def is_left_out(error: Exception) -> bool:
            has_no_slot = any(words in str(error) for words in _TOO_MANY)
            return has_no_slot and any(each.is_open for each in sessions)

        cells = f"cell {ids[0]}" if len(ids) == 1 else f"cells {ids[0]} to {ids[-1]}"
        while True:
            session = idle.get()
            try:
                found = dict(session.ask(query, (ids,), cells, gives_up=is_left_out))
            except Exception as error:
                if is_left_out(error):
                    continue  # with another session: the server has no connection for this one
                idle.put(session)
                raise
            idle.put(session)
            break
        missing = [each for each in ids if found.get(each) is None]
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            named = ", ".join(map(str, missing[:_NAMED]))
            msg = f"{self._database.location}: packed rows of cells {named}{more} are missing"
            raise FormatError(f"{msg}; load the collection again")
        return [found[each] for each in ids]


def _end(threads: ThreadPoolExecutor, process: int) -> None:
    if process == os.getpid():  # they did not survive a fork
        threads.shutdown(wait=False, cancel_futures=True)


class PendingRows:
    """Rows that were requested; what no connection has begun is cancelled if it is dropped.

    Parameters
    ----------
    ids
        Ids of the rows, ascending, int64.
    parts
        Answers with the rows of consecutive ids.
    location
        The database, for messages.
    """

    def __init__(
        self, ids: NDArray[np.int64], parts: list[Future[list[bytes]]], location: Location
    ) -> None:
        self._ids, self.parts, self._location = ids, parts, location
        weakref.finalize(self, _cancel, parts).atexit = False

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the positions of ids among these; None unless all are found."""
        at = np.searchsorted(self._ids, ids)
        if not at.size or at[-1] == self._ids.size or not np.array_equal(self._ids[at], ids):
            return None
        return at

    def packed(self) -> list[bytes]:
        """Wait for the rows; return them in order."""
        rows = list[bytes]()
        for part in self.parts:
            while not wait([part], LOOK_UP_SECONDS).done:
                if is_cancelled():
                    msg = f"{self._location}: reading was cancelled, since the process is exiting"
                    raise RemoteError(msg)
            try:
                rows += part.result()
            except Exception:
                self._ids = self._ids[:0]  # so that a retry requests them again
                self.parts.clear()  # which keep the error, and with it this object
                raise
        return rows


def _cancel(parts: Sequence[Future[list[bytes]]]) -> None:
    for part in parts:
        part.cancel()


# Elements whose rows are packed in a table, and read by key.


class PostgresElement(StoredElement):
    """A column of the table of packed rows.

    Parameters
    ----------
    database, pool
        The database, and the connections that read it.
    schema, column
        The schema of the collection, and the metadata of the column.
    n_stored
        Number of cells of the whole collection.
    ids
        The id of each cell in the table, ascending, int64.
    """

    def __init__(
        self,
        database: Database,
        pool: Pool,
        schema: str,
        column: ElementColumn,
        n_stored: int,
        ids: NDArray[np.int64] | range,
    ) -> None:
        self._database, self._pool, self._schema, self._ids = database, pool, schema, ids
        self._column = column
        self.shape = (len(ids), *column.row_shape)
        self.dtype = np.dtype(column.dtype)
        self.layout = column.layout
        self.var = None if column.genes is None else column.genes.removeprefix("genes/")
        self.expected_row_bytes = max(1.0, column.n_bytes / max(1, n_stored))
        table, packed = quoted(schema, "packed"), quoted(column.name)
        self._query = f"SELECT id, {packed} FROM {table} WHERE id = ANY($1::bigint[])"  # noqa: S608
        # Replaced when it changes, since two threads read it.
        self._pending = tuple[weakref.ref[PendingRows], ...]()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": ()}

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        if self._column.genes is None:
            return super().var_names()
        table = quoted(self._schema, "cellfeed")
        query = f"SELECT value FROM {table} WHERE key = $1"  # noqa: S608
        with Session(self._database) as session:
            found = session.ask(query, (self._column.genes,))
        if not found or len(found[0][0]) != self.shape[1]:
            msg = f"{self._database.location}: the names of genes are damaged"
            raise FormatError(f"{msg}; load the collection again")
        return np.array(found[0][0], object)

    def stored_bytes(self) -> int:
        """Return the size of the packed rows in bytes."""
        return round(self.expected_row_bytes * len(self._ids))

    def codec(self) -> str:
        """Return the encoding of rows."""
        return "zstd, each cell"

    def expect(self, runs: Runs) -> PendingRows:
        """Request rows, without waiting."""
        pending = self._asked(self._ids_of(runs))
        self._pending = (*(each for each in self._pending if each()), weakref.ref(pending))
        return pending

    def _asked(self, ids: NDArray[np.int64]) -> PendingRows:
        n = int(min(max(_REQUEST_BYTES // self.expected_row_bytes, 1), _IDS_PER_REQUEST))
        some = [ids[k : k + n].tolist() for k in range(0, ids.size, n)]
        parts = [self._pool.ask(self._query, each) for each in some]
        return PendingRows(ids, parts, self._database.location)

    def _packed(self, ids: NDArray[np.int64]) -> list[bytes]:
        """Wait for packed rows; request them unless they were expected."""
        for pending in (each() for each in self._pending):
            at = None if pending is None else pending.positions(ids)
            if pending is not None and at is not None:
                rows = pending.packed()
                return rows if at.size == len(rows) else [rows[k] for k in at.tolist()]
        return self._asked(ids).packed()

    def read_rows(self, runs: Runs) -> CsrRows | NDArray[Any]:
        """Return rows: wait for those that were expected, and request others."""
        ids = self._ids_of(runs)
        is_dense = self.layout == "dense"
        n_columns = math.prod(self._column.row_shape)
        packed = self._packed(ids)
        try:
            indptr, indices, data = unpack_rows(packed, self.dtype, n_columns, is_dense=is_dense)
        except PackedRowError as error:
            msg = f"{self._database.location}: `{self._column.name}` of cell {ids[error.row]}"
            raise FormatError(f"{msg} is damaged; load the collection again") from None
        if is_dense:
            return data.reshape(len(packed), *self.shape[1:])
        return CsrRows(indptr, indices, data, n_columns)

    def _ids_of(self, runs: Runs) -> NDArray[np.int64]:
        rows = expand(runs)
        return rows if isinstance(self._ids, range) else self._ids[rows]


_ROWS = 50_000  # rows of obs that are Python objects at a time

# Including collections that the user may not read, which information_schema does not show.
_COLLECTIONS = """
SELECT nspname, has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE relname = 'cellfeed' AND relkind IN ('r', 'p', 'v', 'f') ORDER BY 1
"""


class PostgresSource(Source):
    """Cells of a collection in PostgreSQL, optionally those that fulfil a condition.

    Pass it to `open_collection` in place of a URL; to read all cells, the URL suffices.
    `load_database` writes such collections. psycopg (``pip install 'cellfeed[postgres]'``) reads
    them by key over several connections, and each process opens its own.

    Parameters
    ----------
    url
        URL as libpq takes it, with the name of the collection:
        ``postgresql://user@host/db?collection=NAME``. The name may be left out if the database has
        only one collection.
    where
        SQL condition on the columns of the table of cells, such as ``"cell_type = 'B' AND n_counts
        > 500"``; all cells if None. The selected cells are numbered from 0, by ascending id.
    storage_options
        Other options of libpq, such as ``password`` or ``sslmode``. They never appear in messages.

    Raises
    ------
    RemoteError
        The server cannot be reached, or refuses.
    PathError
        There is no such collection.
    FormatError
        The collection has another version or is incomplete, or psycopg is not installed.
    ParameterError
        ``where`` is not a valid SQL condition, or no cell fulfils it.

    Examples
    --------
    >>> from cellfeed import PostgresSource, open_collection
    >>> url = "postgresql://reader@host/cells?collection=plates"
    >>> source = PostgresSource(url, where="cell_type = 'B'")  # doctest: +SKIP
    >>> open_collection([source], obs=["donor"])  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        where: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.location = Location.of(url, storage_options)
        self._database = Database(self.location)
        self._where = where
        with Session(self._database) as session:
            found = dict(session.ask(_COLLECTIONS))
            readable = [name for name, may_read in found.items() if may_read]
            schema = self._database.collection
            if schema is None and len(readable) == 1:
                schema = readable[0]
            if schema is None or schema not in found:
                said = f"there is no collection {schema!r}" if schema else "name a collection"
                listed = ", ".join(readable) or "none"
                msg = f"{self.location}: {said}; give ?collection=NAME, one of: {listed}"
                raise PathError(msg)
            table = quoted(schema, "cellfeed")
            query = f"SELECT key, value FROM {table} WHERE key NOT LIKE 'genes/%'"  # noqa: S608
            rows = dict(session.ask(query))
        if rows.get("version") != VERSION:
            msg = f"{self.location}: {schema} has version {rows.get('version')!r} of the layout"
            msg = f"{msg}, but this cellfeed reads {VERSION}; load it again, or update cellfeed"
            raise FormatError(msg)
        try:
            self._obs = {each["name"]: ObsColumn(**each) for each in rows["obs"]}
            elements = [ElementColumn(**each) for each in rows["elements"]]
            n_cells, self._token = int(rows["n_cells"]), str(rows["token"])
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{self.location}: the metadata of {schema} is damaged ({one_line(error)})"
            raise FormatError(f"{msg}; load it again") from None
        self._cells = quoted(schema, "cells")
        self._ids: NDArray[np.int64] | range = range(n_cells)
        if where is not None:
            self._ids = self._read_ids(where)
        pool = Pool(self._database)
        self.elements = {
            each.name: PostgresElement(self._database, pool, schema, each, n_cells, self._ids)
            for each in elements
        }

    def __repr__(self) -> str:
        where = "" if self._where is None else f", where={self._where!r}"
        return f"PostgresSource({str(self.location)!r}{where})"

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return len(self._ids)

    def version(self) -> str:
        """Return a digest of this load of the collection and of the selected cells."""
        return digest_of(self._token, self.selection())

    def selection(self) -> str:
        """Return the condition that its cells fulfil; empty if it has all cells."""
        return self._where or ""

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return [*self._obs]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        return self._read(columns, self._ids)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        ids = rows if isinstance(self._ids, range) else self._ids[rows]
        table = self._read([*columns, "name"], ids)
        names = pd.Index(table.pop("name").array, dtype=object)
        texts = [name for name in columns if self._obs[name].dtype == "text"]
        return table.astype(dict.fromkeys(texts, "string")).set_axis(names)

    def _read(self, columns: Sequence[str], ids: NDArray[np.int64] | range) -> pd.DataFrame:
        """Read columns of the cells with these ids, ascending; text becomes categorical."""
        dtypes = dict[str, Any]()
        for name in columns:
            each = self._obs.get(name)  # `name` is not among them
            dtypes[name] = object if each is None else each.dtype
            if each is not None and each.dtype in ("text", "category"):
                dtypes[name] = pd.CategoricalDtype(each.categories, each.is_ordered)
        parts: dict[str, list[pd.Series[Any]]] = {name: [] for name in columns}
        n_read = 0
        for rows in self._pages(columns, ids):
            n_read += len(rows)
            by_column = [*zip(*rows, strict=True)] or [()] * (1 + len(columns))
            for name, values in zip(columns, by_column[1:], strict=True):
                parts[name].append(pd.Series(values, dtype=dtypes[name]))
        if n_read != len(ids):
            msg = f"{self.location}: the table of cells has only {n_read} of {len(ids)} rows"
            raise FormatError(f"{msg}; load the collection again")
        table = {
            name: pd.api.types.union_categoricals(each)
            if isinstance(dtypes[name], pd.CategoricalDtype)
            else pd.concat(each).array
            for name, each in parts.items()
        }
        return pd.DataFrame(table, index=pd.RangeIndex(n_read))

    def _pages(
        self, columns: Sequence[str], ids: NDArray[np.int64] | range, where: str = "TRUE"
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield ids and columns of cells that fulfil a condition, by ascending id, in parts."""
        selected = ", ".join(["id", *map(quoted, columns)])
        some_ids = "id BETWEEN $1 AND $2" if isinstance(ids, range) else "id = ANY($1)"
        query = f"SELECT {selected} FROM {self._cells} WHERE ({where}\n) AND {some_ids} ORDER BY id"  # noqa: S608
        with Session(self._database) as session:
            for k in range(0, max(1, len(ids)), _ROWS):
                some = ids[k : k + _ROWS]
                parameters = (k, k + _ROWS - 1) if isinstance(some, range) else (some.tolist(),)
                yield session.ask(query, parameters)

    def _read_ids(self, where: str) -> NDArray[np.int64]:
        try:
            pages = self._pages([], self._ids, where)
            parts = [np.fromiter((id_ for (id_,) in rows), np.int64) for rows in pages]
        except RemoteError as error:
            cause: Any = error.__context__
            state = str(getattr(cause, "sqlstate", None) or "")
            if not state.startswith(("22", "42")) or state == "42501":  # not granted
                raise
            msg = f"{self.location}: where={where!r} is not a valid SQL condition"
            msg = f"{msg} ({one_line(cause)}); the columns are: id, name, {', '.join(self._obs)}"
            raise ParameterError(msg) from None
        ids = np.concatenate(parts)
        if not ids.size:
            msg = f"{self.location}: no cell fulfils where={where!r}; give another condition"
            raise ParameterError(msg)
        return ids


# URLs of PostgreSQL servers.


POSTGRES = Storage(
    name="PostgreSQL",
    open=lambda location, _: [PostgresSource(location)],
    schemes=("postgresql", "postgres"),
)
