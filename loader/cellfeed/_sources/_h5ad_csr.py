"""CSR matrices in h5ad files, read through h5py, one slice per row run."""

from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._runs import Runs, expand
from cellfeed._sources._base import CsrBuffer, Layout, RowBuffer
from cellfeed._sources._h5ad_common import H5adSource, native
from cellfeed._sources._h5file import H5File

__all__ = ["H5adCsr"]


class H5adCsr(H5adSource):
    """A CSR matrix of an h5ad file.

    The row pointer is kept in memory once it is needed: 8 bytes per cell and process.
    """

    layout: Layout = "csr"

    def __init__(self, file: H5File, element: str) -> None:
        super().__init__(file, element)
        with self._damage_named(element):
            group = self._stored
            data, indices, indptr = (group[name] for name in ("data", "indices", "indptr"))
            for stored in (data, indices, indptr):
                if stored.ndim != 1 or stored.dtype.kind not in "biuf":
                    raise self._inconsistent(
                        f"{stored.name} is not a list of numbers, but has shape {stored.shape} "
                        f"and dtype {stored.dtype}"
                    )
            self.shape = _shape(group)
            self.dtype = native(data.dtype)
            if self.dtype == np.float16:  # SciPy has no sparse matrix of these
                self.dtype = np.dtype(np.float32)
            if indptr.size != self.shape[0] + 1:
                raise self._inconsistent(f"{self.shape[0]} rows but {indptr.size} row pointers")
            last = int(indptr[-1])
            if last != data.size or indices.size != data.size:
                raise self._inconsistent(
                    f"the row pointers end at {last}, but there are {data.size} values "
                    f"and {indices.size} indices"
                )
            self.rows_per_chunk = _rows_per_chunk(self.shape[0], data.size, data.chunks)
        self._row_pointer: NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_row_pointer": None}

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of non-zeros of each row."""
        rows = expand(runs)
        pointer = self._pointer()
        return pointer[rows + 1] - pointer[rows]

    def read_into(self, runs: Runs, out: RowBuffer) -> None:
        """Fill ``out`` with the rows of ``runs``."""
        if isinstance(out, CsrBuffer):
            self._read_elements(runs, out.indices, out.data)
            return
        pointer = np.concatenate([[0], np.cumsum(self.row_lengths(runs))])
        indices = np.empty(pointer[-1], dtype=np.int32)
        values = np.empty(pointer[-1], dtype=out.data.dtype)
        self._read_elements(runs, indices, values)
        # Adds up the elements of a column that is stored twice in a row, as SciPy and anndata do.
        sp.csr_array((values, indices, pointer), shape=out.data.shape).toarray(out=out.data)

    def _read_elements(
        self, runs: Runs, indices: NDArray[np.signedinteger], data: NDArray[Any]
    ) -> None:
        group = self._stored
        filled = 0
        for start, stop in self._pointer()[runs].tolist():
            if stop == start:
                continue
            wanted, place = np.s_[start:stop], np.s_[filled : filled + stop - start]
            with self._damage_named(f"{self._element}/indices", runs):
                group["indices"].read_direct(indices, wanted, place)
            with self._damage_named(f"{self._element}/data", runs):
                group["data"].read_direct(data, wanted, place)
            filled += stop - start
        if indices.size and not 0 <= indices.min() <= indices.max() < self.shape[1]:
            raise self._inconsistent(f"a column index is outside [0, {self.shape[1]})")

    def _pointer(self) -> NDArray[np.int64]:
        if self._row_pointer is None:
            with self._damage_named(f"{self._element}/indptr"):
                pointer = self._stored["indptr"][:].astype(np.int64)
            if pointer[0] != 0 or np.any(pointer[1:] < pointer[:-1]):
                raise self._inconsistent("the row pointers do not ascend from 0")
            self._row_pointer = pointer
        return self._row_pointer


def _shape(group: h5py.Group) -> tuple[int, int]:
    n_rows, n_vars = group.attrs["shape" if "shape" in group.attrs else "h5sparse_shape"]
    return int(n_rows), int(n_vars)


def _rows_per_chunk(n_rows: int, n_elements: int, chunks: tuple[int, ...] | None) -> float:
    if chunks is None or n_elements == 0:
        return 1.0
    return min(float(n_rows), chunks[0] * n_rows / n_elements)
