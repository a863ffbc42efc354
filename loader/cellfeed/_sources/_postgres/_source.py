"""`PostgresSource`: the cells of a collection in PostgreSQL, or those that fulfil a condition."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location, StorageOptions, digest_of
from cellfeed._errors import FormatError, ParameterError, PathError, RemoteError, one_line
from cellfeed._lazy import pd
from cellfeed._sources._base import Source, StoredElement
from cellfeed._sources._postgres._database import Database, psycopg
from cellfeed._sources._postgres._elements import PostgresElement
from cellfeed._sources._postgres._layout import VERSION, ElementColumn, Metadata, quoted
from cellfeed._sources._postgres._obs import read_columns, read_ids
from cellfeed._sources._postgres._pool import PoolOfProcess

__all__ = ["PostgresSource"]

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
        Other options of libpq, such as ``password`` or ``sslmode``; ``connections``, the maximum
        number of connections of a process (8); and ``retry_seconds``, how long to retry if the
        server does not answer (120). They never appear in messages.

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
        self.location = Location.of(url)
        if storage_options is not None:
            self.location = self.location.with_options(StorageOptions(dict(storage_options)))
        self._database = Database(self.location)
        self._where = where
        self._schema, self._metadata = self._read_metadata()
        self._ids: NDArray[np.int64] | range = range(self._metadata.n_cells)
        if where is not None:
            self._ids = self._read_ids(where)
        pool = PoolOfProcess(self._database)
        self.elements = {each.name: self._element(pool, each) for each in self._metadata.elements}

    def __repr__(self) -> str:
        where = "" if self._where is None else f", where={self._where!r}"
        return f"PostgresSource({str(self.location)!r}{where})"

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return len(self._ids)

    def version(self) -> str:
        """Return a digest of this load of the collection and of the selected cells."""
        return digest_of(self._metadata.token, self.selection())

    def selection(self) -> str:
        """Return the condition that its cells fulfil; empty if it has all cells."""
        return self._where or ""

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return [each.name for each in self._metadata.obs]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        return self._read(columns, self._ids)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        ids = rows if isinstance(self._ids, range) else self._ids[rows]
        table = self._read(columns, ids, named=True)
        texts = [each.name for each in self._metadata.obs if each.dtype == "text"]
        return table.astype({name: "string" for name in columns if name in texts})

    def _read(
        self, columns: Sequence[str], ids: NDArray[np.int64] | range, *, named: bool = False
    ) -> pd.DataFrame:
        by_name = {each.name: each for each in self._metadata.obs}
        wanted = [by_name[name] for name in columns]
        table = read_columns(self._database, self._schema, wanted, ids, named=named)
        if len(table) != len(ids):
            msg = f"{self.location}: the table of cells has only {len(table)} of {len(ids)} rows"
            raise FormatError(f"{msg}; load the collection again")
        return table

    def _read_metadata(self) -> tuple[str, Metadata]:
        psycopg(self.location)
        with self._database.session() as session:
            found = dict(session.ask(_COLLECTIONS))
            readable = [name for name, may_read in found.items() if may_read]
            schema = self._database.collection
            if schema is None and len(readable) == 1:
                schema = readable[0]
            if schema is None or schema not in found:
                said = (
                    "name a collection" if schema is None else f"there is no collection {schema!r}"
                )
                listed = ", ".join(readable) or "none"
                msg = f"{self.location}: {said}; give ?collection=NAME, one of: {listed}"
                raise PathError(msg)
            rows = dict(
                session.ask(
                    f"SELECT key, value FROM {quoted(schema, 'cellfeed')} "  # noqa: S608 - it is quoted
                    "WHERE key NOT LIKE 'genes/%'"
                )
            )
        if rows.get("version") != VERSION:
            msg = f"{self.location}: {schema} has version {rows.get('version')!r} of the layout"
            raise FormatError(
                f"{msg}, but this cellfeed reads {VERSION}; load it again, or update cellfeed"
            )
        try:
            metadata = Metadata.from_rows(rows)
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{self.location}: the metadata of {schema} is damaged ({one_line(error)})"
            raise FormatError(f"{msg}; load it again") from None
        if not metadata.is_complete:
            msg = f"{self.location}: {schema} is incomplete, since loading was interrupted"
            raise FormatError(f"{msg}; run the same `cellfeed load-database` again")
        return schema, metadata

    def _read_ids(self, where: str) -> NDArray[np.int64]:
        try:
            ids = read_ids(self._database, self._schema, where)
        except RemoteError as error:
            cause = error.__context__
            state = str(getattr(cause, "sqlstate", None) or "")
            if not state.startswith(("22", "42")) or state == "42501":  # not granted
                raise
            columns = ", ".join(each.column for each in self._metadata.obs)
            said = one_line(cause) if cause is not None else ""
            msg = f"{self.location}: where={where!r} is not a valid SQL condition ({said})"
            raise ParameterError(f"{msg}; the columns are: id, name, {columns}") from None
        if not ids.size:
            msg = f"{self.location}: no cell fulfils where={where!r}; give another condition"
            raise ParameterError(msg)
        return ids

    def _element(self, pool: PoolOfProcess, column: ElementColumn) -> StoredElement:
        return PostgresElement(
            self._database, pool, self._schema, column, self._metadata.n_cells, self._ids
        )
