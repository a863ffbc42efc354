"""Base classes of sources, which read the rows of a plan from any storage.

A source does not shuffle: it describes the chunks of its rows, or returns ascending runs of rows.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ColumnError, FormatError, ParameterError
from cellfeed._lazy import pd
from cellfeed._runs import Runs, expand
from cellfeed.bytes import Identity, Location, identity, removed, replaced
from cellfeed.bytes._store import FolderFiles, files_below
from cellfeed.decode import ChunkedArray, ChunkReads, RowRanges, SlowRead, can_cast
from cellfeed.machine import threads_per_process
from cellfeed.rows import (
    Chunks,
    CsrChunks,
    CsrRows,
    DenseChunks,
    FoundRows,
    Layout,
    ObsColumn,
    RaggedChunks,
    RaggedRows,
    RowTarget,
    SparseChunks,
)

_LOCKS = "_locks_of_reading"


class _Locks(dict[int, Any]):
    """The lock of each process: a thread that holds it is not in a fork."""

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class Source(ABC):
    """Base class of sources: stored cells with their elements, obs and var.

    Derive from it to read another storage. A source opens its storage lazily in each process, must
    be picklable and survive fork and spawn, and never shares a file handle or a connection between
    processes. In a process, the methods of a source and of its elements that read are called from
    one thread at a time, though not always the same one, however many datasets read the source.

    Attributes
    ----------
    location
        Its location, for messages and for the page cache. Opening the location gives only this
        source.
    elements
        The requested elements, at least one, by their requested names.
    can_be_forked
        Whether a process that has read from the source may fork worker processes. False if it uses
        a library that keeps threads, which do not survive a fork.
    """

    location: Location
    elements: Mapping[str, StoredElement]
    can_be_forked: bool = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.location)!r})"

    @property
    def reading(self) -> AbstractContextManager[object]:
        """The lock that a thread holds while it calls methods that read."""
        locks = vars(self).setdefault(_LOCKS, _Locks())
        lock: AbstractContextManager[object] = locks.setdefault(os.getpid(), threading.RLock())
        return lock

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return next(iter(self.elements.values())).shape[0]

    def file_bytes(self) -> int:
        """Return the total size of its files in bytes.

        By default, if the source is not local, this is the size of its elements, or 0 if unknown.
        """
        if self.location.path is None:
            return sum(each.stored_bytes() for each in self.elements.values())
        return sum(each.stat().st_size for each in self.files())

    def files(self) -> Sequence[Path]:
        """Return its local files.

        By default, this is the file at its location, or all files in that folder and in those that
        links in it lead to, and those of `linked_files`.
        """
        path = self.location.path
        if path is None:
            return ()
        files = sorted(files_below(path)) if path.is_dir() else [path]
        return [*(each for each in files if each.is_file()), *self.linked_files()]

    def linked_files(self) -> Sequence[Path]:
        """Return local files elsewhere to which its elements refer; by default, none."""
        return ()

    def version(self) -> str | None:
        """Return a digest that changes when the source is replaced; None if there is none.

        For example, it is a digest of the server's identifier of an object's version, its ETag.
        """
        return None

    def selection(self) -> str:
        """Return what selects its cells and values from those at the same location.

        For example, it is a query, or the names of the columns that ``X`` is read from. Empty if it
        has all cells, and the names of elements say which values they have.
        """
        return ""

    @abstractmethod
    def obs_names(self) -> Sequence[str]:
        """Return the names of the obs columns."""

    def refused_obs(self, name: str) -> str:  # noqa: ARG002 - for subclasses
        """Return why a column that is there is none of `obs_names`; empty if it is not there.

        This is the message of an error: the file, the column, why, and the remedy.
        """
        return ""

    @abstractmethod
    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else.

        Parameters
        ----------
        columns
            Some of `obs_names`, at least one, each once.

        Returns
        -------
        A data frame with a row for each cell. Columns are numbers, text or categories.
        """

    def plain_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:  # noqa: ARG002
        """Return those obs columns that can be read without pandas, whose import takes long.

        By default, there are none, and `read_obs` reads them all.

        Parameters
        ----------
        columns
            See `read_obs`.

        Returns
        -------
        Columns of numbers, in native byte order, and of text or of categories that are text.
        """
        return {}

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, and the names of their cells; `preshuffle` uses this.

        By default, whole columns are read, and the names of cells are their numbers. Text with
        missing values has pandas' dtype "string". The dtype of a column, and its categories, are
        the same for any rows.

        Parameters
        ----------
        columns
            Some of `obs_names`, each once; may be empty.
        rows
            Ascending rows, int64, shape (n,); may be empty.

        Returns
        -------
        A data frame with a row for each of ``rows``, indexed by the names of the cells.
        """
        names = pd.Index([str(row) for row in rows.tolist()], dtype=object)
        if not columns:
            return pd.DataFrame(index=names)
        return as_text(self.read_obs(columns).iloc[rows].set_index(names))

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes, indexed by their names; `preshuffle` uses this.

        By default, it has no columns, and the names are those of the first element.
        """
        return pd.DataFrame(index=pd.Index(next(iter(self.elements.values())).var_names()))


