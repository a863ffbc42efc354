"""Dense matrices: from chunks where possible, else through the format's library, run by run."""

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkReads, can_cast
from cellfeed._layouts import DenseTarget, Layout, RowTarget
from cellfeed._runs import Runs, count_rows, expand
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._matrix import StoredMatrix, native

__all__ = ["StoredDense"]


class StoredDense(StoredMatrix):
    """A dense matrix of an AnnData file.

    Parameters
    ----------
    file, element, var
        See `StoredMatrix`.
    """

    layout: Layout = "dense"

    def __init__(self, file: AnnDataFile, element: str, var: str | None) -> None:
        super().__init__(file, element, var)
        stored = self._stored
        if stored.ndim != 2 or stored.dtype.kind not in "biuf":  # noqa: PLR2004 - cells x columns
            raise self._inconsistent(
                f"cells x columns of numbers expected, but it has shape {stored.shape} "
                f"and dtype {stored.dtype}"
            )
        self.shape = (int(stored.shape[0]), int(stored.shape[1]))
        self._check_tables(self.shape)
        self.dtype = native(stored.dtype)
        self.rows_per_chunk = float(stored.chunks[0]) if stored.chunks else 1.0
        self._watch(stored)

    def load_tables(self) -> None:
        """Read where chunks lie."""
        self._file.check_unchanged()
        self._chunked_array(self._element)

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of columns for each row."""
        return np.full(count_rows(runs), self.shape[1], dtype=np.int64)

    def chunk_reads(self, runs: Runs, target: RowTarget) -> ChunkReads | None:
        """Return what to read, None if only the format's own library can read it."""
        stored = self._chunked_array(self._element)
        if stored is None or not isinstance(target, DenseTarget):
            return None
        if not can_cast(stored.dtype, target.dtype):
            return None
        self._file.check_unchanged()
        rows = expand(runs)
        if len(stored.shape) > 1:
            return stored.reads_of_rows(rows, target.destinations, target.dtype)
        n_vars = self.shape[1]
        counts = np.full(len(rows), n_vars, np.int64)
        return stored.reads_of_ranges(rows * n_vars, counts, target.destinations, target.dtype)

    def read_into(self, runs: Runs, target: RowTarget) -> None:
        """Place the rows of ``runs`` where ``target`` says, through the format's library."""
        if not isinstance(target, DenseTarget):
            msg = "a dense element fills a DenseTarget only"
            raise TypeError(msg)
        self._file.check_unchanged()
        rows = self._read_slices(self._element, runs, runs)
        self._file.check_unchanged()
        target.put(rows)
