"""Elements that are in memory already, and go where those of chunks go."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = ["array_row", "place_elements"]


def place_elements(
    elements: NDArray[Any],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    addresses: NDArray[np.int64],
    dtype: np.dtype[Any],
    *,
    index_limit: int = -1,
) -> bool:
    """Copy ranges of elements to where they go.

    Parameters
    ----------
    elements
        One-dimensional, of any numeric dtype; cast as NumPy does.
    starts, counts
        Ranges that make up all of them, int64, shape (n,).
    addresses
        Address that each range goes to, int64, shape (n,).
    dtype
        Dtype there.
    index_limit
        If not negative, elements are column indices, which have to be below it.

    Returns
    -------
    Whether those of each range ascend strictly, if they are indices; else True.

    Raises
    ------
    ValueError
        A column index is outside of the matrix, or there are more or fewer elements.
    """
    if elements.shape != (int(counts.sum()),):
        msg = f"{int(counts.sum())} elements expected, but got shape {elements.shape}"
        raise ValueError(msg)
    if not kernels.can_cast(elements.dtype, dtype):
        with np.errstate(over="ignore"):  # float16 holds little
            elements = elements.astype(dtype)
    elements = np.ascontiguousarray(elements)
    segments = np.stack([starts, counts, addresses], axis=1)
    report = np.zeros(kernels.N_REPORTS, np.int64)
    report[kernels.ASCENDING] = 1
    array = array_row(elements.dtype, dtype, index_limit=index_limit)
    kernels.place(elements.ctypes.data, segments, array, report)
    if report[kernels.FAILURE]:
        msg = f"a column index is outside [0, {index_limit})"
        raise ValueError(msg)
    return bool(report[kernels.ASCENDING])


def array_row(
    dtype: np.dtype[Any], out_dtype: np.dtype[Any], *, index_limit: int
) -> NDArray[np.int64]:
    """Return the row of a kernels' table of arrays for elements that are stored as they are.

    Parameters
    ----------
    dtype, out_dtype
        Native dtypes of the elements, and of where they go, for which `can_cast` holds.
    index_limit
        See `place_elements`.
    """
    row = np.zeros(kernels.N_ARRAY_COLUMNS, np.int64)
    row[kernels.CODEC] = kernels.STORED
    row[kernels.ITEMSIZE] = dtype.itemsize
    row[kernels.OUT_ITEMSIZE] = out_dtype.itemsize
    row[kernels.CAST] = kernels.cast_address(dtype, out_dtype, of_indices=index_limit >= 0)
    row[kernels.INDEX_LIMIT] = index_limit
    return row
