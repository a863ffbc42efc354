"""Cells whose genes and values are two lists in a row of an Arrow table."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import CsrRows, summable
from cellfeed._chunks import CHUNK_ELEMENTS, FolderFiles, Pieces, SlowRead, pieced_array
from cellfeed._errors import FormatError, ParameterError
from cellfeed._layouts import CsrChunks, Layout, RowPieces
from cellfeed._runs import Runs, expand
from cellfeed._sources._base import FileNames, FlatCsr, StoredElement
from cellfeed._sources._huggingface._batches import ListColumns

__all__ = ["ArrowLists", "ArrowRows", "Columns"]

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
