"""`SomaSource`: the cells of a TileDB-SOMA experiment, or those that fulfil a query."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.decode import SlowRead
from cellfeed.extending import FormatError, ParameterError, PathError, pd
from cellfeed.rows import CsrRows, SparseChunks
from cellfeed.sources import (
    OpenedPerProcess,
    Runs,
    Source,
    Storage,
    StoredElement,
    as_names,
    as_text,
    expand,
    failures_named,
    fill,
    first_line,
    library,
    merge_consecutive,
    threads_of_process,
    why_not_cast,
)
from cellfeed.storages.soma._tiledb import UnknownLayoutError, tiled_csr

# An experiment opened in this process.

_BUFFER_BYTES = 64 << 20  # for each column of a table that tiledbsoma returns; its default is 1 GiB
_BUDGET_BYTES = 4 << 30  # for the decoded tiles of a query; TileDB's default is 10 GiB

# Objects that a fork inherits are never closed there, not even those that are garbage: closing
# waits for their threads, which the fork does not have.
_opened = list["weakref.ref[Any]"]()
_held, _of_parents = list[Any](), list[Any]()


def _hold() -> None:
    _held[:] = filter(None, (each() for each in _opened))


def _keep_held() -> None:
    _of_parents.extend(_held)
    _held.clear()
    _opened.clear()


os.register_at_fork(before=_hold, after_in_parent=_held.clear, after_in_child=_keep_held)


class SomaStore(OpenedPerProcess):
    """An experiment, opened separately in each process; calling it returns it.

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
        self._timestamp: int | None = None  # in ms, of the state that every process reads

    def at(self, path: str) -> Any:
        """Return the object at a path of the experiment, such as ``ms/RNA/var``."""
        found = self()
        for name in path.split("/"):
            found = found[name]
        return found

    def failures_named(self, what: str) -> AbstractContextManager[None]:
        """Convert errors of tiledbsoma into an error of one line."""
        msg = f"{self.location}: `{what}` cannot be read by tiledbsoma"
        return failures_named(msg, self._remedy())

    def _remedy(self) -> str:
        if self.location.path is None or self._config:
            return (
                "check the URI and `tiledb_config` (credentials, region); otherwise it may be "
                "damaged"
            )
        return "the experiment may be damaged"

    def _open(self) -> Any:
        if self._opened is not None:
            _of_parents.append(self._opened)
        tiledbsoma = library("tiledbsoma", self.location, what="TileDB-SOMA", extra="soma")
        threads = threads_of_process()
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
        _opened[:] = [each for each in _opened if each() is not None]
        _opened.extend(map(weakref.ref, (context, opened)))
        return opened


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
    recorded = table.metadata.get(_NAMED, "null")
    try:
        name = json.loads(recorded)
    except ValueError:  # written by other software
        name = recorded
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
        msg = f"{len(read)} rows were read, but {len(joinids)} expected, so it may have changed"
        raise ValueError(f"{msg} since")
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
        return super().var_names() if column is None else as_names(pd.Index(named[column]))

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

    def _wrong(self, runs: Runs, error: object) -> FormatError:
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
        self._dtypes: dict[str, Any] = {"soma_dim_0": np.int64, "soma_dim_1": np.int64}
        self._dtypes["soma_data"] = self.dtype
        with store.failures_named(path):
            folder = self._folder()
        if folder is None:
            return
        rows = None if isinstance(joinids, range) else joinids
        try:
            timestamp = int(store().tiledb_timestamp_ms)
            found = tiled_csr(self._array(), folder, path, timestamp, rows, self.shape[1])
        except UnknownLayoutError as reason:
            self._slow = SlowRead("tiledbsoma", str(reason), _REMEDY)
        else:
            if found is not None:
                self._tiled, self.rows_per_chunk = found

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
        import pyarrow as pa  # noqa: PLC0415 - tiledbsoma needs it

        ids, tables = self._ids(runs), list[Any]()
        if ids.size:
            first, last = int(ids[0]), int(ids[-1])
            coords = slice(first, last) if last - first + 1 == ids.size else pa.array(ids)
            with self._store.failures_named(self._path):
                tables = [*self._array().read(coords=(coords,)).tables()]
        rows, columns, values = (
            np.concatenate([np.empty(0, dtype), *(each[name].to_numpy() for each in tables)])
            for name, dtype in self._dtypes.items()
        )
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))  # of the elements of one row in a tile
        places = np.searchsorted(ids, rows[firsts])
        if not np.array_equal(ids.take(places, mode="clip"), rows[firsts]):
            raise self._wrong(runs, "it has an element of a row that was not requested")
        if columns.size and not 0 <= columns.min() <= columns.max() <= np.iinfo(np.int32).max:
            raise self._wrong(runs, "it has a column that is negative or above 2^31 - 1")
        few = np.min_scalar_type(ids.size)  # which NumPy sorts faster
        of_rows = np.repeat(places.astype(few), np.diff(firsts, append=rows.size))
        order = np.argsort(of_rows, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(of_rows, minlength=ids.size))])
        return CsrRows(indptr, columns[order].astype(np.int32), values[order], self.shape[1])


