"""HuggingFace datasets with a row for each cell, whose genes and values are two lists."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import ByteStore, Location, digest_of_array, require_file
from cellfeed.decode import CHUNK_ELEMENTS, Pieces, pieced_array
from cellfeed.extending import (
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    pd,
    require_not_negative,
    require_positive,
)
from cellfeed.rows import CsrChunks
from cellfeed.sources import (
    FlatCsr,
    ListedGenes,
    OpenedPerProcess,
    Source,
    Storage,
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

    Attributes
    ----------
    files
        The files of a folder; None for an object, whose rows are read from its memory.
    fingerprint
        What the library tells the contents of files by; empty for an object without files.

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
        self.files: Any = None
        self.row_order: NDArray[np.int64] | None = None
        self._dataset, self._mapped = given, list[Any]()
        if isinstance(given, str | os.PathLike):
            self._dataset, self.location = None, Location.of(given)
            names, self.fingerprint = _saved_files(self.location)
            self.files = files_in(Path(given), names)
            self.paths = [Path(given, name) for name in names]
            return
        if not hasattr(given, "cache_files") or not hasattr(given, "_indices"):
            msg = f"an object of type {type(given).__name__}"
            if hasattr(given, "keys"):
                msg += f" has several splits; give one of: {', '.join(map(repr, given))}"
            else:
                msg += " cannot be read by row; give a `datasets.Dataset`, or its folder"
            raise ParameterError(msg)
        self.paths = [Path(each["filename"]) for each in given.cache_files]
        self.fingerprint = given._fingerprint if self.paths else ""  # noqa: SLF001 - no public name
        folders = [path.absolute().parent for path in self.paths]
        folder = os.path.commonpath(folders) if folders else "memory://datasets.Dataset"
        self.location = Location.of(folder)
        indices = given._indices  # noqa: SLF001 - no public name
        if indices is not None:
            self.row_order = indices.column(0).to_numpy().astype(np.int64)
            if np.unique(self.row_order).size != self.row_order.size:
                msg = f"{self.location}: the dataset has a row twice"
                raise ParameterError(f"{msg}; call its `flatten_indices` first")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_mapped": []}

    def _open(self) -> Any:
        arrow = import_arrow(self.location, _EXTRA)
        if self._dataset is not None:
            return self._dataset.data.table
        self._mapped, tables = [], list[Any]()
        for path in self.paths:
            require_file(path)
            with failures_named(
                f"{path}: is not a complete Arrow stream", "copy it again", (OSError, ValueError)
            ):
                self._mapped.append(arrow.memory_map(str(path)).read_buffer())
                tables.append(arrow.ipc.open_stream(self._mapped[-1]).read_all())
        self.check_unchanged()
        return arrow.concat_tables(tables)

    def check_unchanged(self) -> None:
        """Check that files of a saved dataset are as they were when they were opened.

        Reading a mapped part that is gone would kill the process.
        """
        if self.files is not None:
            self.files.check_files(np.arange(len(self.paths)))

    def store_of(
        self, arrays: Sequence[NDArray[Any]]
    ) -> tuple[ByteStore, NDArray[np.int64], NDArray[np.int64]]:
        """Return where compiled threads read arrays of the table: the files of a folder, or memory.

        Returns
        -------
        The files, and the file of each array and its first byte there, int64, shape (n_arrays,).
        """
        n = len(arrays)
        if self._mapped:
            starts = np.array([each.address for each in self._mapped])
            order = np.argsort(starts)
            addresses = np.array([each.ctypes.data if each.size else starts[0] for each in arrays])
            files = order[np.searchsorted(starts[order], addresses, side="right") - 1]
            offsets = addresses - starts[files]
            sizes = np.array([each.size for each in self._mapped])
            if ((offsets >= 0) & (offsets < sizes[files])).all():  # others were compressed
                return self.files, files, offsets
        return _Memory(self.location, arrays), np.arange(n), np.zeros(n, np.int64)


class _Memory(ByteStore):
    """Arrays in memory, each of which is a file."""

    def __init__(self, location: Location, arrays: Sequence[NDArray[Any]]) -> None:
        self._location, self._arrays = location, [each.view(np.uint8) for each in arrays]

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - they have one
        """Return the location for messages."""
        return self._location

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of arrays in bytes."""
        return np.array([self._arrays[file].size for file in files.tolist()], np.int64)

    def read_ranges(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> list[NDArray[np.uint8]]:
        """Return byte ranges of arrays, without a copy."""
        ranges = zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        return [self._arrays[file][first : first + size] for file, first, size in ranges]


def _saved_files(folder: Location) -> tuple[list[str], str]:
    """Return the names of the files in a folder, and its fingerprint."""
    path = Path(folder)
    has_splits = (path / _SPLITS).is_file()
    name, what = (_SPLITS, "splits") if has_splits else (_STATE, "files")
    if not (path / name).is_file():
        if not path.is_dir():
            raise PathError(f"{folder}: there is no such folder; check the path")
        msg = f"{folder}: has no {_STATE}, which `Dataset.save_to_disk` writes"
        raise FormatError(f"{msg}; give the folder that it wrote")
    try:
        stated = json.loads((path / name).read_text())
        if has_splits:
            names = [str(path / each) for each in stated["splits"]]
        else:
            names = [os.fspath(each["filename"]) for each in stated["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{folder}: {name} does not list the {what} ({type(error).__name__})"
        raise FormatError(f"{msg}; copy the folder again") from error
    if has_splits:
        raise ParameterError(f"{folder}: has several splits; give one of: {', '.join(names)}")
    if not names:
        raise FormatError(f"{folder}: has no cells; give a folder that has some")
    return names, str(stated.get("_fingerprint"))


# Lists of a table.


_OTHER_GENE = (
    "have a gene number that is not a column; give `HuggingFaceSource` a larger `n_vars` or a "
    "`gene_table` of all, and `n_markers=1` if cells begin with a marker"
)


@dataclass(frozen=True, eq=False)
class _Lists(CsrChunks):
    """Lists in the pieces of a table, which are numbered as if each began with a chunk.

    Parameters
    ----------
    first_rows
        First row of each piece, ascending, int64, shape (n_pieces,).
    skipped
        Number of elements before each piece that are numbered but not stored, shape (n_pieces,).
    n_markers
        Number of elements at the beginning of each list that are left out.
    """

    first_rows: NDArray[np.int64]
    skipped: NDArray[np.int64]
    n_markers: int

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `CsrChunks`."""
        starts, lengths = super().ranges(rows)
        pieces = np.searchsorted(self.first_rows, rows, side="right") - 1
        starts = starts + self.skipped[pieces] + self.n_markers
        return starts, np.maximum(lengths - self.n_markers, 0)


class ArrowLists(FlatCsr):
    """Lists that compiled threads read, from files or memory.

    Parameters
    ----------
    table
        The rows.
    lists
        Names of the columns with the two lists: genes, and values.
    dtype
        Dtype of the values.
    genes
        The genes.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes.
    """

    def __init__(
        self,
        table: ArrowTable,
        lists: tuple[str, str],
        dtype: np.dtype[Any],
        genes: ListedGenes,
        n_markers: int,
    ) -> None:
        self.row_order, self.column_names = table.row_order, genes.names
        n_rows = len(table()) if self.row_order is None else self.row_order.size
        super().__init__(table.files, (n_rows, genes.n_vars), dtype)
        self._table, self._columns, self._n_markers = table, lists, n_markers
        self._n_stored = genes.columns.size - 1  # upper bound of gene numbers, exclusive

    def stored_bytes(self) -> int:
        """Return the size in bytes of lists and their offsets."""
        return int(self._table().select(self._columns).nbytes)

    def _find(self) -> CsrChunks:
        self._table.check_unchanged()
        batches = self._table().select(self._columns).to_batches()
        found = [self._lists(batch) for batch in batches if batch.num_rows]
        lengths = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in found)])
        pointer = np.append(0, np.cumsum(lengths))
        first_rows = np.cumsum([0, *(each.size for each, _ in found)])[:-1]
        sizes = np.array([genes.size for _, (genes, _) in found], np.int64)
        arrays, skipped = [], np.zeros(0, np.int64)
        for column, name in enumerate(self._columns):
            contents = [each[column] for _, each in found]
            dtype = contents[0].dtype if contents else np.dtype(np.int32)
            store, files, offsets = self._table.store_of(contents)
            pieces = Pieces(files, offsets, sizes, dtype.itemsize)
            skipped = pieces.firsts[:-1] * CHUNK_ELEMENTS - pointer[first_rows]
            arrays.append(pieced_array(name, pieces, dtype, store))
        arrays[0] = replace(arrays[0], bad_index=_OTHER_GENE)
        self._table.check_unchanged()
        genes, values = arrays
        return _Lists(pointer, genes, values, self._n_stored, first_rows, skipped, self._n_markers)

    def _lists(self, batch: Any) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
        """Return the lengths of the lists of a `pyarrow.RecordBatch`, and the values of both."""
        from pyarrow import compute  # noqa: PLC0415 - optional

        lengths, contents = list[NDArray[np.int64]](), list[NDArray[Any]]()
        location = self._table.location
        with failures_named(f"{location}: its lists are damaged", "copy it again", (ValueError,)):
            batch.validate(full=True)
        for column, name in zip(batch.columns, self._columns, strict=True):
            values = column.flatten()
            if column.null_count or values.null_count:
                msg = f"{location}: column {name!r}: not every cell has a list of numbers"
                raise FormatError(f"{msg}; leave those cells out")
            lengths.append(compute.list_value_length(column).to_numpy().astype(np.int64))
            contents.append(values.to_numpy())
        if not np.array_equal(lengths[0], lengths[1]):
            msg = "columns {!r} and {!r}: the lists of a cell differ in length"
            msg = f"{location}: {msg.format(*self._columns)}"
            raise FormatError(f"{msg}; give columns that belong together")
        return lengths[0], contents


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
        schema, dtypes = self._table().schema, list[np.dtype[Any]]()
        from pyarrow import compute, types  # noqa: PLC0415 - optional

        for name in self._lists:
            if name not in schema.names:
                msg = f"{self.location}: has no column {name!r}; give `genes=` and `values=` to"
                raise ColumnError(f"{msg} `HuggingFaceSource`, from: {', '.join(schema.names)}")
            found = schema.field(name).type
            is_list = types.is_list(found) or types.is_large_list(found)
            dtypes.append(np.dtype(found.value_type.to_pandas_dtype() if is_list else object))
            if dtypes[-1].kind not in "iuf" or dtypes[-1] == np.float16:
                msg = f"{self.location}: column {name!r} is of type {found}, not a list of numbers"
                remedy = "give another column, or cast float16 to float32"
                raise FormatError(f"{msg} for each cell; {remedy}")
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
            if n_vars is None:
                numbers = compute.list_flatten(self._table().column(genes))
                n_vars = (compute.max(numbers).as_py() or 0) + 1
            n_vars = require_positive("n_vars", n_vars)
            known = ListedGenes.in_order(n_vars, str(self.location))
        element = ArrowLists(self._table, self._lists, dtypes[1], known, n_markers)
        rows = digest_of_array(element.row_order), self._table.fingerprint
        self._selection = repr((self._lists, n_vars, n_markers, rows))
        if gene_table is not None:
            stored = known.columns[:-1]
            element.stored_columns = np.where(stored < 0, np.int32(_NOT_THERE), stored)
        self.elements = {"X": element}

    def selection(self) -> str:
        """Return the columns with lists, and which rows of its files it has."""
        return self._selection

    def obs_names(self) -> list[str]:
        """Return the columns with one number, boolean or text per row."""
        return [each.name for each in self._table().schema if kind(each.type)]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns, in row order; class labels as their names."""
        self._table.check_unchanged()
        frame = to_frame(self._table().select(list(columns)))
        self._table.check_unchanged()
        metadata = self._table().schema.metadata or {}
        info = json.loads(metadata.get(b"huggingface", b"{}")).get("info") or {}
        for name, feature in (info.get("features") or {}).items():
            is_label = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
            if name in frame and is_label:
                codes = frame[name].fillna(-1).astype(np.int64)
                frame[name] = pd.Categorical.from_codes(codes, pd.Index(feature["names"]))
        if self._table.row_order is not None:
            frame = frame.iloc[self._table.row_order].reset_index(drop=True)
        return frame

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
