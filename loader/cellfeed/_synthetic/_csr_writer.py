"""Writing a sparse matrix in anndata's layout without holding it in memory."""

import zlib

import h5py
import numpy as np
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numpy.typing import NDArray

from cellfeed._synthetic._expression import CountRows

__all__ = ["CsrWriter"]

_INT32_MAX = np.iinfo(np.int32).max
_GZIP_LEVEL = 4  # anndata's compression="gzip"


class CsrWriter:
    """Appends rows to a CSR matrix; `finish` makes it readable.

    Parameters
    ----------
    group
        An empty group of a file that is open for writing.
    shape
        Rows and columns of the finished matrix.
    expected_nonzeros
        Estimated number of non-zeros. HDF5 chunks get the size that h5py guesses for that length,
        as when anndata writes the whole array in one call.
    """

    def __init__(
        self, group: h5py.Group, *, shape: tuple[int, int], expected_nonzeros: int
    ) -> None:
        group.attrs["encoding-type"] = "csr_matrix"
        group.attrs["encoding-version"] = "0.1.0"
        group.attrs["shape"] = np.array(shape, dtype=np.int64)
        self._group = group
        self._indptr = np.zeros(shape[0] + 1, dtype=np.int64)
        self._n_rows = 0
        self._indices = _ChunkWriter(_create(group, "indices", expected_nonzeros, np.int32))
        self._data = _ChunkWriter(_create(group, "data", expected_nonzeros, np.float32))

    def append(self, rows: CountRows) -> None:
        """Append rows."""
        self._indices.append(rows.genes)
        self._data.append(rows.counts)
        stop = self._n_rows + rows.row_ends.size
        self._indptr[self._n_rows + 1 : stop + 1] = self._indptr[self._n_rows] + rows.row_ends
        self._n_rows = stop

    def finish(self) -> None:
        """Write the remaining values, and the row pointers."""
        self._indices.finish()
        self._data.finish()
        dtype = np.int32 if self._indptr[-1] <= _INT32_MAX else np.int64
        _create(self._group, "indptr", self._indptr.size, dtype)[:] = self._indptr


class _ChunkWriter:
    """Appends to a gzipped dataset; compresses outside HDF5's lock and the GIL."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._chunk = np.zeros(dataset.chunks, dtype=dataset.dtype)
        self._filled = 0
        self._written = 0

    def append(self, values: NDArray[np.generic]) -> None:
        while values.size:
            taken = values[: self._chunk.size - self._filled]
            self._chunk[self._filled : self._filled + taken.size] = taken
            self._filled += taken.size
            values = values[taken.size :]
            if self._filled == self._chunk.size:
                self._write_chunk()

    def finish(self) -> None:
        """Write the last chunk, possibly a partial one, and truncate the dataset to its length."""
        length = self._written + self._filled
        if self._filled:
            self._chunk[self._filled :] = 0
            self._write_chunk()
        self._dataset.resize((length,))

    def _write_chunk(self) -> None:
        end = self._written + self._chunk.size
        if end > self._dataset.shape[0]:
            self._dataset.resize((end,))
        compressed = zlib.compress(self._chunk.data, _GZIP_LEVEL)
        with phil:  # before 3.16, h5py does not take it here
            self._dataset.id.write_direct_chunk((self._written,), compressed)
        self._written, self._filled = end, 0


def _create(group: h5py.Group, name: str, length: int, dtype: type[np.generic]) -> h5py.Dataset:
    return group.create_dataset(
        name,
        shape=(length,),
        maxshape=(None,),
        dtype=dtype,
        compression="gzip",
        compression_opts=_GZIP_LEVEL,
    )
