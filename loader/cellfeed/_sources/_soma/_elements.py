"""Arrays of an experiment with one row per cell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._chunks import SlowRead, rows_of_coordinates
from cellfeed._errors import FormatError
from cellfeed._layouts import PiecedCsr
from cellfeed._runs import Runs, expand, merge_consecutive
from cellfeed._sources._base import StoredElement, why_not_cast
from cellfeed._sources._soma._store import SomaStore
from cellfeed._sources._soma._tables import name_column, read_joinids, read_table
from cellfeed._sources._soma._tiledb import UnknownLayoutError, tiled_csr

__all__ = ["DenseElement", "SomaElement", "SparseElement"]

_REMEDY = "write it again with tiledbsoma.io"


class SomaElement(StoredElement):
    """An array of an experiment.

    Parameters
    ----------
    store
        The experiment.
    path
        Its path in the experiment, such as ``ms/RNA/X/data``.
    var
        The table that names its columns, such as ``ms/RNA/var``; None if they have no names.
    joinids
        The row of the array for each cell, ascending, int64.
    """

    def __init__(
        self, store: SomaStore, path: str, var: str | None, joinids: NDArray[np.int64] | range
    ) -> None:
        self._store, self._path, self._joinids = store, path, joinids
        self.var = var
        with store.failures_named(path):
            array = self._array()
            table = None if var is None else store.at(var)
            columns = array.shape[1] if table is None else len(read_joinids(table, None))
            self.shape = (len(joinids), columns)
            self.dtype = np.dtype(array.schema.field("soma_data").type.to_pandas_dtype())
            options = array.schema_config_options()
            tile = json.loads(options.dims)["soma_dim_0"]["tile"]
            filters = json.loads(options.attrs)["soma_data"]["filters"]
        self.rows_per_chunk = float(max(1, min(int(tile), len(joinids))))
        self._codec = " ".join(each["name"].lower() for each in filters or ()) or "none"

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        if self.var is None:
            return super().var_names()
        with self._store.failures_named(self.var):
            table = self._store.at(self.var)
            column = name_column(table, "var")
            named = read_table(table, [] if column is None else [column], None)
        if not np.array_equal(named.index.to_numpy(), np.arange(len(named))):
            msg = f"{self._store.location}: `{self.var}` has gaps in soma_joinid"
            raise FormatError(f"{msg}; write the experiment again with all its genes")
        return super().var_names() if column is None else named[column].to_numpy(object)

    def stored_bytes(self) -> int:
        """Return the size of its files in bytes, 0 if they are not on this machine."""
        folder = self._folder()
        if folder is None:
            return 0
        return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())

    def codec(self) -> str:
        """Return TileDB's compression of the values."""
        return self._codec

    def _folder(self) -> Path | None:
        """Return its local folder, if there is one."""
        uri: str = self._array().uri.removeprefix("file://")  # such paths are not percent-encoded
        return None if "://" in uri else Path(uri)

    def _array(self) -> Any:
        return self._store.at(self._path)

    def _ids(self, runs: Runs) -> NDArray[np.int64]:
        """Return the rows of the array for the cells of runs."""
        rows = expand(runs)
        return rows if isinstance(self._joinids, range) else self._joinids[rows]

    def _wrong(self, runs: Runs, error: Exception) -> FormatError:
        msg = f"{self._store.location}: `{self._path}`, rows {runs[0, 0]} to {runs[-1, 1] - 1}"
        return FormatError(f"{msg}: {error}; the experiment may be damaged")


class SparseElement(SomaElement):
    """A sparse array, whose tiles are decoded here, or which each fetch queries once."""

    layout = "csr"

    def __init__(
        self, store: SomaStore, path: str, var: str | None, joinids: NDArray[np.int64] | range
    ) -> None:
        super().__init__(store, path, var, joinids)
        self._tiled, self._slow = None, None
        with store.failures_named(path):
            folder = self._folder()
        if folder is None:
            return
        rows = None if isinstance(joinids, range) else joinids
        try:
            self._tiled = tiled_csr(folder, path, store.timestamp, rows, self.shape[1])
        except UnknownLayoutError as reason:
            self._slow = SlowRead("tiledbsoma", str(reason), _REMEDY)
        if self._tiled is not None:
            self.rows_per_chunk = self._tiled.rows_per_chunk(self.shape[0])

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why tiles are not decoded here; None if they are, or are not local."""
        if self._tiled is None:
            return self._slow
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> PiecedCsr | None:
        """Return where rows lie, if tiles are decoded here."""
        return self._tiled

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows; TileDB returns elements in tile order, so they are sorted by row."""
        ids = self._ids(runs)
        tables = []
        if ids.size:
            with self._store.failures_named(self._path):
                tables = [*self._coordinates(ids)]
        try:
            parts = rows_of_coordinates(tables, ids, self.dtype)
        except ValueError as error:
            raise self._wrong(runs, error) from error
        return CsrRows(*parts, self.shape[1])

    def _coordinates(
        self, ids: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        import pyarrow as pa  # noqa: PLC0415 - tiledbsoma needs it

        first, last = int(ids[0]), int(ids[-1])
        is_one_run = last - first + 1 == ids.size
        rows = slice(first, last) if is_one_run else pa.array(ids)
        for table in self._array().read(coords=(rows,)).tables():
            yield (
                np.ascontiguousarray(table["soma_dim_0"].to_numpy()),
                np.ascontiguousarray(table["soma_dim_1"].to_numpy()),
                np.ascontiguousarray(table["soma_data"].to_numpy()),
            )


class DenseElement(SomaElement):
    """A dense array, queried once for each run of rows."""

    layout = "dense"

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read rows."""
        ids = self._ids(runs)
        out = np.empty((ids.size, self.shape[1]), self.dtype)
        done = 0
        with self._store.failures_named(self._path):
            array = self._array()
            for start, stop in merge_consecutive(ids).tolist():
                rows = array.read(coords=(slice(start, stop - 1), slice(0, self.shape[1] - 1)))
                out[done : done + stop - start] = rows.to_numpy()
                done += stop - start
        return out
