"""Sparse rows in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import RowGroup, kernels
from cellfeed._lazy import sp

__all__ = ["CsrRows", "summable"]

_WORDS = (1, 2, 4, 8)  # bytes of values that compiled code moves


def summable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sparse values in SciPy, which does not support float16."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@dataclass(frozen=True, slots=True, eq=False)
class CsrRows:
    """Sparse rows in CSR form, from which SciPy arrays or torch tensors are made.

    Parameters
    ----------
    indptr, indices
        Row pointers, shape (n_rows + 1,), and column indices, shape (n_elements,), ascending in
        each row; int32 or int64.
    data
        Values, shape (n_elements,).
    n_vars
        Number of columns.
    """

    indptr: NDArray[Any]
    indices: NDArray[Any]
    data: NDArray[Any]
    n_vars: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.indptr) - 1, self.n_vars

    def to_scipy(self) -> sp.csr_array:
        """Return the rows as a SciPy array over the same memory; float16 becomes float32."""
        data = self.data.astype(summable(self.data.dtype), copy=False)
        return sp.csr_array((data, self.indices, self.indptr), shape=self.shape)

    def located(self) -> RowGroup:
        """Return the addresses of the rows in memory."""
        return RowGroup(
            n_rows=len(self.indptr) - 1,
            values=self.data.ctypes.data,
            columns=self.indices.ctypes.data,
            pointers=self.indptr.ctypes.data,
            index_itemsize=self.indptr.itemsize,
        )

    def densify_into(self, dense: NDArray[Any]) -> None:
        """Fill ``dense``, of this shape and dtype."""
        if self.data.itemsize not in _WORDS:  # longdouble
            dense[:] = self.to_scipy().toarray()
            return
        bits = np.dtype(f"u{self.data.itemsize}")
        kernels.densify(self.indptr, self.indices, self.data.view(bits), dense.view(bits))