class DenseElement(SomaElement):
    """A dense array, queried once for each run of rows."""

    layout = "dense"

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read rows."""
        ids = self._ids(runs)
        out = np.empty((ids.size, self.shape[1]), self.dtype)
        columns = slice(0, self.shape[1] - 1)
        with self._store.failures_named(self._path):
            array = self._array()
            return fill(
                out,
                merge_consecutive(ids),
                lambda start, stop: array.read(coords=(slice(start, stop - 1), columns)).to_numpy(),
            )


# The source.


class SomaSource(Source):
    """Cells of a TileDB-SOMA experiment, optionally those that fulfil a query.

    Pass it to `open_collection` in place of a path. The path suffices for a local experiment with a
    single measurement, or one called "RNA", and with a single layer, or ``X["data"]``. cellfeed's
    own threads decode sparse arrays of local experiments; tiledbsoma (``pip install
    'cellfeed[soma]'``), which each process opens for itself, reads everything else.

    Parameters
    ----------
    uri
        The experiment: a folder, or a URI that tiledbsoma opens.
    measurement
        Name of the measurement, which has the genes; by default, the only one, or "RNA".
    layer
        Layer of the measurement's X to read as "X"; by default, the only one, or "data".
    obs_query
        A ``value_filter`` of tiledbsoma, such as ``"cell_type == 'B' and n_counts > 500"``; all
        cells if None. The selected cells are numbered from 0, by ascending ``soma_joinid``.
    tiledb_config
        Further configuration of TileDB, such as ``vfs.s3.region``. It never appears in messages.
        Unless it sets the number of threads, TileDB uses this process's share of the processors.

    Attributes
    ----------
    elements
        ``"X"``; ``"layers/NAME"``, the layers of X by name; ``"raw/X"``, the X of the measurement
        "raw"; and ``"obsm/NAME"``.

    Raises
    ------
    PathError
        There is no experiment.
    FormatError
        The experiment cannot be read, or tiledbsoma is not installed.
    ParameterError
        It has no such measurement or layer, or no cell fulfils the query.

    Examples
    --------
    >>> from cellfeed import SomaSource, open_collection
    >>> source = SomaSource("atlas_soma", obs_query="cell_type == 'B'")  # doctest: +SKIP
    >>> open_collection([source], obs=["donor"])  # doctest: +SKIP
    """

    can_be_forked = False  # TileDB's threads do not survive a fork, which may then crash

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        measurement: str | None = None,
        layer: str | None = None,
        obs_query: str | None = None,
        tiledb_config: Mapping[str, str] | None = None,
    ) -> None:
        self.location = Location.of(uri)
        self._store = SomaStore(self.location, tiledb_config or {})
        self._query = obs_query
        with self._store.failures_named("ms"):
            experiment = self._store()
            self._measurement = self._one_of(list(experiment.ms), measurement, "RNA", "measurement")
            layers = list(experiment.ms[self._measurement].X)
            self._layer = self._one_of(layers, layer, "data", "layer")
        self._joinids = self._read_joinids()
        self.elements = _Elements(self._paths(), self)

    def __repr__(self) -> str:
        query = "" if self._query is None else f", obs_query={self._query!r}"
        return f"SomaSource({str(self.location)!r}, measurement={self._measurement!r}{query})"

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return len(self._joinids)

    def selection(self) -> str:
        """Return the measurement, the layer and the query of its cells."""
        return json.dumps([self._measurement, self._layer, self._query])

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns; the last is ``soma_joinid``."""
        with self._store.failures_named("obs"):
            return [*columns_of(self._store().obs, "obs"), JOINID]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        ids = None if isinstance(self._joinids, range) else self._joinids
        with self._store.failures_named("obs"):
            table = read_table(self._store().obs, columns, ids)
        return table.reset_index(drop=True)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        ids = rows if isinstance(self._joinids, range) else self._joinids[rows]
        with self._store.failures_named("obs"):
            obs = self._store().obs
            names = name_column(obs, "obs")
            wanted = [*columns] if names is None else [*columns, names]
            table = read_table(obs, wanted, ids if ids.size else np.arange(1)).iloc[: ids.size]
        index = [str(each) for each in (table.index if names is None else table[names])]
        return as_text(table[[*columns]].set_index(pd.Index(index, dtype=object)))

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes of the measurement."""
        with self._store.failures_named("var"):
            var = self._store().ms[self._measurement].var
            names = name_column(var, "var")
            wanted = [*([] if names is None else [names]), *columns_of(var, "var")]
            table = read_table(var, wanted, None)
        index = table.index if names is None else pd.Index(table.pop(names))
        return table.set_index(pd.Index(as_names(index), dtype=object))

    def _read_joinids(self) -> NDArray[np.int64] | range:
        with self._store.failures_named("obs"):
            obs = self._store().obs
            if self._query is None:
                return read_joinids(obs, None)
        try:
            ids = read_joinids(obs, self._query)
        except Exception as error:
            msg = f"{self.location}: obs_query={self._query!r} is not a valid value_filter"
            columns = ", ".join(obs.keys())
            raise ParameterError(
                f"{msg} ({first_line(error)}); its obs columns are: {columns}"
            ) from error
        if not len(ids):
            msg = f"{self.location}: no cell fulfils obs_query={self._query!r}; give another query"
            raise ParameterError(msg)
        return ids

    def _one_of(self, there: list[str], given: str | None, usual: str, what: str) -> str:
        if given in there:
            return str(given)
        if given is None and (len(there) == 1 or usual in there):
            return there[0] if len(there) == 1 else usual
        listed = ", ".join(map(repr, there)) or "none"
        said = f"has no {what} {given!r}" if given is not None else f"has no {what} {usual!r}"
        msg = f"{self.location}: {said}; give `{what}=` to `SomaSource`, one of: {listed}"
        raise ParameterError(msg)

    def _paths(self) -> dict[str, tuple[str, str | None]]:
        """Return the paths of elements in the experiment, and of the tables of their columns."""
        with self._store.failures_named("ms"):
            experiment = self._store()
            of = f"ms/{self._measurement}"
            measurement, var = experiment.ms[self._measurement], f"{of}/var"
            paths: dict[str, tuple[str, str | None]] = {"X": (f"{of}/X/{self._layer}", var)}
            paths |= {f"layers/{name}": (f"{of}/X/{name}", var) for name in measurement.X}
            if "raw" in experiment.ms and "X" in experiment.ms["raw"]:
                raw = list(experiment.ms["raw"].X)
                if raw:
                    layer = self._layer if self._layer in raw else raw[0]
                    paths["raw/X"] = f"ms/raw/X/{layer}", "ms/raw/var"
            if "obsm" in measurement:
                paths |= {f"obsm/{name}": (f"{of}/obsm/{name}", None) for name in measurement.obsm}
        return paths

    def _element(self, path: str, var: str | None) -> SomaElement:
        with self._store.failures_named(path):
            kind = self._store.at(path).soma_type
        if kind not in ("SOMASparseNDArray", "SOMADenseNDArray"):
            msg = f"{self.location}: `{path}` is a {kind}, which has no rows of cells"
            raise FormatError(f"{msg}; read another element")
        of_kind = SparseElement if kind == "SOMASparseNDArray" else DenseElement
        return of_kind(self._store, path, var, self._joinids)


class _Elements(Mapping[str, StoredElement]):
    """Elements by name, each opened when it is accessed."""

    def __init__(self, paths: Mapping[str, tuple[str, str | None]], source: SomaSource) -> None:
        self._paths, self._source = paths, source
        self._opened = dict[str, StoredElement]()

    def __getitem__(self, name: str) -> StoredElement:
        if name not in self._opened:
            self._opened[name] = self._source._element(*self._paths[name])  # noqa: SLF001 - its own
        return self._opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


# Folders that are TileDB-SOMA experiments.


def _is_group(path: Path) -> bool:
    """Return whether a folder is a group of TileDB, without importing tiledbsoma."""
    return (path / "__group").is_dir() or (path / "__tiledb_group.tdb").is_file()


SOMA = Storage(
    name="TileDB-SOMA",
    open=lambda location, _: [SomaSource(location)],
    suffixes=(".soma",),
    recognizes=_is_group,
)
