"""HuggingFace datasets with a row for each cell, whose genes and values are two lists."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location, digest_of, digest_of_array, require_file
from cellfeed.decode import CHUNK_ELEMENTS, Pieces, SlowRead, pieced_array
from cellfeed.extending import (
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    pd,
    require_not_negative,
    require_positive,
)
from cellfeed.rows import CsrChunks, CsrRows, Layout, RowPieces, summable
from cellfeed.sources import (
    FlatCsr,
    ListedGenes,
    OpenedPerProcess,
    Runs,
    Source,
    Storage,
    StoredElement,
    WatchedFiles,
    expand,
    failures_named,
    files_in,
)
from cellfeed.sources.arrow import import_arrow, kind, to_frame

# Where the rows of a HuggingFace dataset are: in a folder, or in an object of the library.

_EXTRA = "huggingface"
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of a `Dataset` or a `DatasetDict` wrote this folder."""
    is_dataset = (path / _STATE).is_file() and (path / "dataset_info.json").is_file()
    return is_dataset or (path / _SPLITS).is_file()


class ArrowTable(OpenedPerProcess):
    """The rows of a dataset; calling it returns all as a `pyarrow.Table`, without `row_order`.

    Parameters
    ----------
    given
        A folder that `Dataset.save_to_disk` wrote, or a `datasets.Dataset`.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        It is neither.
    ParameterError
        The dataset has several splits, is iterable only, or has a row twice.
    """

    def __init__(self, given: Any) -> None:
        self.dataset = None if isinstance(given, str | os.PathLike) else given
        self.row_order: NDArray[np.int64] | None = None
        self._watched = WatchedFiles()
        if self.dataset is None:
            self.location = Location.of(given)
            self.paths = _saved_files(self.location)
            return
        self.paths = _files_of(given)
        folders = [path.absolute().parent for path in self.paths]
        folder = os.path.commonpath(folders) if folders else "memory://datasets.Dataset"
        self.location = Location.of(folder)
        indices = given._indices  # noqa: SLF001 - it has no public name
        if indices is not None:
            self.row_order = indices.column(0).to_numpy().astype(np.int64)
            if np.unique(self.row_order).size != self.row_order.size:
                msg = f"{self.location}: the dataset has a row twice"
                raise ParameterError(f"{msg}; call its `flatten_indices` first")

    def _open(self) -> Any:
        if self.dataset is not None:
            return self.dataset.data.table
        return import_arrow(self.location, _EXTRA).concat_tables(self._mapped())

    def _mapped(self) -> list[Any]:
        """Return the rows of each file of a folder, memory-mapped."""
        arrow = import_arrow(self.location, _EXTRA)
        found = list[Any]()
        for path in self.paths:
            require_file(path)
            self._watched.see(path.absolute(), path.stat(), path)
            what = f"{path}: is not a complete Arrow stream"
            with failures_named(what, "copy it again", (OSError, ValueError)):
                found.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
        self.check_unchanged()
        return found

    def parts(self, names: tuple[str, str]) -> list[tuple[Path | None, Any]]:
        """Return some columns in parts, and the file of each; None if it is in no file."""
        if self.dataset is None:
            return [*zip(self.paths, self._mapped(), strict=True)]
        found, data = list[tuple[Path | None, Any]](), self.dataset.data
        for blocks in getattr(data, "blocks", [[data]]):  # beside each other
            whole = [each for each in blocks if {*names} <= {*each.column_names}]
            path = getattr(whole[0], "path", None) if whole else None
            found.append((None if path is None else Path(path), whole[0].table if whole else None))
        return found

    def check_unchanged(self) -> None:
        """Check that files of a saved dataset are as they were when they were mapped.

        Reading a part that is gone would kill the process.
        """
        self._watched.check()


