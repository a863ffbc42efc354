"""Elements whose rows are packed in a table, and read by key."""

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._errors import FormatError
from cellfeed._runs import Runs, expand
from cellfeed._sources._base import StoredElement
from cellfeed._sources._postgres._database import Database
from cellfeed._sources._postgres._layout import ElementColumn, escaped, quoted
from cellfeed._sources._postgres._pool import Coming, PoolOfProcess

__all__ = ["PostgresElement"]


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
        pool: PoolOfProcess,
        schema: str,
        column: ElementColumn,
        n_stored: int,
        ids: NDArray[np.int64] | range,
    ) -> None:
        self._database, self._pool, self._schema, self._ids = database, pool, schema, ids
        self._column = column
        self.shape = (len(ids), *column.row_shape)
        self.dtype = column.numpy_dtype
        self.layout = column.layout
        self.var = None if column.genes is None else column.genes.removeprefix("genes/")
        self.expected_row_bytes = max(1.0, column.n_bytes / max(1, n_stored))
        table, packed = quoted(schema, "packed"), quoted(column.column)
        self._query = f"SELECT id, {packed} FROM {table} WHERE id = ANY($1)"  # noqa: S608
        self._coming = tuple[weakref.ref[Coming], ...]()  # replaced, since two threads read it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coming": ()}

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        if self._column.genes is None:
            return super().var_names()
        table = escaped(quoted(self._schema, "cellfeed"))
        query = f"SELECT value FROM {table} WHERE key = %s"  # noqa: S608
        found = self._database.ask(query, (self._column.genes,))
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

    def expect(self, runs: Runs) -> object:
        """Request rows, without waiting."""
        coming = self._pool().ask(self._query, self._ids_of(runs), is_urgent=False)
        self._coming = (*(each for each in self._coming if each()), weakref.ref(coming))
        return coming

    def read_rows(self, runs: Runs) -> CsrRows | NDArray[Any]:
        """Return rows: wait for announced ones, and request the others."""
        from cellfeed._chunks._packed import PackedRowError, unpack_rows  # noqa: PLC0415 - compiles

        ids = self._ids_of(runs)
        is_dense = self.layout == "dense"
        n_columns = self._column.n_columns
        packed = self._packed(ids) if ids.size else []
        try:
            indptr, indices, data = unpack_rows(packed, self.dtype, n_columns, is_dense=is_dense)
        except PackedRowError as error:
            msg = f"{self._database.location}: `{self._column.name}` of cell {ids[error.row]}"
            raise FormatError(f"{msg} is damaged; load the collection again") from None
        if is_dense:
            return data.reshape(ids.size, *self.shape[1:])
        return CsrRows(indptr, indices, data, n_columns)

    def _packed(self, ids: NDArray[np.int64]) -> list[bytes]:
        for coming in (each() for each in self._coming):
            at = None if coming is None else coming.positions(ids)
            if coming is not None and at is not None:
                rows = coming.packed(self._database.location)
                return rows if at.size == len(rows) else [rows[k] for k in at.tolist()]
        asked = self._pool().ask(self._query, ids, is_urgent=True)
        return asked.packed(self._database.location)

    def _ids_of(self, runs: Runs) -> NDArray[np.int64]:
        rows = expand(runs)
        return rows if isinstance(self._ids, range) else self._ids[rows]
