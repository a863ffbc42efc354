"""Dense arrays, read from chunks if possible, else through the format's library, run by run."""

import math
from typing import Any

from numpy.typing import NDArray

from cellfeed._layouts import DenseChunks, Layout
from cellfeed._runs import Runs
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._matrix import StoredMatrix, native

__all__ = ["StoredDense"]


class StoredDense(StoredMatrix):
    """A dense array of an AnnData file; one with a single dimension is one column.

    Parameters
    ----------
    file, element, var, obs
        See `StoredMatrix`.
    """

    layout: Layout = "dense"

    def __init__(self, file: AnnDataFile, element: str, var: str | None, obs: str = "obs") -> None:
        super().__init__(file, element, var, obs)
        stored = self._stored
        if stored.ndim < 1 or stored.dtype.kind not in "biuf":
            raise self._inconsistent(
                f"expected numbers of shape cells x columns, but it has shape {stored.shape} and "
                f"dtype {stored.dtype}"
            )
        shape = tuple(int(n) for n in stored.shape)
        self.shape = shape if len(shape) > 1 else (*shape, 1)  # a column, as anndata takes it
        self._n_columns = math.prod(self.shape[1:])
        self._check_tables(self.shape)
        self.dtype = native(stored.dtype)
        self.rows_per_chunk = float(stored.chunks[0]) if stored.chunks else 1.0
        self._watch(stored)

    def load_tables(self) -> None:
        """Read the locations of chunks."""
        self._file.check_unchanged()
        self._chunked_array(self._element)

    def row_lengths(self, runs: Runs) -> None:
        """Return None, since the numbers of non-zero elements are unknown before reading."""

    def chunked(self) -> DenseChunks | None:
        """Return the chunks of the rows; None if only the format's own library can read them."""
        self._file.check_unchanged()
        stored = self._chunked_array(self._element)
        return None if stored is None else DenseChunks(stored, self._n_columns)

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Return the rows of ``runs``, read by the format's library."""
        self._file.check_unchanged()
        rows = self._read_slices(self._element, runs, runs)
        self._file.check_unchanged()
        return rows.reshape(len(rows), *self.shape[1:])