def _saved_files(folder: Location) -> list[Path]:
    path = Path(folder)
    if (path / _SPLITS).is_file():
        splits = _listed(
            folder, _SPLITS, "splits", lambda found: [str(path / each) for each in found["splits"]]
        )
        raise ParameterError(f"{folder}: has several splits; give one of: {', '.join(splits)}")
    if not (path / _STATE).is_file():
        if not path.is_dir():
            raise PathError(f"{folder}: there is no such folder; check the path")
        msg = f"{folder}: has no {_STATE}, which `Dataset.save_to_disk` writes"
        raise FormatError(f"{msg}; give the folder that it wrote")
    names = _listed(
        folder, _STATE, "files", lambda found: [each["filename"] for each in found["_data_files"]]
    )
    if not names:
        raise FormatError(f"{folder}: has no cells; give a folder that has some")
    return [path / name for name in names]


def _listed(folder: Location, name: str, what: str, pick: Callable[[Any], list[str]]) -> list[str]:
    """Return a list in a JSON file of a folder."""
    try:
        return pick(json.loads(Path(folder, name).read_text()))
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{folder}: {name} does not list the {what} ({type(error).__name__})"
        raise FormatError(f"{msg}; copy the folder again") from error


def _files_of(dataset: Any) -> list[Path]:
    if not hasattr(dataset, "cache_files") or not hasattr(dataset, "_indices"):
        msg = f"an object of type {type(dataset).__name__}"
        if hasattr(dataset, "keys"):
            msg += f" has several splits; give one of: {', '.join(map(repr, dataset))}"
        else:
            msg += " cannot be read by row; give a `datasets.Dataset`, or its folder"
        raise ParameterError(msg)
    return [Path(each["filename"]) for each in dataset.cache_files]


# Record batches of Arrow files: where the lists of their rows lie.


@dataclass(frozen=True, slots=True, eq=False)
class ListColumns:
    """Where the lists of two columns lie in some files; arrays have one row per record batch.

    Parameters
    ----------
    files, n_rows
        File of each record batch, and its number of rows, int64, shape (n_batches,).
    offsets, values
        First byte of the offsets, and of the values, of both columns, int64, shape (n_batches, 2).
    sizes
        Number of values of both columns, int64, shape (n_batches, 2).
    offset_dtypes, dtypes
        Dtypes of offsets and of values of both columns.
    """

    files: NDArray[np.int64]
    n_rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offset_dtypes: tuple[np.dtype[Any], ...]
    dtypes: tuple[np.dtype[Any], ...]


def type_of_lists(arrow: Any, location: Location, schema: Any, name: str) -> Any:
    """Return the type of a column, which must contain lists of numbers.

    Raises
    ------
    FormatError
        The column has another type.
    """
    found = schema.field(name).type
    is_list = arrow.types.is_list(found) or arrow.types.is_large_list(found)
    of = found.value_type if is_list else None
    if of is None or not (arrow.types.is_integer(of) or arrow.types.is_floating(of)):
        msg = f"{location}: column {name!r} is of type {found}, not a list of numbers"
        raise FormatError(f"{msg} for each cell; give another column")
    return found


def list_columns(table: ArrowTable, names: tuple[str, str]) -> ListColumns | None:
    """Return where the lists of two columns lie; None if files do not store them uncompressed."""
    arrow = import_arrow(table.location, _EXTRA)
    schema, found, known = table().schema, list[list[int]](), dict[int, bool]()
    types = [type_of_lists(arrow, table.location, schema, name) for name in names]
    itemsizes = [8 if arrow.types.is_large_list(each) else 4 for each in types]
    for path, rows in table.parts(names):
        if path is None:
            return None
        for batch in rows.select(names).to_batches():
            row = [table.paths.index(path), batch.num_rows]
            for name, itemsize in zip(names, itemsizes, strict=True):
                column = batch.column(name)
                if column.null_count or column.flatten().null_count:
                    raise _no_numbers(table.location, name)
                offsets, values = column.buffers()[1], column.values.buffers()[1]
                places = [_place(each, path, known) for each in (offsets, values)]
                if places[0] is None or places[1] is None:
                    return None
                row += [places[0] + column.offset * itemsize, places[1], len(column.values)]
            found.append(row)
    if not found:
        return None
    numbers = np.array(found, np.int64)
    return ListColumns(
        files=numbers[:, 0].copy(),
        n_rows=numbers[:, 1].copy(),
        offsets=numbers[:, [2, 5]],
        values=numbers[:, [3, 6]],
        sizes=numbers[:, [4, 7]],
        offset_dtypes=tuple(np.dtype(f"i{itemsize}") for itemsize in itemsizes),
        dtypes=tuple(np.dtype(each.value_type.to_pandas_dtype()) for each in types),
    )


