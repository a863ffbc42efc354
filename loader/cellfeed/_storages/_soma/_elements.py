"""Arrays of an experiment with one row per cell."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._decode import SlowRead, rows_of_coordinates
from cellfeed._errors import CellfeedError, FormatError, PathError
from cellfeed._lazy import pd
from cellfeed._rows import CsrRows, SparseChunks
from cellfeed._runs import Runs, expand, merge_consecutive
from cellfeed._storages._base import StoredElement, library, why_not_cast
from cellfeed._storages._soma._tiledb import UnknownLayoutError, tiled_csr
from cellfeed.machine import threads_per_process

# An experiment opened in this process, and descriptions of tiledbsoma's errors.

_BUFFER_BYTES = 64 << 20  # for each column of a table that tiledbsoma returns; its default is 1 GiB
_BUDGET_BYTES = 4 << 30  # for the decoded tiles of a query; TileDB's default is 10 GiB

# Objects that a fork inherits are never closed: closing waits for their threads, which this
# process does not have.
_of_parents = list[Any]()


class SomaStore:
    """An experiment, opened separately in each process that reads it.

    Parameters
    ----------
    location
        A folder or a URI that tiledbsoma opens.
    config
        Further configuration of TileDB; it may contain credentials.
    """

    def __init__(self, location: Location, config: Mapping[str, str]) -> None:
        self.location = location
        self._config = dict(config)
        self._opened: tuple[int, Any] | None = None
        self._timestamp: int | None = None  # in ms, of the state that every process reads

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self) -> Any:
        """Return the `tiledbsoma.Experiment`."""
        if self._opened is None or self._opened[0] != os.getpid():
            if self._opened is not None:
                _of_parents.append(self._opened)
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    @property
    def timestamp(self) -> int:
        """The time, in ms, of the state that every process reads."""
        return int(self().tiledb_timestamp_ms)

    def at(self, path: str) -> Any:
        """Return the object at a path of the experiment, such as ``ms/RNA/var``."""
        found = self()
        for name in path.split("/"):
            found = found[name]
        return found

    @contextmanager
    def failures_named(self, what: str) -> Iterator[None]:
        """Convert errors of tiledbsoma into an error of one line.

        Raises
        ------
        FormatError
            Replaces any error that it raises.
        """
        try:
            yield
        except CellfeedError:
            raise
        except Exception as error:
            msg = f"{self.location}: `{what}` cannot be read by tiledbsoma ({first_line(error)})"
            raise FormatError(f"{msg}; {self._remedy()}") from error

    def _remedy(self) -> str:
        if self.location.path is None or self._config:
            return (
                "check the URI and `tiledb_config` (credentials, region); otherwise it may be "
                "damaged"
            )
        return "the experiment may be damaged"

    def _open(self) -> Any:
        tiledbsoma = library("tiledbsoma", self.location, what="TileDB-SOMA", extra="soma")
        from cellfeed._torch import get_worker_info  # noqa: PLC0415 - it imports torch

        worker = get_worker_info()
        threads = threads_per_process(1 if worker is None else worker.num_workers)
        config: dict[str, str | float] = {
            "sm.compute_concurrency_level": str(threads),
            "sm.io_concurrency_level": str(threads),
            "soma.init_buffer_bytes": str(_BUFFER_BYTES),
            "sm.mem.total_budget": str(_BUDGET_BYTES),
            **self._config,
        }
        try:
            context = tiledbsoma.SOMATileDBContext(tiledb_config=config)
            opened = tiledbsoma.open(
                str(self.location), context=context, tiledb_timestamp=self._timestamp
            )
        except tiledbsoma.DoesNotExistError as error:
            msg = f"{self.location}: there is no SOMA experiment; check the path"
            raise PathError(msg) from error
        except Exception as error:
            msg = f"{self.location}: tiledbsoma cannot open it ({first_line(error)})"
            raise FormatError(f"{msg}; {self._remedy()}") from error
        if not isinstance(opened, tiledbsoma.Experiment):
            msg = f"{self.location}: is a SOMA {type(opened).__name__}, not an experiment"
            raise FormatError(f"{msg}; give the experiment that it is part of")
        self._timestamp = opened.tiledb_timestamp_ms
        return opened


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    said = str(error).strip().splitlines()
    return said[0].rstrip(".") if said else type(error).__name__


# Tables of cells and of genes in an experiment: their rows, columns and names.

JOINID = "soma_joinid"
_NAMED = "soma_dataframe_original_index_name"  # metadata of tables by `tiledbsoma.io`
_NAMES = {
    "obs": ("obs_id", "_index"),
    "var": ("var_id", "_index", "feature_id", "gene_id"),  # the last two if the metadata names none
}

Axis = Literal["obs", "var"]


def name_column(table: Any, axis: Axis) -> str | None:
    """Return the column of a table that names its cells or genes; None if there is none.

    `tiledbsoma.io` gives it the name of the index and records that name, or else uses ``obs_id`` or
    ``var_id``.
    """
    noted = table.metadata.get(_NAMED, "null")
    try:
        name = json.loads(noted)
    except ValueError:  # written by other software
        name = noted
    there = list(table.keys())
    return next((each for each in (name, *_NAMES[axis]) if each in there), None)


def columns_of(table: Any, axis: Axis) -> list[str]:
    """Return the columns of a table, without the numbers and names of its rows."""
    left_out = (JOINID, name_column(table, axis))
    return [name for name in table.keys() if name not in left_out]  # noqa: SIM118 - no mapping


def read_joinids(table: Any, query: str | None) -> NDArray[np.int64] | range:
    """Return the numbers of the rows that fulfil a query, ascending, int64.

    They are read instead of counted, since `tiledbsoma.DataFrame.count`, which releases the GIL,
    has crashed processes with a segmentation fault.

    Returns
    -------
    A range if there is no query and rows are numbered from 0 without gaps.
    """
    tables = table.read(column_names=[JOINID], value_filter=query)
    parts = [each[JOINID].to_numpy().astype(np.int64, copy=False) for each in tables]
    ids = np.concatenate([np.empty(0, np.int64), *parts])
    ids.sort()
    is_gapless = query is None and np.array_equal(ids, np.arange(ids.size))
    return range(ids.size) if is_gapless else ids


def read_table(
    table: Any, columns: Sequence[str], joinids: NDArray[np.int64] | None
) -> pd.DataFrame:
    """Read columns of the rows with the given numbers.

    Parameters
    ----------
    table
        A `tiledbsoma.DataFrame`.
    columns
        Names of the columns.
    joinids
        Numbers of the rows, ascending, at least one; None for all.

    Returns
    -------
    A row for each of ``joinids``, in their order, indexed by them.

    Raises
    ------
    ValueError
        A row is missing.
    """
    import pyarrow as pa  # noqa: PLC0415 - tiledbsoma needs it

    by_number = table.index_column_names == (JOINID,) and joinids is not None
    coords = (pa.array(joinids),) if by_number else ()
    wanted = list(dict.fromkeys([JOINID, *columns]))
    found = table.read(coords=coords, column_names=wanted).concat().to_pandas()
    read: pd.DataFrame = found.set_index(JOINID, drop=False)[[*columns]].sort_index()
    if joinids is None:
        return read
    if not by_number:
        read = read[read.index.isin(joinids)]
    if not np.array_equal(read.index.to_numpy(), joinids):
        msg = (
            f"{len(read)} rows were read, but {len(joinids)} expected, so it may have changed since"
        )
        raise ValueError(msg)
    return read


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

    def chunked(self) -> SparseChunks | None:
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
