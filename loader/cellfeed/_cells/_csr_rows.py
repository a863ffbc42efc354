"""Sparse rows in memory, whatever is made of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._chunks import RowGroup, densify

__all__ = ["CsrRows", "summable"]


def summable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that sparse values have in SciPy, which knows no float16."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@dataclass(frozen=True, slots=True, eq=False)
class CsrRows:
    """Sparse rows, before they become SciPy's or torch's.

    Parameters
    ----------
    indptr, indices
        Row pointer, shape (n_rows + 1,), and columns, ascending in each row; int32 or int64.
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
        """Rows and columns."""
        return len(self.indptr) - 1, self.n_vars

    def to_scipy(self) -> sp.csr_array:
        """Return the rows as a SciPy array over the same memory; float16 becomes float32."""
        data = self.data.astype(summable(self.data.dtype), copy=False)
        return sp.csr_array((data, self.indices, self.indptr), shape=self.shape)

    def located(self) -> RowGroup:
        """Return where the rows lie in memory."""
        return RowGroup(
            n_rows=len(self.indptr) - 1,
            values=self.data.ctypes.data,
            columns=self.indices.ctypes.data,
            pointers=self.indptr.ctypes.data,
            index_itemsize=self.indptr.itemsize,
        )

    def densify_into(self, dense: NDArray[Any]) -> None:
        """Fill ``dense``, of this shape and dtype."""
        bits = np.dtype(f"u{self.data.itemsize}")
        densify(self.indptr, self.indices, self.data.view(bits), dense.view(bits))
