"""Copying elements that are already in memory to the destinations of rows."""

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
    """Copy ranges of elements to their destinations.

    Parameters
    ----------
    elements
        One-dimensional elements of any numeric dtype; cast as by NumPy.
    starts, counts
        Ranges that cover all elements, int64, shape (n,).
    addresses
        Destination address of each range, int64, shape (n,).
    dtype
        Dtype at the destinations.
    index_limit
        If not negative, elements are column indices, which must be below it.
    column_map
        New index of each column, none of which is left out, int32, shape (index_limit,).

    Returns
    -------
    Whether the indices of each range ascend strictly; True if elements are not indices.

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
    """Return the message for a column index outside of the matrix."""
    return f"a column index is outside [0, {n_columns})"


def place_kept(
    elements: NDArray[Any],
    starts: NDArray[np.int64],
    entry_starts: NDArray[np.int64],
    entries: NDArray[np.int64],
    addresses: NDArray[np.int64],
) -> None:
    """Copy the kept elements of each row to their slots.

    Parameters
    ----------
    elements
        One-dimensional elements of the destination dtype.
    starts
        Start of each row in ``elements``, ascending, int64, shape (n_rows,).
    entry_starts, entries
        The kept elements of each row, int64, shapes (n_rows + 1,) and (n_kept,); see `gather`.
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
    """Return the row of the kernels' table of arrays for unencoded elements.

    Parameters
    ----------
    dtype, out_dtype
        Native dtypes of the elements and of the destinations, for which `can_cast` holds.
    index_limit
        See `place_elements`.
    placing, column_map
        How elements are placed, and the new index of each column; the map must outlive the row.
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
    """Return the row for column indices to select from, and an object that must outlive it.

    Parameters
    ----------
    dtype
        Native dtype of the indices, for which `can_cast` to int64 holds.
    column_map
        New index of each column, -1 to leave it out, int32, shape (n_columns,).
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
    """Return the scratch memory that a thread needs to place elements of chunks, in bytes.

    Parameters
    ----------
    arrays
        The kernels' table of arrays, shape (n, N_ARRAY_COLUMNS).
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