def as_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose text has the dtype "string", so that files do not hold "None"."""
    return table.astype({name: "string" for name in table if table[name].dtype == object})


def as_names(index: pd.Index[Any]) -> NDArray[np.object_]:
    """Return an index as text, None where it is missing."""
    names = index.astype(object).to_numpy(copy=True)
    missing = pd.isna(names)
    if not all(isinstance(name, str) for name in names):
        names = index.astype(str).astype(object).to_numpy(copy=True)
    names[missing] = None
    return names


def gene_names(
    table: pd.DataFrame, columns: Sequence[str], *, may_be_index: bool
) -> NDArray[np.object_] | None:
    """Return the names of the genes of a table; None if it has none.

    They are the first of the columns that there is; or the index, if it may be, unless it has
    numbers, as that of a data frame has that nobody has indexed by names.
    """
    if may_be_index and table.index.dtype.kind not in "iuf":
        return as_names(table.index)
    column = next((each for each in columns if each in table), None)
    return None if column is None else as_names(pd.Index(table[column]))


# Tables of genes, to which the numbers in lists of genes refer.

GENE_NAMES = ("ensembl_id", "gene_id", "feature_id", "gene_symbol", "gene_name", "feature_name")
_NUMBERS = "token_id"
_MOST_NUMBERS = 1 << 26  # whose columns take 256 MB


@dataclass(frozen=True, slots=True, eq=False)
class ListedGenes:
    """The genes of a matrix whose rows are lists of gene numbers.

    Parameters
    ----------
    columns
        Column of each gene number, int32, shape (n_numbers + 1,), -1 if it is of no gene; the last
        is of all larger numbers.
    table
        The table of genes, indexed by their names; None if gene numbers are columns.
    """

    columns: NDArray[np.int32]
    table: pd.DataFrame | None = None

    @classmethod
    def of_table(cls, table: pd.DataFrame, where: str) -> Self:
        """Return the genes of a table.

        Parameters
        ----------
        table
            A data frame whose column ``token_id`` has the gene numbers. Its index has the names of
            genes or, if it has numbers, one of the usual columns, see `gene_names`.
        where
            What messages call it.

        Raises
        ------
        ParameterError
            It is no data frame.
        ColumnError
            It has no gene numbers, or no names.
        FormatError
            Gene numbers are not distinct integers from 0.
        """
        if not hasattr(table, "set_index"):
            msg = f"`gene_table` must be a data frame, but is of type {type(table).__name__}"
            raise ParameterError(f"{msg}; read it with pandas")
        names = gene_names(table, GENE_NAMES, may_be_index=True)
        if names is None:
            msg = f"{where}: has no column with the names of genes; index the table by them"
            raise ColumnError(f"{msg}, or name one of: {', '.join(GENE_NAMES)}")
        if _NUMBERS not in table:
            msg = f"{where}: the table of genes has no column {_NUMBERS!r} with their numbers"
            raise ColumnError(f"{msg}; rename one of: {', '.join(map(str, table))}")
        numbers = table[_NUMBERS].to_numpy()
        is_list = numbers.dtype.kind in "iu" and np.unique(numbers).size == numbers.size
        if not is_list or not np.all((numbers >= 0) & (numbers < _MOST_NUMBERS)):
            msg = f"the column {_NUMBERS!r} of the table of genes must have distinct integers"
            raise FormatError(f"{where}: {msg} from 0; give another table")
        columns = np.full(int(numbers.max(initial=-1)) + 2, -1, np.int32)
        columns[numbers] = np.arange(numbers.size)
        return cls(columns, table.set_index(pd.Index(names, dtype=object)))

    @classmethod
    def in_order(cls, n_vars: int, where: str) -> Self:
        """Return genes whose numbers are their columns, from 0.

        Parameters
        ----------
        n_vars
            Number of genes.
        where
            What messages call the cells.

        Raises
        ------
        FormatError
            There are too many genes.
        """
        if n_vars > _MOST_NUMBERS:
            msg = f"{where}: has gene numbers up to {n_vars - 1}, which are no columns"
            raise FormatError(f"{msg}; give the source a `gene_table=`")
        return cls(np.append(np.arange(n_vars, dtype=np.int32), np.int32(-1)))

    @property
    def n_vars(self) -> int:
        """Number of genes."""
        return self.columns.size - 1 if self.table is None else len(self.table)

    @property
    def names(self) -> NDArray[np.object_] | None:
        """Names of the genes, str, shape (n_vars,); None without a table."""
        return None if self.table is None else self.table.index.to_numpy(object)

    def columns_of(self, numbers: NDArray[Any]) -> NDArray[np.int32]:
        """Return the column of each gene number, -1 if it is of no gene."""
        numbers = numbers.astype(np.int64, copy=False)
        columns = self.columns.take(numbers, mode="clip")
        columns[numbers < 0] = -1
        return columns


class OpenedPerProcess(ABC):
    """A file, archive or connection that each process opens when it is first called.

    What is open does not survive a fork, and cannot be pickled. Subclasses define `_open`, which
    opens it and returns what calling the object returns.

    Examples
    --------
    >>> class Database(OpenedPerProcess):
    ...     def __init__(self, path):
    ...         self.path = path
    ...
    ...     def _open(self):
    ...         return open(self.path, "rb")
    """

    _opened: Any = None
    _process = -1

    def __call__(self) -> Any:
        """Return what `_open` returned in this process."""
        if not self.is_open:
            self._opened, self._process = self._open(), os.getpid()
        return self._opened

    @property
    def is_open(self) -> bool:
        """Whether this process has opened it."""
        return self._process == os.getpid()

    @abstractmethod
    def _open(self) -> Any:
        """Open it; in a fork, `_opened` is still what the parent opened."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_process": -1}