def _place(buffer: Any, path: Path, known: dict[int, bool]) -> int | None:
    """Return the first byte of a `pyarrow.Buffer` in a file; None if it is not there.

    ``known`` says which memory, by its address, has the content of its file.
    """
    if buffer is None or not buffer.size:
        return 0
    whole = buffer
    while whole.parent is not None:
        whole = whole.parent
    if whole.address not in known:
        known[whole.address] = _is_content(whole, path)
    return int(buffer.address - whole.address) if known[whole.address] else None


def _is_content(memory: Any, path: Path) -> bool:
    """Return whether memory, a `pyarrow.Buffer`, has the content of a file, by some of its bytes.

    The file of an object may have been replaced since the library mapped it.
    """
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) != memory.size:
            return False
        for first in np.linspace(0, memory.size - 1, _COMPARED).astype(int).tolist():
            file.seek(first)
            there = file.read(_COMPARED_BYTES)
            if there != memory.slice(first, len(there)).to_pybytes():
                return False
    return True


_COMPARED, _COMPARED_BYTES = 64, 4096


def _no_numbers(location: Location, name: str) -> FormatError:
    msg = f"{location}: column {name!r}: not every cell has a list of numbers"
    return FormatError(f"{msg}; leave those cells out")


_OTHER_GENE = (
    "have a gene number that is not a column; give `HuggingFaceSource` a larger `n_vars` or a "
    "`gene_table` of all, and `n_markers=1` if cells begin with a marker"
)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The two columns that contain cells, and their genes.

    Parameters
    ----------
    location
        For messages.
    lists
        Names of the columns with the two lists: genes, and values.
    genes
        The genes.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes.
    """

    location: Location
    lists: tuple[str, str]
    genes: ListedGenes
    n_markers: int

    @property
    def n_stored(self) -> int:
        """Upper bound of gene numbers, exclusive."""
        return self.genes.columns.size - 1

    def differ(self) -> FormatError:
        """Return the error for cells whose two lists do not match."""
        msg = "columns {!r} and {!r}: the lists of a cell differ in length".format(*self.lists)
        return FormatError(f"{self.location}: {msg}; give columns that belong together")


class ArrowLists(FlatCsr):
    """Lists that files store uncompressed, read by compiled threads.

    Parameters
    ----------
    columns
        The columns of the files.
    paths
        The files.
    stored
        Where the lists lie.
    shape
        Number of cells and of genes.
    """

    def __init__(
        self, columns: Columns, paths: Sequence[Path], stored: ListColumns, shape: tuple[int, int]
    ) -> None:
        used, files = np.unique(stored.files, return_inverse=True)
        absolute = [paths[file].absolute() for file in used.tolist()]
        folder = Path(os.path.commonpath([path.parent for path in absolute]))
        names = [str(path.relative_to(folder)) for path in absolute]
        super().__init__(files_in(folder, names), shape, stored.dtypes[1])
        self._columns, self._stored = columns, replace(stored, files=files.astype(np.int64))
        self.column_names = columns.genes.names

    def stored_bytes(self) -> int:
        """Return the size in bytes of lists and their offsets."""
        itemsizes = [dtype.itemsize for dtype in self._stored.dtypes]
        of_offsets = sum(dtype.itemsize for dtype in self._stored.offset_dtypes)
        values = int((self._stored.sizes.sum(axis=0) * itemsizes).sum())
        return values + int(self._stored.n_rows.sum()) * of_offsets

    def _find(self) -> CsrChunks:
        stored = self._stored
        firsts, lengths = zip(*(self._lists(column) for column in range(2)), strict=True)
        if not np.array_equal(*lengths):
            raise self._columns.differ()
        pointer = np.concatenate([[0], np.cumsum(lengths[0], dtype=np.int64)])
        first_rows = np.cumsum(stored.n_rows) - stored.n_rows
        sizes = np.diff(np.append(pointer[first_rows], pointer[-1]))
        arrays, skipped = [], np.zeros(0, np.int64)
        for column, name in enumerate(self._columns.lists):
            dtype = stored.dtypes[column]
            offsets = stored.values[:, column] + firsts[column] * dtype.itemsize
            pieces = Pieces(stored.files, offsets, sizes, dtype.itemsize)
            skipped = pieces.firsts[:-1] * CHUNK_ELEMENTS - pointer[first_rows]
            arrays.append(pieced_array(name, pieces, dtype, self._files))
        arrays[0] = replace(arrays[0], bad_index=_OTHER_GENE)
        rows = RowPieces(first_rows, skipped)
        n_stored, n_markers = self._columns.n_stored, self._columns.n_markers
        return CsrChunks(pointer, arrays[0], arrays[1], n_stored, rows, n_markers)

    def _lists(self, column: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first offset of each batch, and the lengths of the lists of all rows."""
        stored, dtype = self._stored, self._stored.offset_dtypes[column]
        n_bytes = (stored.n_rows + 1) * dtype.itemsize
        found = self._files.read_ranges(stored.files, stored.offsets[:, column], n_bytes)
        firsts, lengths = np.zeros(len(found), np.int64), [np.zeros(0, np.int64)]
        for batch, content in enumerate(found):
            if not stored.n_rows[batch]:
                continue
            offsets = np.frombuffer(content or b"", dtype).astype(np.int64)
            fits = offsets.size == stored.n_rows[batch] + 1 and offsets[0] >= 0
            lengths.append(np.diff(offsets))
            if not fits or lengths[-1].min() < 0 or offsets[-1] > stored.sizes[batch, column]:
                where = self._files.location_of(int(stored.files[batch]))
                msg = f"{where}: the lists of column {self._columns.lists[column]!r} are damaged"
                raise FormatError(f"{msg}; copy it again")
            firsts[batch] = offsets[0]
        return firsts, np.concatenate(lengths)


