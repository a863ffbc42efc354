"""Compiled: sparse rows whose columns become others, or are left out."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled

__all__ = ["count_selected", "select_columns"]


@compiled(
    *(
        f"void({index}[::1], {index}[::1], int64[::1], int32[::1], int64[::1])"
        for index in ("int32", "int64")
    )
)
def count_selected(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    offsets: NDArray[np.int64],
    columns: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Count the elements of each row that `select_columns` keeps."""
    for row in range(counts.size):
        offset, n = offsets[row], 0
        for k in range(indptr[row], indptr[row + 1]):
            n += columns[offset + indices[k]] >= 0
        counts[row] = n


@compiled(
    *(
        f"boolean({index}[::1], {index}[::1], {value}[::1], int64[::1], int32[::1],"
        f"{index}[::1], {value}[::1])"
        for index in ("int32", "int64")
        for value in ("uint8", "uint16", "uint32", "uint64")
    )
)
def select_columns(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[Any],
    offsets: NDArray[np.int64],
    columns: NDArray[np.int32],
    out_indices: NDArray[Any],
    out_data: NDArray[Any],
) -> bool:
    """Copy the elements whose columns are kept, row by row; values are bits, whatever they mean.

    Parameters
    ----------
    indptr, indices, data
        Rows of CSR.
    offsets, columns
        ``columns[offsets[row] + index]`` is what a column of a row becomes, -1 if it is left
        out.
    out_indices, out_data
        Exactly as long as is kept.

    Returns
    -------
    Whether the columns of every row ascend strictly.
    """
    n, ascending = 0, True
    for row in range(offsets.size):
        offset, last = offsets[row], -1
        for k in range(indptr[row], indptr[row + 1]):
            column = columns[offset + indices[k]]
            if column >= 0:
                out_indices[n] = column
                out_data[n] = data[k]
                n += 1
                ascending &= column > last
                last = column
    return ascending