class WatchedFiles:
    """Local files that must stay as they were when they were first seen, in any process."""

    def __init__(self) -> None:
        self._known = dict[Path, tuple[Path | Location, Identity]]()

    def see(self, path: Path, found: os.stat_result, shown: Path | Location | None = None) -> None:
        """Compare the state of a file with the first one.

        Parameters
        ----------
        path
            Its absolute path.
        found
            Its state.
        shown
            Its path for messages, if that is another one.

        Raises
        ------
        FormatError
            It was replaced or written to.
        """
        now = identity(found)
        shown, first = self._known.setdefault(path, (shown or path, now))
        if now != first:
            raise replaced(shown)

    def check(self) -> None:
        """Check all files.

        Raises
        ------
        FormatError
            One was replaced or written to.
        PathError
            One was removed.
        """
        for path, (shown, _) in self._known.items():
            try:
                found = os.stat(path)  # noqa: PTH116 - called often
            except OSError as error:
                raise removed(shown) from error
            self.see(path, found)


class StoredElement(ABC):
    """Base class of the stored arrays of a source, such as its matrix, with a row for each cell.

    Derive from it to read another storage. Override `read_rows` if the storage returns rows; use
    `ChunkedCsr`, `ChunkedDense` or `ChunkedRagged` if cellfeed can decode its chunks.

    Attributes
    ----------
    shape
        Numbers of cells and columns. Images, for example, have more than two dimensions; ragged
        rows, which have no columns, have one.
    dtype
        Dtype of the stored values, in native byte order; it may be structured, except in sparse
        rows.
    layout
        "csr" for sparse rows, "dense" for dense rows, "ragged" for rows of different lengths.
    var
        The table with the names of its columns, such as ``var``; its own path if it is a data
        frame; None if its columns have no names, or if rows are ragged.
    column_names
        The names of its columns, str, shape (n_columns,), which `var_names` returns; None if they
        are only read when they are needed, or are the numbers of columns.
    row_order
        The stored row of each cell, distinct, int64, shape (n_cells,); None if rows are stored
        in the order of the cells. All methods take and return stored rows.
    stored_columns
        The column of each stored column, int32, shape (n_stored,); -1 if it is left out, -2 if it
        must not have elements; None if columns are stored in order. `chunked` and `read_rows` use
        stored columns.
    chunk_shape
        Shape of a chunk that is read as a whole; None if there are no chunks.
    rows_per_chunk
        Mean number of rows in a chunk.
    chunk_starts
        First row of each chunk, and the end of the last, int64, shape (n_chunks + 1,), if chunks
        consist of whole rows that `read_rows` decodes together; else None. `BlockShuffling` with
        ``align="chunks"`` uses it.
    stored_as
        Path of the array in an AnnData file, such as ``layers/counts``; empty elsewhere.
    expected_row_bytes
        Mean number of bytes per row that `expect` requests; 0, the default, if it requests none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout
    var: str | None = "var"
    column_names: NDArray[Any] | None = None
    row_order: NDArray[np.int64] | None = None
    stored_columns: NDArray[np.int32] | None = None
    chunk_shape: tuple[int, ...] | None = None
    rows_per_chunk: float = 1.0
    chunk_starts: NDArray[np.int64] | None = None
    stored_as: str = ""
    expected_row_bytes: float = 0.0

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,).

        By default, they are `column_names`, or else the numbers of columns. Called only when names
        are needed, or compared with those of other sources.
        """
        if self.column_names is not None:
            return self.column_names
        n_columns = self.shape[1] if len(self.shape) > 1 else 0
        return np.array([str(column) for column in range(n_columns)], object)

    def stored_bytes(self) -> int:
        """Return the size of values and indices in storage, in bytes; 0 if unknown."""
        return 0

    def codec(self) -> str:
        """Return the compression of the values, such as "gzip 4", "zstd, sharded" or "none"."""
        return "unknown"

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - for subclasses
        """Return why `chunked` returns None for reading as this dtype; None if it does not.

        The answer comes from metadata, without reading values. It is also None if a library reads
        at full speed.
        """
        return None

    def load_tables(self) -> None:  # noqa: B027 - there need not be any
        """Read the tables that locate rows now, not with the first rows.

        These are row pointers, tables of chunks and indexes of shards, which are read once and stay
        in the process, so that processes that are forked later share them. Without such
        tables, or if they have been read, this does nothing.

        Raises
        ------
        FormatError
            The storage is damaged, or was replaced since it was opened.
        """

    def row_lengths(self, runs: Runs) -> NDArray[np.int64] | None:  # noqa: ARG002 - for subclasses
        """Return how many elements each row of ``runs`` stores, int64, shape (n_rows_in_runs,).

        None if that is unknown before they are read, or if rows are dense.
        """
        return None

    def chunked(self) -> Chunks | None:
        """Return the chunks of the rows, if cellfeed can decode them.

        Threads decode the chunks of many sources together. This is called for each fetch.

        Returns
        -------
        None if cellfeed cannot decode the storage; `read_rows` is called instead.

        Raises
        ------
        FormatError
            The storage is damaged, or was replaced since it was opened.
        """
        return None

    def expect(self, runs: Runs) -> object | None:  # noqa: ARG002 - for subclasses
        """Start requesting rows that `read_rows` will read, without waiting.

        If `expected_row_bytes` is not 0, this, `chunked` and `row_lengths` are called while other
        threads read, for several fetches before the first of them is read.

        Parameters
        ----------
        runs
            All rows of one fetch; see `read_rows`. These rows, or parts of them, are read later,
            possibly twice or never.

        Returns
        -------
        An object that keeps the requests alive. When it is dropped, rows that have not been read
        are discarded.
        """
        return None

    @abstractmethod
    def read_rows(self, runs: Runs) -> CsrRows | RaggedRows | NDArray[Any]:
        """Read the whole rows of ``runs``.

        Parameters
        ----------
        runs
            Ascending, disjoint runs of rows within the element, int64, shape (n, 2), each
            ``[start, stop)``; `expand` returns their rows. May be empty.

        Returns
        -------
        The rows in ascending order with the stored columns, of any numeric dtype: `CsrRows` if the
        layout is "csr", whose columns may be in any order and include duplicates (which are
        summed); an array of shape (n_rows, n_columns) if it is "dense"; `RaggedRows` if it is
        "ragged".

        Raises
        ------
        FormatError
            The storage is truncated or damaged; the message names location, element and rows.
        """


