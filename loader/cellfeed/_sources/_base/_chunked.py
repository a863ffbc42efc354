"""Elements whose arrays are stored in chunks that cellfeed decodes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows, RaggedRows
from cellfeed._chunks import ChunkedArray, ChunkReads, SlowRead, can_cast
from cellfeed._layouts import CsrChunks, DenseChunks, Layout, RaggedChunks, RaggedRuns
from cellfeed._runs import Runs, expand
from cellfeed._sources._base._source import StoredElement

__all__ = ["ChunkedCsr", "ChunkedDense", "ChunkedRagged", "read_ragged", "why_not_cast"]


class ChunkedCsr(StoredElement):
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

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of elements of each row."""
        return self.chunked().ranges(expand(runs))[1]

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> CsrChunks:
        """Return the chunks of the rows."""
        return self._chunks

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows, with values as stored."""
        chunked = self.chunked()
        starts, lengths = chunked.ranges(expand(runs))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        indices, data = np.empty(ends[-1], np.int64), np.empty(ends[-1], self.dtype)
        for stored, out in ((chunked.indices, indices), (chunked.data, data)):
            _run(stored.reads_of_ranges(starts, lengths, ends[:-1] * out.itemsize, out.dtype), out)
        return CsrRows(ends, indices, data, chunked.n_columns)


class ChunkedDense(StoredElement):
    """Dense rows in one chunked array.

    Parameters
    ----------
    array
        Two-dimensional array, shape (n_rows, n_columns).
    """

    layout: Layout = "dense"

    def __init__(self, array: ChunkedArray) -> None:
        self._array = array
        self.shape = (array.shape[0], array.shape[1])
        self.dtype = array.dtype

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> DenseChunks:
        """Return the chunks of the rows."""
        return DenseChunks(self._array, self.shape[1])

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read rows, with values as stored."""
        rows = expand(runs)
        out = np.empty((rows.size, self.shape[1]), self.dtype)
        row_bytes = self.shape[1] * self.dtype.itemsize
        _run(self._array.reads_of_rows(rows, np.arange(rows.size) * row_bytes, self.dtype), out)
        return out


class ChunkedRagged(StoredElement):
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
        self._chunks = RaggedRuns(indptr, values)
        self.shape = (len(indptr) - 1,)
        self.dtype = values.dtype

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of values of each row."""
        return self._chunks.lengths_of(expand(runs))

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> RaggedRuns:
        """Return the chunks of the rows."""
        return self._chunks

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read rows, with values as stored."""
        return read_ragged(self._chunks, expand(runs))


def read_ragged(chunks: RaggedChunks, rows: NDArray[np.int64]) -> RaggedRows:
    """Read ascending rows in this thread, with values as stored."""
    offsets = np.concatenate([[0], np.cumsum(chunks.lengths_of(rows))])
    out = np.empty(offsets[-1], chunks.dtype)
    reads = chunks.reads_of_rows(rows, offsets[:-1] * out.itemsize, out.dtype)
    reads.readahead()
    _run(reads, out)
    return RaggedRows(offsets, out)


def why_not_cast(stored: np.dtype[Any], dtype: np.dtype[Any]) -> SlowRead | None:
    """Return why stored values cannot be cast to a dtype while reading; None if they can."""
    if can_cast(stored, dtype):
        return None
    reason = f"cellfeed does not convert {stored} to {dtype}"
    return SlowRead("NumPy", reason, f"read it as {stored}, or write it as {dtype}")


def _run(reads: ChunkReads, out: NDArray[Any]) -> None:
    reads.run(np.array([out.ctypes.data], np.int64))
