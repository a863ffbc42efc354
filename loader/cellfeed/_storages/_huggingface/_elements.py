"""Cells whose genes and values are two lists in a row of an Arrow table."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._decode import CHUNK_ELEMENTS, FolderFiles, Pieces, SlowRead, pieced_array
from cellfeed._errors import FormatError, ParameterError, PathError
from cellfeed._rows import CsrChunks, CsrRows, Layout, RowPieces, summable
from cellfeed._runs import Runs, expand
from cellfeed._storages._base import FileNames, FlatCsr, StoredElement, import_arrow

# Record batches of Arrow files: where the lists of their rows lie.

EXTRA = "huggingface"

Placed = tuple[Any, Callable[[int, int], tuple[int, int] | None]]


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

    def of_files(self, paths: Sequence[Path]) -> "tuple[list[Path], ListColumns]":
        """Return the files that are needed, and the columns with file numbers among these."""
        used, files = np.unique(self.files, return_inverse=True)
        return [paths[file] for file in used.tolist()], replace(self, files=files.astype(np.int64))


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise PathError(f"{path}: there is no such file; put it back") from error
    except (OSError, ValueError) as error:  # the base classes of Arrow's errors
        said = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: is not a complete Arrow stream ({said}); copy it again"
        ) from error


def batches_in_files(location: Location, paths: Sequence[Path]) -> Iterator[Placed]:
    """Yield the record batches of files, each with a function that locates a buffer in them."""
    arrow = import_arrow(location, EXTRA)
    for number, path in enumerate(paths):
        with _damage_named(path), arrow.memory_map(str(path)) as mapped:
            whole = mapped.read_buffer(mapped.size())
            mapped.seek(0)
            place = partial(_within, number, whole.address, whole.size)
            for batch in arrow.ipc.open_stream(mapped):
                yield batch, place


def batches_in_memory(table: Any) -> tuple[list[Path], Iterator[Placed]]:
    """Return the files that are mapped into this process, and batches as `batches_in_files`.

    Parameters
    ----------
    table
        A `pyarrow.Table`, all or part of which may be in memory instead of a file.
    """
    paths, regions = _mapped_files()
    begins = np.array([region[0] for region in regions], np.int64)

    def place(address: int, n_bytes: int) -> tuple[int, int] | None:
        at = int(np.searchsorted(begins, address, side="right")) - 1
        if at < 0:
            return None
        begin, end, offset, file = regions[at]
        return (file, offset + address - begin) if address + n_bytes <= end else None

    return paths, ((batch, place) for batch in table.to_batches())


def _within(
    number: int, begin: int, size: int, address: int, n_bytes: int
) -> tuple[int, int] | None:
    is_there = begin <= address and address + n_bytes <= begin + size
    return (number, address - begin) if is_there else None


def _mapped_files() -> tuple[list[Path], list[tuple[int, int, int, int]]]:
    """Return mapped files, and begin, end, offset and file of each mapped region; Linux only."""
    paths, regions = dict[str, int](), list[tuple[int, int, int, int]]()
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" or not name or not name[0].startswith("/") or name[0].endswith("(deleted)"):
            continue
        begin, end = (int(each, 16) for each in span.split("-"))
        regions.append((begin, end, int(offset, 16), paths.setdefault(name[0], len(paths))))
    return [Path(name) for name in paths], regions


def open_table(location: Location, paths: Sequence[Path]) -> Any:
    """Return all rows of some files as a memory-mapped `pyarrow.Table`."""
    arrow = import_arrow(location, EXTRA)
    tables = []
    for path in paths:
        with _damage_named(path):
            tables.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
    return arrow.concat_tables(tables)


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


def list_columns(
    location: Location, batches: Iterable[Placed], names: tuple[str, str]
) -> ListColumns | None:
    """Return where the lists of two columns lie; None if files do not store them uncompressed.

    Parameters
    ----------
    location
        For messages.
    batches
        Record batches, each with a function from address and size of a buffer to its file and first
        byte; it returns None if the buffer is in no file.
    names
        Names of the columns.
    """
    arrow = import_arrow(location, EXTRA)
    found, types = list[list[int]](), None
    for batch, place in batches:
        if types is None:
            types = [type_of_lists(arrow, location, batch.schema, name) for name in names]
        row, files = list[int](), set[int]()
        for name, of_type in zip(names, types, strict=True):
            column = batch.column(name)
            if column.null_count or column.flatten().null_count:
                msg = f"{location}: column {name!r}: not every cell has a list of numbers"
                raise FormatError(f"{msg}; leave those cells out")
            itemsize = 8 if arrow.types.is_large_list(of_type) else 4
            for buffer, skipped in (
                (column.buffers()[1], column.offset * itemsize),
                (column.values.buffers()[1], 0),
            ):
                at = (
                    None
                    if buffer is None or not buffer.size
                    else place(buffer.address, buffer.size)
                )
                if at is None and buffer is not None and buffer.size:
                    return None
                row.append(0 if at is None else at[1] + skipped)
                files |= set() if at is None else {at[0]}
            row.append(len(column.values))
        if len(files) > 1:
            return None
        found.append([next(iter(files), 0), batch.num_rows, *row])
    if types is None:
        return None
    table = np.array(found, np.int64)
    is_large = [arrow.types.is_large_list(each) for each in types]
    return ListColumns(
        files=table[:, 0].copy(),
        n_rows=table[:, 1].copy(),
        offsets=table[:, [2, 5]],
        values=table[:, [3, 6]],
        sizes=table[:, [4, 7]],
        offset_dtypes=tuple(np.dtype(np.int64 if large else np.int32) for large in is_large),
        dtypes=tuple(np.dtype(each.value_type.to_pandas_dtype()) for each in types),
    )


_CHECKED_CELLS = 100
_OTHER_GENE = (
    "have a gene number that is not a column; give `HuggingFaceSource` a larger "
    "`n_vars`, or all `gene_ids`"
)


class Columns:
    """The two columns that contain cells, and the mapping from their gene numbers to columns.

    Parameters
    ----------
    location
        For messages.
    lists
        Names of the columns with the two lists: genes, and values.
    n_stored
        Upper bound of gene numbers, exclusive.
    names
        Names of the genes, str, shape (n_vars,); None if they have none.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes.
    """

    def __init__(
        self,
        location: Location,
        lists: tuple[str, str],
        n_stored: int,
        names: NDArray[np.object_] | None,
        n_markers: int,
    ) -> None:
        self.location, self.lists, self.n_stored, self.names = location, lists, n_stored, names
        self.n_markers = n_markers

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
        self,
        columns: Columns,
        paths: Sequence[Path],
        stored: ListColumns,
        shape: tuple[int, int],
    ) -> None:
        folder = _common(paths)
        names = [str(path.absolute().relative_to(folder)) for path in paths]
        files = FolderFiles(folder, FileNames(*names), len(names))
        super().__init__(files, shape, stored.dtypes[1])
        self._columns, self._stored = columns, stored

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return super().var_names() if self._columns.names is None else self._columns.names

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
        if n_markers and self.stored_columns is not None and self._stored.n_rows.sum():
            whole = CsrChunks(pointer, arrays[0], arrays[1], n_stored, rows)
            self._check_markers(whole, self.stored_columns)
        return CsrChunks(pointer, arrays[0], arrays[1], n_stored, rows, n_markers)

    def _check_markers(self, whole: CsrChunks, known: NDArray[np.int32]) -> None:
        """Check for some cells that their markers are no genes, before markers are left out."""
        rows = np.unique(np.linspace(0, len(whole.indptr) - 2, _CHECKED_CELLS).astype(np.int64))
        starts, lengths = whole.ranges(rows)
        counts = np.minimum(lengths, self._columns.n_markers)
        numbers, ends = np.empty(int(counts.sum()), np.int64), np.cumsum(counts)
        reads = whole.indices.reads_of_ranges(starts, counts, (ends - counts) * 8, numbers.dtype)
        reads.run(np.array([numbers.ctypes.data], np.int64))
        is_gene = [0 <= number < known.size and known[number] >= 0 for number in numbers.tolist()]
        if any(is_gene):
            found, location = numbers[is_gene.index(True)], self._columns.location
            msg = f"{location}: cells begin with {found}, which is one of `gene_ids`, not a marker"
            raise ParameterError(f"{msg}; leave `n_markers` out")

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
        Why only pyarrow can read them; None if they are in memory.
    """

    layout: Layout = "csr"

    def __init__(
        self,
        columns: Columns,
        table: Callable[[], Any],
        dtype: np.dtype[Any],
        shape: tuple[int, int],
        reason: str | None,
    ) -> None:
        self._columns, self._table, self._reason = columns, table, reason
        self.dtype, self.shape = summable(dtype), shape

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return super().var_names() if self._columns.names is None else self._columns.names

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - of any
        """Return why rows are read through pyarrow."""
        remedy = "write it again with `Dataset.save_to_disk`, and open the folder"
        return None if self._reason is None else SlowRead("pyarrow", self._reason, remedy)

    def codec(self) -> str:
        """Return the compression of values."""
        return "none" if self._reason is None else "unknown"

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows."""
        import pyarrow as pa  # noqa: PLC0415 - optional; it made the table

        table = self._table().select(list(self._columns.lists))
        parts = [table.slice(start, stop - start) for start, stop in runs.tolist()]
        rows = pa.concat_tables([table.slice(0, 0), *parts])
        lengths, indices = self._lists(rows, 0)
        lengths_of_values, data = self._lists(rows, 1)
        if not np.array_equal(lengths, lengths_of_values):
            raise self._columns.differ()
        kept = np.maximum(lengths - self._columns.n_markers, 0)
        if self._columns.n_markers:
            stops = np.cumsum(lengths, dtype=np.int64)
            elements = expand(np.stack([stops - kept, stops], axis=1))
            indices, data = indices[elements], data[elements]
        indptr = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])
        return CsrRows(indptr, indices.astype(np.int64), data, self._columns.n_stored)

    def _lists(self, table: Any, column: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        import pyarrow.compute as pc  # noqa: PLC0415

        name = self._columns.lists[column]
        found = table.column(name)
        flat = pc.list_flatten(found)
        if found.null_count or flat.null_count:
            msg = f"{self._columns.location}: column {name!r}: not every cell has a list of numbers"
            raise FormatError(f"{msg}; leave those cells out")
        return pc.list_value_length(found).to_numpy(), flat.to_numpy()


def _common(paths: Sequence[Path]) -> Path:
    """Return the innermost folder that contains all files."""
    parents = [path.absolute().parent for path in paths]
    common = parents[0]
    while not all(parent.is_relative_to(common) for parent in parents):
        common = common.parent
    return common