# Elements whose arrays are stored in chunks that cellfeed decodes.


class ChunkedElement(StoredElement):
    """Base class of elements whose rows cellfeed decodes; `chunked` returns their chunks."""

    _chunks: Chunks

    def chunked(self) -> Chunks:
        """Return the chunks of the rows."""
        return self._chunks

    def row_lengths(self, runs: Runs) -> NDArray[np.int64] | None:
        """Return the number of elements of each row; None if rows are dense."""
        return None if self.layout == "dense" else self.chunked().lengths_of(expand(runs))

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        return why_not_cast(self.dtype, dtype)

    def read_rows(self, runs: Runs) -> CsrRows | RaggedRows | NDArray[Any]:
        """Read rows in this thread, with values as stored."""
        chunks, rows = self.chunked(), expand(runs)
        if isinstance(chunks, RaggedChunks | RowRanges) and chunks.layout == "ragged":
            return read_ragged(chunks, rows)
        lengths = chunks.lengths_of(rows)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        values = np.empty(ends[-1], self.dtype)
        starts = ends[:-1] * values.itemsize
        if isinstance(chunks, SparseChunks):
            indices = np.empty(ends[-1], np.int32)
            target = RowTarget(
                lengths=lengths,
                destinations=[ends[:-1] * indices.itemsize, starts],
                dtypes=[indices.dtype, values.dtype],
            )
            reads = chunks.reads(chunks.extents(rows), target)
            for each, out in zip(reads, (indices, values), strict=True):
                _run(each, out)
            return CsrRows(ends, indices, values, chunks.n_columns)
        _run(chunks.reads(rows, starts, values.dtype), values)
        return values.reshape(rows.size, *self.shape[1:])


