"""Elements whose arrays lie in compressed chunks, wherever the bytes of these are."""

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
    """Sparse rows in two arrays of chunks, as anndata writes them.

    Parameters
    ----------
    indptr
        Row pointer, int64, shape (n_rows + 1,).
    indices, data
        One-dimensional arrays: column and value of each stored element.
    n_columns
        Number of columns.

    Notes
    -----
    float16, which SciPy does not know, comes out as float32.
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
        """Return why values of this dtype are not decoded here; None if they are."""
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> CsrChunks:
        """Return where rows lie."""
        return self._chunks

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows as they are stored."""
        chunked = self.chunked()
        starts, lengths = chunked.ranges(expand(runs))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        indices, data = np.empty(ends[-1], np.int64), np.empty(ends[-1], self.dtype)
        for stored, out in ((chunked.indices, indices), (chunked.data, data)):
            _run(stored.reads_of_ranges(starts, lengths, ends[:-1] * out.itemsize, out.dtype), out)
        return CsrRows(ends, indices, data, chunked.n_columns)


class ChunkedDense(StoredElement):
    """Dense rows in one array of chunks.

    Parameters
    ----------
    array
        Two-dimensional.
    """

    layout: Layout = "dense"

    def __init__(self, array: ChunkedArray) -> None:
        self._array = array
        self.shape = (array.shape[0], array.shape[1])
        self.dtype = array.dtype

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why values of this dtype are not decoded here; None if they are."""
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> DenseChunks:
        """Return where rows lie."""
        return DenseChunks(self._array, self.shape[1])

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read rows as they are stored."""
        rows = expand(runs)
        out = np.empty((rows.size, self.shape[1]), self.dtype)
        row_bytes = self.shape[1] * self.dtype.itemsize
        _run(self._array.reads_of_rows(rows, np.arange(rows.size) * row_bytes, self.dtype), out)
        return out


class ChunkedRagged(StoredElement):
    """Rows of any length, one after the other in one array of chunks.

    Parameters
    ----------
    indptr
        Where each row begins, ascending, int64, shape (n_rows + 1,).
    values
        One-dimensional.
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
        """Return why values of this dtype are not decoded here; None if they are."""
        return why_not_cast(self.dtype, dtype)

    def chunked(self) -> RaggedRuns:
        """Return where rows lie."""
        return self._chunks

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read rows as they are stored."""
        return read_ragged(self._chunks, expand(runs))


def read_ragged(chunks: RaggedChunks, rows: NDArray[np.int64]) -> RaggedRows:
    """Read rows, which ascend, as they are stored, in this thread."""
    offsets = np.concatenate([[0], np.cumsum(chunks.lengths_of(rows))])
    out = np.empty(offsets[-1], chunks.dtype)
    reads = chunks.reads_of_rows(rows, offsets[:-1] * out.itemsize, out.dtype)
    reads.readahead()
    _run(reads, out)
    return RaggedRows(offsets, out)


def why_not_cast(stored: np.dtype[Any], dtype: np.dtype[Any]) -> SlowRead | None:
    """Return why stored values are not cast to a dtype while they are placed; None if they are."""
    if can_cast(stored, dtype):
        return None
    reason = f"{stored} is not converted to {dtype} here"
    return SlowRead("NumPy", reason, f"read it as {stored}, or write it as {dtype}")


def _run(reads: ChunkReads, out: NDArray[Any]) -> None:
    reads.run(np.array([out.ctypes.data], np.int64))
