"""Parquet files with a row for each cell, whose genes and values are two lists."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import BufferPool, Location, digest_of, digest_of_array
from cellfeed.decode import SlowRead
from cellfeed.extending import (
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    pd,
    require_not_negative,
    require_positive,
)
from cellfeed.rows import CsrRows, FoundRows, RowTarget, summable
from cellfeed.sources import (
    FoundCsr,
    ListedGenes,
    Runs,
    Source,
    Storage,
    expand,
    split_at,
    threads_of_process,
)
from cellfeed.sources.arrow import values_of
from cellfeed.storages.parquet._files import ParquetFiles, RowGroups, refused_in_obs
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._lists import CODECS, Lists
from cellfeed.storages.parquet._paths import GENE_TABLE, SUFFIX, files_at, is_parquet

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
    parts
        The rows of each row group, in order.
    kept
        What is kept alive until then: the element, and requests to a server.
    """

    def __init__(self, parts: list[Future[FoundRows]], kept: object) -> None:
        self.parts, self.kept = parts, kept
        weakref.finalize(self, _cancel, parts).atexit = False


def _cancel(parts: Sequence[Future[Any]]) -> None:
    for part in parts:
        part.cancel()


# By process, element and runs of rows.
_expected = weakref.WeakValueDictionary[tuple[int, int, bytes], _Pending]()

_LARGE_GROUP = 16_384  # rows of a row group above which reading some of them is slow

# Pages are kept, decompressed, until it is known where rows go, if they take at most so many times
# the memory of these rows. Where fewer rows of a row group are wanted, they are decoded at once.
_MOST_KEPT = 2

# If the pages of all lists of a source take at most so many bytes, decompressed, a process retains
# those of a row group when it reads from it again; and at most so many of all its sources.
_RETAINED_BYTES = 1 << 30
_retaining = weakref.WeakSet["ParquetLists"]()
_lock = threading.Lock()


