"""Compiled: the columns of sparse rows are put in order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks._kernels._native import copy_bytes
from cellfeed._compiled import compiled

__all__ = ["sort_rows"]

_LOWER = (1 << 32) - 1


@compiled(
    *(f"boolean({index}[::1], {index}[::1], uint8[::1], int64)" for index in ("int32", "int64"))
)
def sort_rows(
    indptr: NDArray[Any], indices: NDArray[Any], data: NDArray[np.uint8], itemsize: int
) -> bool:
    """Sort the elements of each row by column, in place.

    Parameters
    ----------
    indptr, indices
        Rows of CSR, of fewer than 2^31 columns.
    data, itemsize
        The bytes of the values, and how many each has.

    Returns
    -------
    Whether the columns of each row are distinct.
    """
    longest = 0
    for row in range(indptr.size - 1):
        longest = max(longest, indptr[row + 1] - indptr[row])
    keys, values = np.empty(longest, np.int64), np.empty(longest * itemsize, np.uint8)
    distinct = True
    for row in range(indptr.size - 1):
        start, n = np.int64(indptr[row]), np.int64(indptr[row + 1] - indptr[row])
        ascending = True
        for j in range(1, n):
            ascending &= indices[start + j] > indices[start + j - 1]
        if ascending:
            continue
        own = keys[:n]
        for j in range(n):
            own[j] = (np.int64(indices[start + j]) << 32) | j
        own.sort()
        first = data.ctypes.data + start * itemsize
        copy_bytes(values.ctypes.data, first, n * itemsize)
        for j in range(n):
            indices[start + j] = own[j] >> 32
            copy_bytes(
                first + j * itemsize, values.ctypes.data + (own[j] & _LOWER) * itemsize, itemsize
            )
            distinct &= j == 0 or own[j] >> 32 != own[j - 1] >> 32
    values[:] = 0  # used by name after its address was, so that it is not freed before
    return distinct