class ArrowRows(StoredElement):
    """Lists that only pyarrow can read, such as compressed lists, or those of selected rows.

    Parameters
    ----------
    columns
        The columns of the table.
    table
        Returns all rows as a `pyarrow.Table`.
    dtype
        Dtype of the values.
    shape
        Number of cells and of genes.
    reason
        Why only pyarrow can read them; empty if they are in memory.
    """

    layout: Layout = "csr"

    def __init__(
        self,
        columns: Columns,
        table: ArrowTable,
        dtype: np.dtype[Any],
        shape: tuple[int, int],
        reason: str,
    ) -> None:
        self._columns, self._table, self._reason = columns, table, reason
        self.dtype, self.shape = summable(dtype), shape
        self.column_names = columns.genes.names

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - of any
        """Return why rows are read through pyarrow."""
        remedy = "write it again with `Dataset.save_to_disk`, and open the folder"
        return None if not self._reason else SlowRead("pyarrow", self._reason, remedy)

    def codec(self) -> str:
        """Return the compression of values."""
        return "unknown" if self._reason else "none"

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows."""
        import pyarrow as pa  # noqa: PLC0415 - optional; it made the table

        self._table.check_unchanged()
        table = self._table().select(list(self._columns.lists))
        parts = [table.slice(start, stop - start) for start, stop in runs.tolist()]
        rows = pa.concat_tables([table.slice(0, 0), *parts])
        lengths, indices = self._lists(rows, 0)
        lengths_of_values, data = self._lists(rows, 1)
        if not np.array_equal(lengths, lengths_of_values):
            raise self._columns.differ()
        n_genes = np.maximum(lengths - self._columns.n_markers, 0)
        if self._columns.n_markers:
            stops = np.cumsum(lengths, dtype=np.int64)
            elements = expand(np.stack([stops - n_genes, stops], axis=1))
            indices, data = indices[elements], data[elements]
        self._table.check_unchanged()
        indptr = np.concatenate([[0], np.cumsum(n_genes, dtype=np.int64)])
        return CsrRows(indptr, indices.astype(np.int64), data, self._columns.n_stored)

    def _lists(self, table: Any, column: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        import pyarrow.compute as pc  # noqa: PLC0415

        name = self._columns.lists[column]
        found = table.column(name)
        flat = pc.list_flatten(found)
        if found.null_count or flat.null_count:
            raise _no_numbers(self._columns.location, name)
        return pc.list_value_length(found).to_numpy(), flat.to_numpy()


_NOT_THERE = -2  # stands for columns of no gene


class HuggingFaceSource(Source):
    """A HuggingFace dataset with a row for each cell and its genes in two lists.

    One list has the numbers of the expressed genes, and the other one their values, as in
    Tahoe-100M. All other columns of numbers and text are obs columns. Compiled threads read
    uncompressed Arrow files, the kind that the ``datasets`` library writes, without the library.

    Parameters
    ----------
    dataset
        A folder that ``Dataset.save_to_disk`` wrote, or a ``datasets.Dataset``.
    genes, values
        Names of the columns with the two lists.
    gene_table
        The genes, in the order of the columns of the matrix; see `ParquetSource`. All gene numbers
        must be in it, but those of markers.
    n_vars
        Number of genes, if there is no table and gene numbers are columns of the matrix, from 0. By
        default, all gene numbers are read first, and this is the largest plus one.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes, and are left
        out; 1 for Tahoe-100M.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        The folder is something else, or a column is not a list of numbers. Also when rows are read:
        the lists of a cell differ in length, or a gene number is not below ``n_vars`` or not in
        ``gene_table``. Gene numbers of the table are not distinct integers.
    ColumnError
        There is no such column.
    ParameterError
        Parameters contradict each other.

    Examples
    --------
    >>> import datasets
    >>> from cellfeed import HuggingFaceSource, open_collection
    >>> columns = {"genes": [[1, 5, 9], [1, 9]], "expressions": [[-2.0, 3.0, 4.0], [-2.0, 7.0]]}
    >>> genes = pd.DataFrame({"token_id": [9, 7, 5]}, index=["TP53", "MYC", "ALK"])
    >>> cells = datasets.Dataset.from_dict(columns)
    >>> source = HuggingFaceSource(cells, gene_table=genes, n_markers=1)
    >>> open_collection(source)[[1, 0]].X.toarray()
    array([[7., 0., 0.],
           [4., 0., 3.]])
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Any,
        *,
        genes: str = "genes",
        values: str = "expressions",
        gene_table: pd.DataFrame | None = None,
        n_vars: int | None = None,
        n_markers: int = 0,
    ) -> None:
        self._table = ArrowTable(dataset)
        self.location = self._table.location
        self._lists = genes, values
        schema = self._table().schema
        for name in self._lists:
            if name not in schema.names:
                msg = f"{self.location}: has no column {name!r}; give `genes=` and `values=` to"
                raise ColumnError(f"{msg} `HuggingFaceSource`, from: {', '.join(schema.names)}")
        arrow = import_arrow(self.location, _EXTRA)
        dtypes = [
            np.dtype(type_of_lists(arrow, self.location, schema, name).value_type.to_pandas_dtype())
            for name in self._lists
        ]
        if dtypes[0].kind not in "iu":
            msg = f"{self.location}: column {genes!r} has {dtypes[0]}, which are not gene numbers"
            raise FormatError(f"{msg}; give another column as `genes=`")
        require_not_negative("n_markers", n_markers)
        self._var = None
        if gene_table is not None:
            if n_vars is not None:
                raise ParameterError("`gene_table` and `n_vars` exclude each other; leave one out")
            known = ListedGenes.of_table(gene_table, "gene_table")
            self._var = known.table
        else:
            n_vars = self._largest() + 1 if n_vars is None else require_positive("n_vars", n_vars)
            known = ListedGenes.in_order(n_vars)
        columns = Columns(self.location, self._lists, known, n_markers)
        element, placed = self._element(columns, dtypes[1])
        element.row_order = self._table.row_order
        if not placed and self._table.paths:
            placed = getattr(dataset, "_fingerprint", "")
        rows = digest_of_array(element.row_order), placed
        self._selection = repr((self._lists, n_vars, n_markers, rows))
        if gene_table is not None:
            stored = known.columns[:-1]
            element.stored_columns = np.where(stored < 0, np.int32(_NOT_THERE), stored)
        self.elements = {"X": element}

    def _element(self, columns: Columns, dtype: np.dtype[Any]) -> tuple[StoredElement, str]:
        """Return the element, and a digest of where its rows lie in files, if they do."""
        order = self._table.row_order
        shape = len(self._table()) if order is None else order.size, columns.genes.n_vars
        stored = list_columns(self._table, self._lists)
        if stored is not None and dtype != np.float16:
            places = np.concatenate([stored.n_rows, stored.offsets.ravel()])
            names = [self._table.paths[k].name for k in stored.files.tolist()]
            placed = digest_of(digest_of_array(places), *names)
            return ArrowLists(columns, self._table.paths, stored, shape), placed
        reason = "its files do not have the layout of memory" if self._table.paths else ""
        if stored:
            reason = "cellfeed does not decode float16"
        return ArrowRows(columns, self._table, dtype, shape, reason), ""

    def selection(self) -> str:
        """Return the columns with lists, and which rows of its files it has."""
        return self._selection

    def _largest(self) -> int:
        """Return the largest gene number, after reading all of them."""
        import pyarrow.compute as pc  # noqa: PLC0415

        chunks = self._table().column(self._lists[0]).chunks
        found = [pc.max(pc.list_flatten(chunk)).as_py() for chunk in chunks]
        return max((each for each in found if each is not None), default=0)

    def obs_names(self) -> list[str]:
        """Return the columns with one number, boolean or text per row."""
        types = import_arrow(self.location, _EXTRA).types
        schema = self._table().schema
        return [e.name for e in schema if kind(e.type) or types.is_dictionary(e.type)]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns, in row order; class labels as their names."""
        self._table.check_unchanged()
        frame = to_frame(self._table().select(list(columns)))
        self._table.check_unchanged()
        for name, classes in self._class_labels().items():
            if name in frame:
                codes = frame[name].fillna(-1).astype(np.int64)
                frame[name] = pd.Categorical.from_codes(codes, categories=pd.Index(classes))
        if self._table.row_order is not None:
            frame = frame.iloc[self._table.row_order].reset_index(drop=True)
        return frame

    def _class_labels(self) -> dict[str, list[str]]:
        metadata = self._table().schema.metadata or {}
        info = json.loads(metadata.get(b"huggingface", b"{}"))
        features = (info.get("info") or {}).get("features") or {}
        is_label = {
            k: isinstance(v, dict) and v.get("_type") == "ClassLabel" for k, v in features.items()
        }
        return {name: features[name]["names"] for name in features if is_label[name]}

    def read_var(self) -> pd.DataFrame:
        """Return the table of genes."""
        return super().read_var() if self._var is None else self._var

    def files(self) -> Sequence[Path]:
        """Return the files of its rows."""
        return self._table.paths


# Folders that HuggingFace's ``datasets`` library wrote, and its objects.


def _open_object(given: Any) -> HuggingFaceSource | None:
    datasets: Any = sys.modules.get("datasets")
    if datasets is None:
        return None
    kinds = datasets.Dataset, datasets.IterableDataset, datasets.DatasetDict
    return HuggingFaceSource(given) if isinstance(given, kinds) else None


HUGGINGFACE = Storage(
    name="HuggingFace Datasets",
    open=lambda location, _: [HuggingFaceSource(location)],
    recognizes=is_saved,
    open_object=_open_object,
)