class ParquetLists(FoundCsr):
    """Sparse rows: in each, a list of genes and a list of values.

    Parameters
    ----------
    files
        The files.
    columns
        Names of the columns of genes and of values.
    groups
        Where they are in the files.
    genes
        The genes.
    n_markers
        Number of elements at the beginning of each cell that are not genes; if None, a first
        element is none if its number is of no gene and its value is negative.
    """

    def __init__(
        self,
        files: ParquetFiles,
        columns: tuple[str, str],
        groups: RowGroups,
        genes: ListedGenes,
        n_markers: int | None,
    ) -> None:
        self._files, self._columns, self._n_markers = files, columns, n_markers
        self._groups = groups
        self._genes, self.column_names = genes, genes.names
        self.shape, self.dtype = (int(groups.starts[-1]), genes.n_vars), summable(groups.dtype)
        rows = np.diff(groups.starts)
        self.chunk_starts = groups.starts
        self.rows_per_chunk = float(rows.mean()) if rows.size else 1.0
        self.chunk_shape = (int(rows.max(initial=0)), genes.n_vars)
        n_values = int(groups.chunks[:, 0, fields.N_CHUNK_ENTRIES].sum())
        n_bytes = n_values * (np.dtype(np.int32).itemsize + self.dtype.itemsize)
        self.expected_row_bytes = max(1.0, n_bytes / max(1, self.shape[0]))
        self._memory = BufferPool()
        self._retains = groups.chunks[..., fields.CHUNK_BYTES].sum() <= _RETAINED_BYTES
        self._read_before = set[int]()
        self.retained = dict[int, tuple[Lists, Lists]]()  # decompressed, of row groups

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"retained": {}}

    def stored_bytes(self) -> int:
        """Return the size of the columns in bytes."""
        return int(self._groups.chunks[..., fields.STORED_BYTES].sum())

    def codec(self) -> str:
        """Return the compression of pages."""
        codecs = np.unique(self._groups.chunks[..., fields.CHUNK_CODEC])
        return ", ".join(CODECS[codec] for codec in codecs)

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

    def expect(self, runs: Runs) -> _Pending:
        """Start decoding rows, without waiting."""
        parts = [*split_at(runs, self._groups.starts)]
        read = [group for group, _ in parts if group not in self.retained]
        requests = self._files.expect(self._groups, np.array(read, np.int64))
        begun = [_threads().submit(self._decode, group, rows) for group, rows in parts]
        pending = _Pending(begun, (self, requests))
        _expected[os.getpid(), id(self), runs.tobytes()] = pending
        return pending

    def read_rows(self, runs: Runs) -> CsrRows:
        """Return rows; wait for expected ones, and decode others."""
        return self._in_memory(self.find_rows(runs), self.dtype)

    def find_rows(self, runs: Runs) -> FoundRows:
        """Return rows whose values are decoded when it is known where they go."""
        key = os.getpid(), id(self), runs.tobytes()
        pending = _expected.pop(key, None) or self.expect(runs)
        found = [part.result() for part in pending.parts]
        pending.parts.clear()
        pending.kept = None
        lengths = np.concatenate([np.empty(0, np.int64), *(each.lengths for each in found)])
        return FoundRows(lengths, partial(_put_all, found))

    def _in_memory(self, rows: FoundRows, dtype: np.dtype[Any]) -> CsrRows:
        """Return decoded rows, in memory that is used again: new memory costs more than copying."""
        indptr, dtypes = np.append(0, np.cumsum(rows.lengths)), (np.dtype(np.int32), dtype)
        n = int(indptr[-1])
        indices, data = (self._memory.acquire(n * each.itemsize).array(each, n) for each in dtypes)
        starts = [each.ctypes.data + indptr[:-1] * each.itemsize for each in (indices, data)]
        rows.put(RowTarget(lengths=rows.lengths, destinations=starts, dtypes=dtypes))
        return CsrRows(indptr, indices, data, self.shape[1])

    def _decode(self, group: int, runs: Runs) -> FoundRows:
        """Return rows of a row group."""
        return self._found_here(group, runs) or self._by_library(group, runs)

    def _by_library(self, group: int, runs: Runs) -> FoundRows:
        """Return rows of a row group, which pyarrow decodes from its beginning."""
        import pyarrow as pa  # noqa: PLC0415 - optional

        rows, taken, first = expand(runs), list[Any](), 0
        for batch in self._files.batches(self._groups, group, self._columns):
            begin, end = np.searchsorted(rows, [first, first + batch.num_rows])
            is_whole = end - begin == batch.num_rows
            taken.append(batch if is_whole else batch.take(pa.array(rows[begin:end] - first)))
            first += batch.num_rows
            if first > rows[-1]:
                break
        self._files.check(int(self._groups.files[group]))
        return _found(self._rows_of(pa.Table.from_batches(taken), group))

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
                found = self._by_library(group, runs)
                if not np.array_equal(found.lengths, lengths):
                    raise self._wrong(group, "its pages are damaged; copy the file again")
                return found.put(target)
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
        self._files.check(int(self._groups.files[group]))
        genes, values = self.retained[group]
        return genes.rows(runs), values.rows(runs)

    def _opened(self, group: int, runs: Runs) -> tuple[Lists, Lists] | None:
        """Return both lists of rows of a row group, decompressed; None if only pyarrow can."""
        groups, memory = self._groups, self._memory
        described = groups.chunks[group]
        is_known = (described[:, fields.CHUNK_ITEMSIZE] >= 0).all()
        stored = self._files.column_bytes(groups, group, memory) if is_known else None
        if stored is None:
            return None
        n_rows = int(groups.starts[group + 1] - groups.starts[group])
        of = n_rows, runs, memory, self.dtype
        genes = Lists.open(stored[0], described[0], *of, self._genes.columns)
        values = None if genes is None else Lists.open(stored[1], described[1], *of)
        if genes is None or values is None or not np.array_equal(genes.lengths, values.lengths):
            return None
        return genes, values

    def _rows_of(self, table: Any, group: int) -> CsrRows:
        """Return the rows of a `pyarrow.Table` with both columns of lists."""
        import pyarrow.compute as pc  # noqa: PLC0415 - optional

        found = list[tuple[NDArray[np.int64], NDArray[Any]]]()
        for name, column in zip(self._columns, table.columns, strict=True):
            flat = pc.list_flatten(column)
            if column.null_count or flat.null_count:
                msg = f"column {name!r}: not every cell has a list of numbers"
                raise self._wrong(group, f"{msg}; leave those cells out")
            lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
            found.append((lengths, flat.cast(values_of(flat.type)).to_numpy()))
        (lengths, numbers), (lengths_of_values, values) = found
        if not np.array_equal(lengths, lengths_of_values):
            msg = "columns {!r} and {!r}: the lists of a cell differ in length".format(
                *self._columns
            )
            raise self._wrong(group, f"{msg}; give columns that belong together")
        columns, values = self._genes.columns_of(numbers), values.astype(self.dtype, copy=False)
        starts = np.cumsum(lengths) - lengths
        firsts = starts[lengths > 0]
        n_skipped = self._n_skipped(lengths, columns[firsts], values[firsts], group)
        if n_skipped.any():
            are_genes = np.arange(numbers.size) >= np.repeat(starts + n_skipped, lengths)
            columns, numbers, values = columns[are_genes], numbers[are_genes], values[are_genes]
        if columns.size and columns.min() < 0:
            raise self._unknown(numbers[(columns < 0).argmax()], group)
        return CsrRows(np.append(0, np.cumsum(lengths - n_skipped)), columns, values, self.shape[1])

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
        if self._n_markers is not None:
            given: NDArray[np.int64] = np.minimum(lengths, self._n_markers)
            return given
        are_negative = values < 0
        if self._genes.table is None and are_negative.any():
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
        if self._genes.table is None:
            msg = f"gene number {number} is not below `n_vars`, {self.shape[1]}"
            return self._wrong(group, f"{msg}; give a larger one, or `gene_table=`")
        msg = f"gene number {number} is not in the table of genes"
        remedy = "give `gene_table=` with all genes; `n_markers=` if cells begin with others"
        return self._wrong(group, f"{msg}; {remedy}")

    def _wrong(self, group: int, what: str) -> FormatError:
        file, number = int(self._groups.files[group]), int(self._groups.numbers[group])
        where = self._files.locations[file].shown
        return FormatError(f"{where}: row group {number}: {what}")


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