class ChunkedCsr(ChunkedElement):
    """Sparse rows in two chunked arrays, as anndata writes them.

    Parameters
    ----------
    indptr
        Row pointers, int64, shape (n_rows + 1,).
    indices, data
        One-dimensional arrays, shape (n_elements,): column and value of each stored element.
    n_columns
        Number of columns.

    Notes
    -----
    float16, which SciPy does not support, is read as float32.
    """

    layout: Layout = "csr"

    def __init__(
        self,
        indptr: NDArray[np.int64],
        indices: ChunkedArray,
        data: ChunkedArray,
        n_columns: int,
    ) -> None:
        self._chunks = CsrChunks(indptr, indices, data, n_columns)
        self.shape = (len(indptr) - 1, n_columns)
        self.dtype = data.dtype


class ChunkedDense(ChunkedElement):
    """Dense rows in one chunked array.

    Parameters
    ----------
    array
        Two-dimensional array, shape (n_rows, n_columns).
    """

    layout: Layout = "dense"

    def __init__(self, array: ChunkedArray) -> None:
        self._chunks = DenseChunks(array, array.shape[1])
        self.shape = (array.shape[0], array.shape[1])
        self.dtype = array.dtype


class ChunkedRagged(ChunkedElement):
    """Rows of different lengths, concatenated in one chunked array.

    Parameters
    ----------
    indptr
        Start of each row in ``values``, and the end of the last; ascending, int64, shape
        (n_rows + 1,).
    values
        One-dimensional array, shape (n_values,).
    """

    layout: Layout = "ragged"
    var = None

    def __init__(self, indptr: NDArray[np.int64], values: ChunkedArray) -> None:
        self._chunks = RaggedChunks(indptr, values)
        self.shape = (len(indptr) - 1,)
        self.dtype = values.dtype


