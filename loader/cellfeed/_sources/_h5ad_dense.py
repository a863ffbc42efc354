"""Dense matrices in h5ad files, read through h5py, one slice per row run."""

import numpy as np
from numpy.typing import NDArray

from cellfeed._runs import Runs, count_rows
from cellfeed._sources._base import DenseBuffer, Layout, RowBuffer
from cellfeed._sources._h5ad_common import H5adSource, native
from cellfeed._sources._h5file import H5File

__all__ = ["H5adDense"]


class H5adDense(H5adSource):
    """A dense matrix of an h5ad file."""

    layout: Layout = "dense"

    def __init__(self, file: H5File, element: str) -> None:
        super().__init__(file, element)
        stored = self._stored
        if stored.ndim != 2 or stored.dtype.kind not in "biuf":  # noqa: PLR2004 - cells x genes
            raise self._inconsistent(
                f"cells x genes of numbers expected, but it has shape {stored.shape} "
                f"and dtype {stored.dtype}"
            )
        self.shape = (int(stored.shape[0]), int(stored.shape[1]))
        self.dtype = native(stored.dtype)
        self.rows_per_chunk = float(stored.chunks[0]) if stored.chunks else 1.0

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of genes for each row."""
        return np.full(count_rows(runs), self.shape[1], dtype=np.int64)

    def read_into(self, runs: Runs, out: RowBuffer) -> None:
        """Fill ``out`` with the rows of ``runs``."""
        if not isinstance(out, DenseBuffer):
            msg = "a dense source fills a DenseBuffer only"
            raise TypeError(msg)
        stored = self._stored
        filled = 0
        for start, stop in runs.tolist():
            place = np.s_[filled : filled + stop - start]
            with self._damage_named(self._element, runs):
                stored.read_direct(out.data, np.s_[start:stop], place)
            filled += stop - start