# The table of genes.


def _genes_beside(file: Location) -> ListedGenes | None:
    """Return the genes of the table beside a file, or in ``metadata`` beside its folder, if any."""
    if file.path is not None:
        folder = file.path.parent
        candidates = [Location.of(each / GENE_TABLE) for each in (folder, folder / "../metadata")]
    else:
        url = file.text.rpartition("/")[0]
        root = url.rpartition("/")[0]
        urls = [url] if root.endswith("/") else [f"{root}/metadata", url]  # it is a server
        candidates = [Location(f"{each}/{GENE_TABLE}", file.options) for each in urls]
    for each in candidates:
        try:
            files = ParquetFiles(each, [each])
        except PathError:
            continue
        table = files.read(0, files.schema.names).to_pandas()
        return ListedGenes.of_table(table, each.shown)
    return None


# Parquet files as a source.

_LISTS = (("genes", "expressions"), ("gene_ids", "values"), ("indices", "data"))
_SHOWN = 8  # names of columns in a message


class ParquetSource(Source):
    """Parquet files with a row for each cell, whose genes and values are two lists.

    The lists have gene numbers and values, as in Tahoe-100M and in the training data of scGPT. All
    other columns of numbers, booleans and text are obs columns. `open_collection` takes the path if
    the columns are recognised. Lists in usual encodings are decoded in several threads, others by
    pyarrow (``pip install 'cellfeed[parquet]'``).

    Parameters
    ----------
    path
        A file, a folder of files, a pattern, or a URL (``https://``, ``s3://``, ...); in object
        stores also a pattern. ``hf://datasets/OWNER/NAME/path`` is a file, folder or pattern on the
        HuggingFace hub, or on the server that ``HF_ENDPOINT`` names. All files have the columns
        that are read, which may have other types of the same kind.
    genes, values
        Names of the columns with the two lists. By default, the first of these that there are:
        ``genes`` and ``expressions``, ``gene_ids`` and ``values``, ``indices`` and ``data``.
    gene_table
        The genes, in the order of the columns of the matrix: a data frame whose column ``token_id``
        has the gene numbers, distinct integers from 0. Its index has the names of the genes or, if
        it has numbers, the first of these columns that there is: ``ensembl_id``, ``gene_id``,
        ``feature_id``, ``gene_symbol``, ``gene_name``, ``feature_name``. By default, it is the file
        ``gene_metadata.parquet`` in the folder of the cells, or in the folder ``metadata`` beside
        that one, if it exists.
    n_vars
        Number of genes, if there is no table and gene numbers are columns of the matrix, from 0. By
        default, the largest gene number, which footers say, plus one.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes. By default, a
        first element is left out if its number is not in the table of genes and its value is
        negative, as in Tahoe-100M.
    storage_options
        Options for servers; see `open_collection`.

    Attributes
    ----------
    elements
        ``"X"``, sparse.

    Raises
    ------
    PathError
        There is no such file, or it is in a partition folder ``NAME=VALUE``.
    RemoteError
        A server cannot be reached, or refuses the request.
    FormatError
        A file is no Parquet file, is damaged, or has no cells in a known layout. Also when rows
        are read: the lists of a cell differ in length or are missing, or a gene number is not in
        the table of genes.
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
        gene_table: pd.DataFrame | None = None,
        n_vars: int | None = None,
        n_markers: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if (genes is None) != (values is None):
            raise ParameterError("`genes` and `values` name two columns; give both, or none")
        if gene_table is not None and n_vars is not None:
            raise ParameterError("`gene_table` and `n_vars` exclude each other; leave one out")
        if n_vars is not None:
            require_positive("n_vars", n_vars)
        if n_markers is not None:
            require_not_negative("n_markers", n_markers)
        self.location = Location.of(path, storage_options)
        locations = files_at(self.location)
        self._files = ParquetFiles(self.location, locations)
        self._lists = self._columns_of_lists(genes, values)
        groups, where = self._files.row_groups(self._lists), locations[0].shown
        known: ListedGenes | None = None
        if gene_table is not None:
            known = ListedGenes.of_table(gene_table, "gene_table")
        elif n_vars is None:
            known = _genes_beside(locations[0])
        if known is None:
            if n_vars is None and groups.largest is None:
                msg = f"{where}: does not say its largest gene number"
                raise FormatError(f"{msg}; give `ParquetSource` a `gene_table=` or `n_vars=`")
            known = ListedGenes.in_order(n_vars or (groups.largest or 0) + 1, where)
        self._var = known.table
        columns = None if self._var is None else digest_of_array(known.columns)
        self._selection = repr((self._lists, n_vars, n_markers, columns))
        self.elements = {"X": ParquetLists(self._files, self._lists, groups, known, n_markers)}

    def _columns_of_lists(self, genes: str | None, values: str | None) -> tuple[str, str]:
        """Return the names of the columns with lists."""
        there, where = self._files.schema.names, self._files.locations[0].shown
        if genes is None or values is None:
            found = next((each for each in _LISTS if {*each} <= {*there}), None)
            if found is None:
                msg = f"{where}: has no lists of genes (columns are {', '.join(there[:_SHOWN])})"
                remedy = "of a column per gene make an AnnData with pandas"
                raise FormatError(f"{msg}; give `ParquetSource` `genes=` and `values=`; {remedy}")
            return found
        for name, option in ((genes, "genes"), (values, "values")):
            if name not in there:
                msg = f"{where}: has no column {name!r}; give `{option}=` to `ParquetSource`"
                raise ColumnError(f"{msg}, from: {', '.join(there)}")
        return genes, values

    def selection(self) -> str:
        """Return the columns with lists, and how their gene numbers are read."""
        return self._selection

    def obs_names(self) -> list[str]:
        """Return the columns that are not of lists, nor refused."""
        return [name for name in self._files.names if not self.refused_obs(name)]

    def refused_obs(self, name: str) -> str:
        """Return why a column cannot be in obs: its type, or that it has genes."""
        where = self._files.locations[0].shown
        if name in self._lists:
            return f"{where}: column {name!r} has genes or their values; read them from `X`"
        at = self._files.schema.get_field_index(name)
        return "" if at < 0 else refused_in_obs(self._files.schema.field(at), where)

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
        """Return the files of cells, if they are local."""
        return self._files.paths

    def version(self) -> str | None:
        """Return a digest of the versions of files on servers."""
        if self.location.path is not None:
            return None
        return digest_of(*(f"{e.size} {e.etag} {e.modified}" for e in self._files.versions))


PARQUET = Storage(
    name="Parquet",
    open=lambda location, _: [ParquetSource(location)],
    schemes=("hf",),
    url_suffixes=(SUFFIX,),
    recognizes=is_parquet,
)