def read_ragged(chunks: RaggedChunks | RowRanges, rows: NDArray[np.int64]) -> RaggedRows:
    """Read ascending rows in this thread, with values as stored."""
    offsets = np.concatenate([[0], np.cumsum(chunks.lengths_of(rows))])
    out = np.empty(offsets[-1], chunks.dtype)
    _run(chunks.reads(rows, offsets[:-1] * out.itemsize, out.dtype), out)
    return RaggedRows(offsets, out)


def why_not_cast(
    stored: np.dtype[Any], dtype: np.dtype[Any], library: str = "NumPy"
) -> SlowRead | None:
    """Return why stored values cannot be cast to a dtype while reading; None if they can.

    Parameters
    ----------
    stored, dtype
        The dtypes.
    library
        The library that reads them instead.
    """
    if can_cast(stored, dtype):
        return None
    reason = f"cellfeed does not convert {stored} to {dtype}"
    return SlowRead(library, reason, f"read it as {stored}, or write it as {dtype}")


def _run(reads: ChunkReads, out: NDArray[Any]) -> None:
    if not reads.are_requested:
        reads.readahead()
    reads.run(np.array([out.ctypes.data], np.int64))


def fill(out: NDArray[Any], runs: Runs, read: Callable[[int, int], Any]) -> NDArray[Any]:
    """Return an array filled with what a library reads: ``read(start, stop)`` for each run."""
    filled = 0
    for start, stop in runs.tolist():
        out[filled : filled + stop - start] = read(start, stop)
        filled += stop - start
    return out


def threads_of_process() -> int:
    """Return how many threads read in this process, which may be a worker of PyTorch."""
    torch_data = sys.modules.get("torch.utils.data")
    worker = None if torch_data is None else torch_data.get_worker_info()
    return threads_per_process(1 if worker is None else worker.num_workers)


# Sparse rows in uncompressed arrays in local files.


def files_in(folder: Path, names: Sequence[str]) -> FolderFiles:
    """Return files of a folder, numbered in the order of their names, which may contain ``/``."""
    encoded = np.array([os.fsencode(name) for name in names], np.bytes_)
    return FolderFiles(folder, partial(np.take, encoded), len(names))


class FlatCsr(ChunkedElement):
    """Sparse rows in uncompressed arrays, which are located when rows are first read.

    Parameters
    ----------
    files
        The files of the arrays.
    shape
        Number of cells and of genes.
    dtype
        Dtype of the stored values, not float16, which SciPy does not support.
    """

    layout: Layout = "csr"

    def __init__(self, files: FolderFiles, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        self._files = files
        self.shape = shape
        self.dtype = dtype
        self._found: CsrChunks | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}

    def codec(self) -> str:
        """Return "none", since nothing is compressed."""
        return "none"

    def load_tables(self) -> None:
        """Read the row pointers."""
        self.chunked()

    def chunked(self) -> CsrChunks:
        """Return the location of the rows."""
        if self._found is None:
            self._found = self._find()
        return self._found

    @abstractmethod
    def _find(self) -> CsrChunks:
        """Return the location of the rows, read from storage."""


class FoundCsr(StoredElement):
    """Sparse rows whose lengths are found while reading them, before elements are decoded."""

    layout: Layout = "csr"

    @abstractmethod
    def find_rows(self, runs: Runs) -> FoundRows:
        """Read what says how long the rows of ``runs`` are.

        Raises
        ------
        FormatError
            See `read_rows`; also when elements are decoded to their destinations.
        """
