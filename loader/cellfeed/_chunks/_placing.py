"""Elements that are in memory already, and go where those of chunks go."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = [
    "array_row",
    "out_of_bounds",
    "place_elements",
    "place_kept",
    "scratch_bytes",
    "selecting_row",
]


def place_elements(
    elements: NDArray[Any],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    addresses: NDArray[np.int64],
    dtype: np.dtype[Any],
    *,
    index_limit: int = -1,
    column_map: NDArray[np.int32] | None = None,
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
    column_map
        What each column becomes, none of which is left out, int32, shape (index_limit,).

    Returns
    -------
    Whether those of each range ascend strictly, if they are indices; else True.

    Raises
    ------
    ValueError
        A column index is outside of the matrix, or there are more or fewer elements.
    """
    if elements.shape != (int(counts.sum()),):
        msg = f"expected {int(counts.sum())} elements, but got shape {elements.shape}"
        raise ValueError(msg)
    if not kernels.can_cast(elements.dtype, dtype):
        with np.errstate(over="ignore"):  # float16 holds little
            elements = elements.astype(dtype)
    elements = np.ascontiguousarray(elements)
    segments = np.stack([starts, counts, addresses, np.zeros_like(starts)], axis=1)
    report = np.zeros(kernels.N_REPORTS, np.int64)
    report[kernels.ASCENDING] = 1
    placing = kernels.COPIED if column_map is None else kernels.RENUMBERED
    array = array_row(
        elements.dtype, dtype, index_limit=index_limit, placing=placing, column_map=column_map
    )
    kernels.place(elements.ctypes.data, segments, array, report, 0)
    if report[kernels.FAILURE]:
        raise ValueError(out_of_bounds(index_limit))
    return bool(report[kernels.ASCENDING])


def out_of_bounds(n_columns: int) -> str:
    """Return the words for a column index that a matrix does not have."""
    return f"a column index is outside [0, {n_columns})"


def place_kept(
    elements: NDArray[Any],
    starts: NDArray[np.int64],
    entry_starts: NDArray[np.int64],
    entries: NDArray[np.int64],
    addresses: NDArray[np.int64],
) -> None:
    """Copy the elements of each row that are kept, each to its slot.

    Parameters
    ----------
    elements
        One-dimensional, of the dtype that they have where they go.
    starts
        Where each row begins among them, ascending, int64, shape (n_rows,).
    entry_starts, entries
        What is kept of each row, int64, shapes (n_rows + 1,) and (n_kept,); see `gather`.
    addresses
        Address of the first slot of each row, int64, shape (n_rows,).
    """
    array = array_row(elements.dtype, elements.dtype, placing=kernels.SCATTERED)
    whole = max(1, elements.size)
    _, _, segments = kernels.plan_kept(starts, entry_starts, entries, addresses, whole)
    report = np.zeros(kernels.N_REPORTS, np.int64)
    kernels.place(elements.ctypes.data, segments, array, report, 0)


def array_row(
    dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    *,
    index_limit: int = -1,
    placing: int = kernels.COPIED,
    column_map: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Return the row of a kernels' table of arrays for elements that are stored as they are.

    Parameters
    ----------
    dtype, out_dtype
        Native dtypes of the elements, and of where they go, for which `can_cast` holds.
    index_limit
        See `place_elements`.
    placing, column_map
        How they go there, and what columns become; the map has to live as long as the row.
    """
    row = np.zeros(kernels.N_ARRAY_COLUMNS, np.int64)
    row[kernels.CODEC] = kernels.STORED
    row[kernels.ITEMSIZE] = dtype.itemsize
    row[kernels.OUT_ITEMSIZE] = out_dtype.itemsize
    row[kernels.CAST] = kernels.cast_address(dtype, out_dtype, of_indices=index_limit >= 0)
    row[kernels.INDEX_LIMIT] = index_limit
    row[kernels.PLACING] = placing
    row[kernels.COLUMN_MAP] = 0 if column_map is None else column_map.ctypes.data
    return row


def selecting_row(
    dtype: np.dtype[Any], column_map: NDArray[np.int32]
) -> tuple[NDArray[np.int64], object]:
    """Return the row of column indices of which some are kept, and what has to live as long.

    Parameters
    ----------
    dtype
        Native dtype of the indices, for which `can_cast` holds to int64.
    column_map
        What each column becomes, -1 if it is left out, int32, shape (n_columns,).
    """
    # Compiled code knows these two; an index that does not fit becomes one out of bounds.
    known = dtype in (np.int32, np.int64)
    row = array_row(
        dtype,
        dtype if known else np.dtype(np.int64),
        index_limit=len(column_map),
        placing=kernels.SELECTED,
        column_map=column_map,
    )
    is_kept = (column_map >= 0).view(np.uint8)
    row[kernels.IS_KEPT] = is_kept.ctypes.data
    return row, (column_map, is_kept)


def scratch_bytes(arrays: NDArray[np.int64]) -> int:
    """Return how much memory a thread needs that places elements of chunks.

    Parameters
    ----------
    arrays
        A kernels' table of arrays, shape (n, N_ARRAY_COLUMNS).
    """
    itemsizes = np.maximum(1, arrays[:, kernels.ITEMSIZE])
    n_elements = arrays[:, kernels.DECODED_BYTES] // itemsizes
    placing = arrays[:, kernels.PLACING]
    is_cast = arrays[:, kernels.CAST] != 0
    n_bytes = np.where(
        is_cast | (placing == kernels.TRANSFORMED), arrays[:, kernels.OUT_ITEMSIZE], 0
    )
    n_bytes += np.where(placing == kernels.SELECTED, 8, 0)
    return int((n_elements * n_bytes).max(initial=0))
