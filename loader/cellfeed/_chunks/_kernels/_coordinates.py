"""Compiled: converting values with row and column numbers to rows."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._native import (
    pointer,
)
from cellfeed._compiled import compiled

__all__ = ["count_by_row", "scatter_by_row"]


@compiled("int64(int64[::1], int64)", inner=True)
def _find(ids: NDArray[np.int64], wanted: int) -> int:
    """Return the position of a number in an ascending array, -1 if it is not there."""
    first, last = 0, ids.size
    while first < last:
        middle = (first + last) // 2
        if ids[middle] < wanted:
            first = middle + 1
        else:
            last = middle
    return first if first < ids.size and ids[first] == wanted else -1


@compiled("boolean(int64, int64, int64[::1], int64[::1])")
def count_by_row(
    rows_address: int, n: int, ids: NDArray[np.int64], counts: NDArray[np.int64]
) -> bool:
    """Add the number of values of each of the ascending ``ids``, out of n values, to ``counts``.

    Returns
    -------
    Whether every value belongs to one of them.
    """
    rows = carray(pointer(rows_address), (n,), np.int64)
    row, previous = -1, np.int64(0)
    for k in range(n):
        if row < 0 or rows[k] != previous:
            previous = rows[k]
            row = _find(ids, previous)
            if row < 0:
                return False
        counts[row] += 1
    return True


@compiled(
    *(
        f"boolean(int64, int64, int64, int64, int64[::1], int64[::1], int32[::1], {bits}[::1])"
        for bits in ("uint8", "uint16", "uint32", "uint64")
    )
)
def scatter_by_row(
    rows_address: int,
    columns_address: int,
    values_address: int,
    n: int,
    ids: NDArray[np.int64],
    ends: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
) -> bool:
    """Append n values, counted by `count_by_row`, to their rows.

    Parameters
    ----------
    rows_address, columns_address, values_address
        Addresses of rows and columns, int64, and of values.
    ids
        Ids of the rows, ascending.
    ends
        Where each row ends so far; updated.
    indices, data
        Indices and data of all rows.

    Returns
    -------
    Whether all columns fit in a non-negative int32.
    """
    rows = carray(pointer(rows_address), (n,), np.int64)
    columns = carray(pointer(columns_address), (n,), np.int64)
    values = carray(pointer(values_address), (n,), data.dtype)
    row, previous, fits = -1, np.int64(0), True
    for k in range(n):
        if row < 0 or rows[k] != previous:
            previous = rows[k]
            row = _find(ids, previous)
        end = ends[row]
        fits &= 0 <= columns[k] < (1 << 31)
        indices[end] = columns[k]
        data[end] = values[k]
        ends[row] = end + 1
    return fits
