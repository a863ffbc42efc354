"""Parquet files with a row for each cell: two lists of genes and values, or a column per gene."""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import (
    BufferPool,
    Location,
    StorageOptions,
    digest_of,
    digest_of_array,
    open_object,
)
from cellfeed.decode import SlowRead
from cellfeed.extending import (
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    pd,
    require_list,
    require_not_negative,
    require_positive,
)
from cellfeed.rows import CsrRows, FoundRows, Layout, RowTarget, summable
from cellfeed.sources import (
    MOST_GENE_NUMBERS,
    FoundCsr,
    Runs,
    Source,
    Storage,
    StoredElement,
    columns_of_genes,
    expand,
    named_genes,
    split_at,
    threads_of_process,
)
from cellfeed.storages.parquet._files import EXTRA, ParquetFiles, RowGroups
from cellfeed.storages.parquet._lists import Lists, page_bytes
from cellfeed.storages.parquet._paths import GENE_TABLE, SUFFIX, files_at, is_parquet, is_partition

# Threads of this process that decode row groups. They do not hold the GIL meanwhile.


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that decode, of this process."""
    return ThreadPoolExecutor(threads_of_process(), "cellfeed-parquet")


os.register_at_fork(after_in_child=_threads.cache_clear)


class _Pending:
    """Rows that are being decoded; those that no thread has begun are cancelled if it is dropped.

    Parameters
    ----------
    runs
        The rows.
    parts
        The rows of each row group, in order.
    requests
        What keeps requests to a server alive.
    """

    def __init__(self, runs: Runs, parts: Sequence[Future[Any]], requests: object) -> None:
        self._runs: Runs | None = runs
        self._parts, self._requests = [*parts], requests
        weakref.finalize(self, _cancel, self._parts).atexit = False

    def has(self, runs: Runs) -> bool:
        """Return whether these are the rows, and were not taken."""
        return self._runs is not None and np.array_equal(self._runs, runs)

    def taken(self) -> list[Any]:
        """Wait for the parts, and return them; they are not kept."""
        found = [part.result() for part in self._parts]
        self._parts.clear()
        self._runs = self._requests = None
        return found


def _cancel(parts: Sequence[Future[Any]]) -> None:
    for part in parts:
        part.cancel()


# Row groups of this process that were decoded in part, by process, files and number: the first row
# of the last batch, and the batches from that one on.
#
# pyarrow can decode a row group only from its beginning. If a fetch ends within one, the next fetch
# goes on where that one stopped.
_divided = dict[tuple[int, int, int], tuple[int, Iterator[tuple[int, Any]]]]()
_MOST_DIVIDED = 4  # each of which keeps the compressed columns of its row group

# Elements whose chunks are row groups.

_LARGE_GROUP = 16_384  # rows of a row group above which reading some of them is slow


class _RowGroupElement(StoredElement):
    """Rows that are decoded by row group, several of them at a time.

    Parameters
    ----------
    files, groups
        The files, and their row groups.
    columns
        The columns of the files that are read.
    """

    def __init__(self, files: ParquetFiles, groups: RowGroups, columns: Sequence[str]) -> None:
        self._files, self._groups, self._columns = files, groups, tuple(columns)
        rows = np.diff(groups.starts)
        self.chunk_starts = groups.starts
        self.rows_per_chunk = float(rows.mean()) if rows.size else 1.0
        # Replaced when it changes, since two threads read it.
        self._pending = tuple[weakref.ref[_Pending], ...]()
        self.retained = dict[int, tuple[Lists, Lists]]()  # decompressed, of row groups

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pending": (), "retained": {}}

    def stored_bytes(self) -> int:
        """Return the size of the columns in bytes."""
        return int(self._groups.sizes.sum())

    def codec(self) -> str:
        """Return the compression of pages."""
        return self._groups.codec

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - for any
        """Return why reading is slow if row groups are large; None if they are not."""
        rows = np.diff(self._groups.starts)
        if not rows.size or rows.max() <= _LARGE_GROUP:
            return None
        shown = self._files.locations[int(self._groups.files[rows.argmax()])].shown
        reason = f"a row group of {rows.max():,} rows is decoded for any of them"
        remedy = (
            "write smaller ones: `from pyarrow import dataset as ds; "
            f"ds.write_dataset(ds.dataset({shown!r}), 'smaller', format='parquet', "
            "max_rows_per_group=1000, use_threads=False)`"
        )
        return SlowRead("pyarrow", reason, remedy)

    def expect(self, runs: Runs) -> object:
        """Start decoding rows, without waiting."""
        pending = self._begun(runs)
        self._pending = (*(each for each in self._pending if each()), weakref.ref(pending))
        return pending

    def _begun(self, runs: Runs) -> _Pending:
        parts = [*split_at(runs, self._groups.starts)]
        read = [group for group, _ in parts if group not in self.retained]
        requests = self._files.expect(self._groups, np.array(read, np.int64))
        begun = [_threads().submit(self._decode_checked, group, rows) for group, rows in parts]
        return _Pending(runs, begun, requests)

    def _taken(self, runs: Runs) -> list[Any]:
        """Return the rows of each row group, in order; those of `expect`, if they were expected."""
        expected = (each() for each in self._pending)
        found = next((each for each in expected if each is not None and each.has(runs)), None)
        return (found or self._begun(runs)).taken()

    def _decode_checked(self, group: int, runs: Runs) -> list[Any]:
        """Return rows of a row group, whose file has not changed meanwhile."""
        found = self._decode(group, runs)
        self._files.check(int(self._groups.files[group]))
        return found

    def _decode(self, group: int, runs: Runs) -> list[Any]:
        """Return rows of a row group, batch by batch."""
        files, groups = self._files, self._groups
        found, stop = list[Any](), int(runs[-1, 1])
        key = os.getpid(), id(files), group  # the iterators keep the files alive
        last, batches = _divided.pop(key, (stop, iter(())))
        if last <= runs[0, 0]:
            files.check(int(groups.files[group]))
        else:
            batches = files.batches(groups, group, self._columns)
        for first, batch in batches:
            own = np.clip(runs - first, 0, batch.num_rows)
            own = own[own[:, 0] < own[:, 1]]
            if own.size:
                found.append(self._rows_of(batch, own, group))
            if first + batch.num_rows >= stop:
                if stop < groups.starts[group + 1] - groups.starts[group]:
                    for oldest in [*_divided][: 1 - _MOST_DIVIDED]:
                        _divided.pop(oldest, None)
                    _divided[key] = first, chain([(first, batch)], batches)
                break
        return found

    @abstractmethod
    def _rows_of(self, batch: Any, runs: Runs, group: int) -> Any:
        """Return rows of a `pyarrow.RecordBatch`."""

    def _wrong(self, group: int, what: str) -> FormatError:
        file, number = int(self._groups.files[group]), int(self._groups.numbers[group])
        where = self._files.locations[file].shown
        return FormatError(f"{where}: row group {number}: {what}")


@dataclass(frozen=True, slots=True, eq=False)
class _GeneNumbers:
    """Which column each gene number stands for.

    Parameters
    ----------
    columns
        Column of each number, int32, shape (n_numbers + 1,), -1 if it is of no gene; the last is
        of all larger numbers.
    are_named
        Whether a table of genes has the numbers; otherwise they are columns.
    n_markers
        Number of elements at the beginning of each cell that are not genes; if None, a first
        element is none if its number is of no gene and its value is negative.
    """

    columns: NDArray[np.int32]
    are_named: bool
    n_markers: int | None

    def columns_of(self, numbers: NDArray[Any]) -> NDArray[np.int32]:
        """Return the column of each number, -1 if it is of no gene."""
        numbers = numbers.astype(np.int64, copy=False)
        columns = self.columns.take(numbers, mode="clip")
        if numbers.size and numbers.min() < 0:
            columns[numbers < 0] = -1
        return columns


# Pages are kept, decompressed, until it is known where rows go, if they take at most so many times
# the memory of these rows. Where fewer rows of a row group are wanted, they are decoded at once.
_MOST_KEPT = 2

# If the pages of all lists of a source take at most so many bytes, decompressed, a process retains
# those of a row group when it reads from it again; and at most so many of all its sources.
_RETAINED_BYTES = 1 << 30
_retaining = weakref.WeakSet["ParquetLists"]()
_lock = threading.Lock()


class ParquetLists(_RowGroupElement, FoundCsr):
    """Sparse rows: in each, a list of genes and a list of values.

    Parameters
    ----------
    files, groups, columns
        See the base class; the columns of genes and of values.
    shape
        Number of cells and of genes.
    numbers
        Which genes the numbers in the first list are.
    names
        Names of the genes; None if they are numbers.
    """

    def __init__(
        self,
        files: ParquetFiles,
        groups: RowGroups,
        columns: tuple[str, str],
        shape: tuple[int, int],
        numbers: _GeneNumbers,
        names: NDArray[np.object_] | None,
    ) -> None:
        super().__init__(files, groups, columns)
        self.shape, self.column_names = shape, names
        self.dtype = summable(groups.dtype)
        largest = int(np.diff(groups.starts).max(initial=0))
        self.chunk_shape = (largest, shape[1])
        self._numbers, self._memory = numbers, BufferPool()
        n_bytes = groups.n_values.sum() // 2 * (np.dtype(np.int32).itemsize + self.dtype.itemsize)
        self.expected_row_bytes = max(1.0, float(n_bytes) / max(1, shape[0]))
        self._retains = page_bytes(groups.lists) <= _RETAINED_BYTES
        self._read_before = set[int]()

    def read_rows(self, runs: Runs) -> CsrRows:
        """Return rows; wait for expected ones, and decode others."""
        return self._in_memory(self.find_rows(runs), self.dtype)

    def find_rows(self, runs: Runs) -> FoundRows:
        """Return rows whose values are decoded when it is known where they go."""
        parts: list[FoundRows] = [each for part in self._taken(runs) for each in part]
        lengths = np.concatenate([np.empty(0, np.int64), *(each.lengths for each in parts)])
        return FoundRows(lengths, partial(_put_all, parts))

    def _in_memory(self, rows: FoundRows, dtype: np.dtype[Any]) -> CsrRows:
        """Return decoded rows, in memory that is used again: new memory costs more than copying."""
        indptr, dtypes = np.append(0, np.cumsum(rows.lengths)), (np.dtype(np.int32), dtype)
        n = int(indptr[-1])
        indices, data = (self._memory.acquire(n * each.itemsize).array(each, n) for each in dtypes)
        starts = [each.ctypes.data + indptr[:-1] * each.itemsize for each in (indices, data)]
        rows.put(RowTarget(lengths=rows.lengths, destinations=starts, dtypes=dtypes))
        return CsrRows(indptr, indices, data, self.shape[1])

    def _decode(self, group: int, runs: Runs) -> list[Any]:
        """Return rows of a row group."""
        found = self._found_here(group, runs)
        return super()._decode(group, runs) if found is None else [found]

    def _found_here(self, group: int, runs: Runs) -> FoundRows | None:
        """Return rows of a row group that cellfeed decodes; None if only pyarrow can.

        pyarrow also names what is wrong.
        """
        lists = self._lists_of_rows(group, runs)
        if lists is None:
            return None
        genes, values = lists
        columns_of_firsts, firsts = genes.firsts(), values.firsts()
        if columns_of_firsts is None or firsts is None:
            return None
        n_skipped = self._n_skipped(genes.lengths, columns_of_firsts, firsts, group)
        lengths = genes.lengths - n_skipped

        def write(target: RowTarget) -> bool:
            ascend = genes.write(target.destinations[0], n_skipped)
            if ascend is None or values.write(target.destinations[1], n_skipped) is None:
                return self._put_by_library(group, runs, target)
            return ascend

        def put(target: RowTarget) -> bool:
            if [*target.dtypes] == [genes.dtype, values.dtype]:
                return write(target)
            return target.put(self._in_memory(FoundRows(lengths, write), values.dtype))

        n_bytes = int(lengths.sum()) * (genes.dtype.itemsize + values.dtype.itemsize)
        n_bytes *= _MOST_KEPT
        if group not in self.retained and genes.memory.nbytes + values.memory.nbytes > n_bytes:
            return _found(self._in_memory(FoundRows(lengths, write), values.dtype))
        return FoundRows(lengths, put)

    def _lists_of_rows(self, group: int, runs: Runs) -> tuple[Lists, Lists] | None:
        """Return both lists of rows, whose pages are retained; None if only pyarrow can."""
        if group not in self.retained and group in self._read_before and self._retains:
            whole = np.array([[0, self._groups.starts[group + 1] - self._groups.starts[group]]])
            lists = self._opened(group, whole)
            if lists is None:
                return None
            with _lock:
                _retaining.add(self)
                every = (lists, *(pair for each in _retaining for pair in each.retained.values()))
                self._retains = sum(a.n_bytes + b.n_bytes for a, b in every) <= _RETAINED_BYTES
                if self._retains:
                    self.retained[group] = lists
        if group not in self.retained:
            self._read_before.add(group)
            return self._opened(group, runs)
        genes, values = self.retained[group]
        return genes.rows(runs), values.rows(runs)

    def _opened(self, group: int, runs: Runs) -> tuple[Lists, Lists] | None:
        """Return both lists of rows of a row group, decompressed; None if only pyarrow can."""
        groups, memory = self._groups, self._memory
        is_known = (groups.lists[group] >= 0).all()
        stored = self._files.column_bytes(groups, group, memory) if is_known else None
        if stored is None:
            return None
        n_rows = int(groups.starts[group + 1] - groups.starts[group])
        described, of = groups.lists[group], (n_rows, runs, memory, self.dtype)
        genes = Lists.open(stored[0], described[0], *of, self._numbers.columns)
        values = None if genes is None else Lists.open(stored[1], described[1], *of)
        if genes is None or values is None or not np.array_equal(genes.lengths, values.lengths):
            return None
        return genes, values

    def _put_by_library(self, group: int, runs: Runs, target: RowTarget) -> bool:
        first, ascend = 0, True
        for rows in super()._decode(group, runs):
            own = target[first : first + rows.lengths.size]
            if not np.array_equal(rows.lengths, own.lengths):
                raise self._wrong(group, "its pages are damaged; copy the file again")
            first, ascend = first + len(own), rows.put(own) and ascend
        return ascend

    def _rows_of(self, batch: Any, runs: Runs, group: int) -> FoundRows:
        lengths, numbers = self._lists(batch, 0, group)
        lengths_of_values, values = self._lists(batch, 1, group)
        values = values.astype(self.dtype, copy=False)
        if not np.array_equal(lengths, lengths_of_values):
            msg = "columns {!r} and {!r}: the lists of a cell differ in length".format(
                *self._columns
            )
            raise self._wrong(group, f"{msg}; give columns that belong together")
        columns = self._numbers.columns_of(numbers)
        stops, rows = np.cumsum(lengths), expand(runs)
        starts, stops = (stops - lengths)[rows], stops[rows]
        firsts = starts[stops > starts]
        n_skipped = self._n_skipped(stops - starts, columns[firsts], values[firsts], group)
        if n_skipped.any():
            spans = np.stack([starts + n_skipped, stops], axis=1)
        else:
            ends = np.cumsum(runs[:, 1] - runs[:, 0])
            spans = np.stack([starts[ends - (runs[:, 1] - runs[:, 0])], stops[ends - 1]], axis=1)
        own = _cut(columns, spans)
        if own.size and own.min() < 0:
            raise self._unknown(_cut(numbers, spans)[int((own < 0).argmax())], group)
        indptr = np.append(0, np.cumsum(stops - starts - n_skipped))
        return _found(CsrRows(indptr, own, _cut(values, spans), self.shape[1]))

    def _lists(self, batch: Any, column: int, group: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the lengths of the lists of a column, and all their values."""
        import pyarrow.compute as pc  # noqa: PLC0415 - optional

        found = batch.column(column)
        flat = pc.list_flatten(found)
        if found.null_count or flat.null_count:
            msg = f"column {self._columns[column]!r}: not every cell has a list of numbers"
            raise self._wrong(group, f"{msg}; leave those cells out")
        if hasattr(flat, "dictionary"):
            flat = flat.dictionary_decode()
        return (
            pc.list_value_length(found).to_numpy().astype(np.int64),
            flat.to_numpy(zero_copy_only=False),
        )

    def _n_skipped(
        self,
        lengths: NDArray[np.int64],
        columns: NDArray[np.int32],
        values: NDArray[Any],
        group: int,
    ) -> NDArray[np.int64]:
        """Return how many elements at the beginning of each row are not genes.

        Columns and values are those of the first element of each row that has any.
        """
        if self._numbers.n_markers is not None:
            given: NDArray[np.int64] = np.minimum(lengths, self._numbers.n_markers)
            return given
        are_negative = values < 0
        if not self._numbers.are_named and are_negative.any():
            first = values[are_negative][0]
            msg = f"a cell begins with the value {first}, like the marker of Tahoe-100M"
            remedy = (
                "give `gene_table=`, or `n_markers=1` to leave it out, `n_markers=0` to keep it"
            )
            raise self._wrong(group, f"{msg}; {remedy}")
        skipped = np.zeros(lengths.size, np.int64)
        skipped[lengths > 0] = are_negative & (columns < 0)
        return skipped

    def _unknown(self, number: Any, group: int) -> FormatError:
        if not self._numbers.are_named:
            msg = f"gene number {number} is not below `n_vars`, {self.shape[1]}"
            return self._wrong(group, f"{msg}; give a larger one, or `gene_table=`")
        msg = f"gene number {number} is not in the table of genes"
        remedy = "give `gene_table=` with all genes; `n_markers=` if cells begin with others"
        return self._wrong(group, f"{msg}; {remedy}")


