"""How rows are stored in chunks that are decoded here."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray

__all__ = ["CsrChunks", "DenseChunks"]


@dataclass(frozen=True, slots=True, eq=False)
class CsrChunks:
    """Sparse rows in chunks.

    Parameters
    ----------
    indptr
        Where each row begins, ascending, int64, shape (n_rows + 1,).
    indices, data
        Column indices and values of all elements, of one dimension.
    n_columns
        Number of columns.
    """

    indptr: NDArray[np.int64]
    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int


@dataclass(frozen=True, slots=True, eq=False)
class DenseChunks:
    """Dense rows in chunks.

    Parameters
    ----------
    values
        Shape (n_rows, n_columns), or the same in C order in one dimension.
    n_columns
        Number of columns.
    """

    values: ChunkedArray
    n_columns: int
