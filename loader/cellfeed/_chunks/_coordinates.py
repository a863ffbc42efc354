"""Converting coordinates (row, column, value), in any order, to sparse rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = ["rows_of_coordinates"]

Coordinates = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def rows_of_coordinates(
    tables: Sequence[Coordinates], ids: NDArray[np.int64], dtype: np.dtype[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Return row pointers, columns and values of rows, keeping the order of values in each row.

    Parameters
    ----------
    tables
        Contiguous arrays with the row, int64, the column, int64, and the value of each element.
    ids
        The numbers of the rows, int64, ascending.
    dtype
        Dtype of the values.

    Raises
    ------
    ValueError
        An element is of another row, or its column is negative or above 2^31 - 1.

    Examples
    --------
    >>> rows, columns = np.array([7, 3, 7]), np.array([5, 0, 1])
    >>> values = np.array([1, 2, 3], np.float32)
    >>> rows_of_coordinates([(rows, columns, values)], np.array([3, 4, 7]), values.dtype)
    (array([0, 1, 1, 3]), array([0, 5, 1], dtype=int32), array([2., 1., 3.], dtype=float32))
    """
    counts = np.zeros(ids.size, np.int64)
    for rows, _, _ in tables:
        if not kernels.count_by_row(rows.ctypes.data, rows.size, ids, counts):
            msg = "it has an element of a row that was not requested"
            raise ValueError(msg)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices, data = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], dtype)
    ends, bits = indptr[:-1].copy(), data.view(f"u{dtype.itemsize}")
    for rows, columns, values in tables:
        addresses = (each.ctypes.data for each in (rows, columns, values))
        if not kernels.scatter_by_row(*addresses, rows.size, ids, ends, indices, bits):
            msg = "it has a column that is negative or above 2^31 - 1"
            raise ValueError(msg)
    return indptr, indices, data