def _cut(values: NDArray[Any], spans: NDArray[np.int64]) -> NDArray[Any]:
    """Return spans of values, one after the other."""
    return np.concatenate([values[:0], *(values[start:stop] for start, stop in spans.tolist())])


def _found(rows: CsrRows) -> FoundRows:
    return FoundRows(np.diff(rows.indptr), lambda target: target.put(rows))


def _put_all(parts: Sequence[FoundRows], target: RowTarget) -> bool:
    """Write the rows of all parts, several of them at a time; see `FoundRows`."""
    bounds = np.append(0, np.cumsum([each.lengths.size for each in parts])).tolist()
    running = [
        _threads().submit(each.put, target[first:stop])
        for each, first, stop in zip(parts, bounds, bounds[1:], strict=False)
    ]
    try:
        results = [each.result() for each in running]  # of all, whatever they are
    except BaseException:
        # The other threads write into memory that the caller is about to release.
        _cancel(running)
        wait(running)
        raise
    return all(results)


class ParquetColumns(_RowGroupElement):
    """Dense rows: a column of the files for each gene.

    Parameters
    ----------
    files, groups, columns
        See the base class; the columns are the genes.
    """

    layout: Layout = "dense"

    def __init__(
        self,
        files: ParquetFiles,
        groups: RowGroups,
        columns: Sequence[str],
    ) -> None:
        super().__init__(files, groups, columns)
        self.shape = int(groups.starts[-1]), len(columns)
        self.dtype = groups.dtype
        self.column_names = np.array(columns, object)
        self.chunk_shape = (int(np.diff(groups.starts).max(initial=0)), len(columns))
        self.expected_row_bytes = float(max(1, len(columns) * self.dtype.itemsize))

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Return rows; wait for expected ones, and decode others."""
        parts = [each for part in self._taken(runs) for each in part]
        return np.concatenate([np.empty((0, self.shape[1]), self.dtype), *parts])

    def _rows_of(self, batch: Any, runs: Runs, group: int) -> NDArray[Any]:
        rows = expand(runs)
        found = np.empty((rows.size, self.shape[1]), self.dtype)
        for k, name in enumerate(self._columns):
            column = batch.column(k)
            if column.null_count:
                msg = f"column {name!r}: not every cell has a value"
                raise self._wrong(group, f"{msg}; leave the column or those cells out")
            if hasattr(column, "dictionary"):
                column = column.dictionary_decode()
            found[:, k] = column.to_numpy(zero_copy_only=False)[rows]
        return found


# The table of genes.


def _found_gene_table(first: Location) -> Location | None:
    """Return the table of genes beside a file, or in ``metadata`` beside its folder, if any.

    Folders that are partitions count as the one that they are in.
    """
    if first.path is not None:
        parent = first.path.parent
        while is_partition(parent.name):
            parent = parent.parent
        candidates = [str(each / GENE_TABLE) for each in (parent, parent / "../metadata")]
        return next((Location.of(each) for each in candidates if Path(each).is_file()), None)
    folder = first.text.rpartition("/")[0]
    while is_partition(unquote(folder.rpartition("/")[2])):
        folder = folder.rpartition("/")[0]
    above = folder.rpartition("/")[0]
    candidates = [f"{folder}/{GENE_TABLE}"]
    if "://" in above:
        candidates.insert(0, f"{above}/metadata/{GENE_TABLE}")
    for each in candidates:
        try:
            open_object(found := Location(each, first.options))
        except PathError:
            continue
        return found
    return None


def _read_gene_table(given: Any, names: str | None, options: StorageOptions) -> pd.DataFrame:
    """Return a table of genes, indexed by their names."""
    if isinstance(given, str | os.PathLike):
        location = Location.of(given)
        if location.path is None:
            location = location.with_options(options)
        files = ParquetFiles(location, files_at(location))
        table: pd.DataFrame = next(files.read(files.schema.names)).to_pandas()
    elif hasattr(given, "set_index"):
        table, location = given, Location("gene_table")
    else:
        msg = "`gene_table` must be a data frame, or the path or URL of a Parquet file"
        raise ParameterError(f"{msg}, but got one of type {type(given).__name__}")
    return named_genes(table, names, location.shown, may_be_index=table is given)


# Parquet files as a source.

_LISTS = (("genes", "expressions"), ("gene_ids", "values"), ("indices", "data"))


class ParquetSource(Source):
    """Parquet files with a row for each cell.

    The genes of a cell are in two lists, gene numbers and values, as in Tahoe-100M and in the
    training data of scGPT; or each gene has a column. All other columns of numbers, booleans and
    text are obs columns. So are folders ``NAME=VALUE`` on the path of a file, as it is given; their
    values are integers if all of them can be int32, and text otherwise. `open_collection` takes the
    path if the layout is recognised. The needed columns of row groups are decoded in several
    threads: lists in usual encodings by cellfeed, others by pyarrow
    (``pip install 'cellfeed[parquet]'``).

    Parameters
    ----------
    path
        A file, a folder of files (also in its folders ``NAME=VALUE``), a pattern, or a URL
        (``https://``, ``s3://``, ...); in object stores also a pattern.
        ``hf://datasets/OWNER/NAME/path`` is a file, folder or pattern on the HuggingFace hub, or on
        the server that ``HF_ENDPOINT`` names. All files have the columns that are read, which may
        have other types of the same kind.
    genes, values
        Names of the columns with the two lists. By default, the first of these that there are:
        ``genes`` and ``expressions``, ``gene_ids`` and ``values``, ``indices`` and ``data``.
    gene_table
        The genes, in the order of the columns of the matrix unless ``gene_columns`` names these: a
        data frame, or the path or URL of a Parquet file. By default, the file
        ``gene_metadata.parquet`` in the folder of the cells, or in the folder ``metadata`` beside
        that one, if it exists.
    tokens
        The column of ``gene_table`` with the gene numbers, distinct integers from 0; None if they
        are the rows of the table.
    names
        The column of ``gene_table`` with the names of genes. By default, the first of these that
        there is: ``ensembl_id``, ``gene_id``, ``feature_id``, ``gene_symbol``, ``gene_name``,
        ``feature_name``. Of a data frame, its index, unless that has numbers.
    n_vars
        Number of genes, if there is no table and gene numbers are columns of the matrix, from 0. By
        default, the largest gene number, which footers say, plus one.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes. By default, a
        first element is left out if its number is not in the table of genes and its value is
        negative, as in Tahoe-100M.
    gene_columns
        Names of the columns, if each gene has a column. By default, if there are no lists, the
        columns that are named in ``gene_table``.
    storage_options
        Options for servers; see `open_collection`.

    Attributes
    ----------
    elements
        ``"X"``: sparse if genes are in lists, dense if each has a column.

    Raises
    ------
    PathError
        There is no such file.
    RemoteError
        A server cannot be reached, or refuses the request.
    FormatError
        A file is no Parquet file, is damaged, has genes in columns that are not of numbers, or has
        no cells in a known layout. Also when rows are read: the lists of a cell differ in length or
        are missing, or a gene number is not in the table of genes.
    ColumnError
        A file has no such column, or several of its name.
    ParameterError
        Parameters contradict each other.

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow as pa
    >>> import pyarrow.parquet as pq
    >>> from cellfeed import ParquetSource, open_collection
    >>> path = tempfile.mkdtemp() + "/cells.parquet"
    >>> rows = {"genes": [[1, 5, 9], [1, 9]], "expressions": [[-2.0, 3.0, 4.0], [-2.0, 7.0]]}
    >>> pq.write_table(pa.table(rows), path)
    >>> genes = pd.DataFrame({"token_id": [9, 7, 5]}, index=["TP53", "MYC", "ALK"])
    >>> open_collection(ParquetSource(path, gene_table=genes))[[1, 0]].X.toarray()
    array([[7., 0., 0.],
           [4., 0., 3.]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        genes: str | None = None,
        values: str | None = None,
        gene_table: pd.DataFrame | str | os.PathLike[str] | None = None,
        tokens: str | None = "token_id",
        names: str | None = None,
        n_vars: int | None = None,
        n_markers: int | None = None,
        gene_columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.location = Location.of(path, storage_options)
        if (genes is None) != (values is None):
            raise ParameterError("`genes` and `values` name two columns; give both, or none")
        if n_markers is not None:
            require_not_negative("n_markers", n_markers)
        locations = files_at(self.location)
        self._files = files = ParquetFiles(self.location, locations)
        table = gene_table
        if table is None and n_vars is None and gene_columns is None:
            table = _found_gene_table(locations[0])
        self._table_path = table.path if isinstance(table, Location) else None
        self._var: pd.DataFrame | None = None
        if table is not None:
            self._var = _read_gene_table(table, names, locations[0].options)
        lists = self._lists(genes, values)
        self._genes = tuple(self._gene_columns(gene_columns) if lists is None else lists)
        self._selection = ""
        if lists is None:
            if self._var is not None:
                self._var = self._rows_of(self._var)
            groups = files.row_groups(self._genes, are_lists=False)
            self.elements = {"X": ParquetColumns(files, groups, self._genes)}
            return
        known = None
        if self._var is not None:
            where = table.shown if isinstance(table, Location) else "gene_table"
            known = columns_of_genes(self._var, tokens, n_vars, where)
        self.elements = {"X": self._sparse(lists, known, n_vars, n_markers)}

    def _sparse(
        self,
        lists: tuple[str, str],
        known: NDArray[np.int32] | None,
        n_vars: int | None,
        n_markers: int | None,
    ) -> ParquetLists:
        names = None
        self._selection = repr((lists, n_vars, n_markers, digest_of_array(known)))
        groups = self._files.row_groups(lists, are_lists=True)
        if self._var is not None:
            n_vars, names = len(self._var), self._var.index.to_numpy(object)
        elif n_vars is None:
            if groups.largest is None:
                msg = f"{self._where}: does not say its largest gene number"
                raise FormatError(f"{msg}; give `ParquetSource` a `gene_table=` or `n_vars=`")
            n_vars = groups.largest + 1
        else:
            require_positive("n_vars", n_vars)
        are_named = known is not None
        if known is None:
            if n_vars > MOST_GENE_NUMBERS:
                msg = f"{self._where}: has gene numbers up to {n_vars - 1}, which are no columns"
                raise FormatError(f"{msg}; give `ParquetSource` a `gene_table=`")
            known = np.append(np.arange(n_vars, dtype=np.int32), np.int32(-1))
        shape, numbers = (int(groups.starts[-1]), n_vars), _GeneNumbers(known, are_named, n_markers)
        return ParquetLists(self._files, groups, lists, shape, numbers, names)

    def selection(self) -> str:
        """Return the columns with lists, and how their gene numbers are read."""
        return self._selection

    @property
    def _where(self) -> str:
        """The first file, for messages."""
        return self._files.locations[0].shown

    def _lists(self, genes: str | None, values: str | None) -> tuple[str, str] | None:
        """Return the columns with lists; None if there are none."""
        there = self._files.schema.names
        if genes is not None and values is not None:
            for name, option in zip((genes, values), ("genes", "values"), strict=True):
                if name not in there:
                    msg = f"{self._where}: has no column {name!r}; give `{option}=` to"
                    raise ColumnError(f"{msg} `ParquetSource`, from: {', '.join(there)}")
            return genes, values
        return next((each for each in _LISTS if {*each} <= {*there}), None)

    def _gene_columns(self, given: Sequence[str] | None) -> list[str]:
        """Return the columns that are genes."""
        names = self._files.schema.names
        there = {*names}
        if given is None:
            named = [] if self._var is None else self._var.index.tolist()
            if not there.intersection(named):
                shown = ", ".join(names[:_SHOWN])
                msg = f"{self._where}: genes are in no known columns (the first are {shown})"
                remedy = "`genes=` and `values=`, or `gene_columns=` if each gene has a column"
                raise FormatError(f"{msg}; give `ParquetSource` the names: {remedy}")
            given = named
        require_list("gene_columns", "names", given)
        if not given:
            raise ParameterError("`gene_columns` must name at least one column, but is empty")
        for name in given:
            if name not in there:
                raise ColumnError(f"{self._where}: has no column {name!r} of a gene; leave it out")
        return [*given]

    def _rows_of(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table of genes for `_genes`, each of which has a column."""
        table = table[~table.index.duplicated()]
        for name in self._genes:
            if name not in table.index:
                msg = f"{self._where}: `gene_table` has no gene {name!r} of `gene_columns`"
                raise ParameterError(f"{msg}; give a table of all, or leave it out")
        return table.loc[[*self._genes]]

    def obs_names(self) -> list[str]:
        """Return the columns of files and folders that are not of genes, nor refused."""
        genes = {*self._genes}
        names = [name for name in self._files.names if name not in genes]
        return [name for name in names if not self._files.refused_obs(name)]

    def refused_obs(self, name: str) -> str:
        """Return why a column cannot be in obs: its type, or that it has genes."""
        if name in self._genes:
            return f"{self._where}: column {name!r} has genes or their values; read them from `X`"
        return self._files.refused_obs(name)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns; text as categories.

        Raises
        ------
        ColumnError
            A column is neither of numbers, booleans nor text, or a file lacks it.
        MismatchError
            It is of one kind in a file and of another in the next.
        """
        return self._files.read_obs(columns)

    def read_var(self) -> pd.DataFrame:
        """Return the table of genes."""
        return super().read_var() if self._var is None else self._var

    def files(self) -> Sequence[Path]:
        """Return the files of cells and of genes, if they are local."""
        return [*self._files.paths, *([] if self._table_path is None else [self._table_path])]

    def version(self) -> str | None:
        """Return a digest of the versions of files on servers."""
        return None if self.location.path is not None else digest_of(*self._files.etags)


_SHOWN = 8  # names of columns in a message

PARQUET = Storage(
    name="Parquet",
    open=lambda location, _: [ParquetSource(location)],
    schemes=("hf",),
    url_suffixes=(SUFFIX,),
    recognizes=is_parquet,
    extra=EXTRA,
)
