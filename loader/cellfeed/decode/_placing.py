"""Elements that are in memory: copied to the destinations of rows, selected, transformed."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode import _kernels as kernels
from cellfeed.decode._decoder import Counters
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import STORED, can_cast
from cellfeed.transforms import Log1p, NormalizeTotal, Transform


def place_elements(
    elements: NDArray[Any],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    addresses: NDArray[np.int64],
    dtype: np.dtype[Any],
    *,
    index_limit: int = -1,
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
    if not can_cast(elements.dtype, dtype):
        with np.errstate(over="ignore"):  # float16 holds little
            elements = elements.astype(dtype)
    elements = np.ascontiguousarray(elements)
    segments = np.stack([starts, counts, addresses, np.zeros_like(starts)], axis=1)
    report = np.zeros(fields.N_REPORTS, np.int64)
    report[fields.ASCENDING] = 1
    array = array_row(elements.dtype, dtype, index_limit=index_limit)
    kernels.place(elements.ctypes.data, segments, array, report, 0)
    if report[fields.FAILURE]:
        raise ValueError(f"a column index is outside [0, {index_limit})")
    return bool(report[fields.ASCENDING])


def array_row(
    dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    *,
    index_limit: int = -1,
    placing: int = fields.COPIED,
    column_map: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Return the row of the kernels' table of arrays, of an array that is not encoded.

    Codec and size of a chunk are added for one that is.

    Parameters
    ----------
    dtype, out_dtype
        Native dtypes of the elements and of the destinations, for which `can_cast` holds.
    index_limit
        See `place_elements`.
    placing, column_map
        How elements are placed, and the new index of each column; the map must outlive the row.
    """
    assert index_limit < 0 or out_dtype == np.int32  # noqa: S101 - all that compiled code checks
    row = np.zeros(fields.N_ARRAY_COLUMNS, np.int64)
    row[fields.CODEC] = STORED
    row[fields.ITEMSIZE] = dtype.itemsize
    row[fields.OUT_ITEMSIZE] = out_dtype.itemsize
    row[fields.CAST] = kernels.cast_address(dtype, out_dtype, of_indices=index_limit >= 0)
    row[fields.INDEX_LIMIT] = index_limit
    row[fields.PLACING] = placing
    row[fields.COLUMN_MAP] = 0 if column_map is None else column_map.ctypes.data
    return row


def scratch_bytes(arrays: NDArray[np.int64], segments: NDArray[np.int64]) -> int:
    """Return the scratch memory that a thread needs to place elements of chunks, in bytes.

    Parameters
    ----------
    arrays, segments
        The kernels' tables.
    """
    itemsizes = np.maximum(1, arrays[:, fields.ITEMSIZE])
    longest = int(segments[:, fields.COUNT].max(initial=0))
    n_elements = np.maximum(arrays[:, fields.DECODED_BYTES] // itemsizes, longest)
    placing = arrays[:, fields.PLACING]
    is_changed = (arrays[:, [fields.CAST, fields.STEPS, fields.COLUMN_MAP]] != 0).any(axis=1)
    n_bytes = np.where(is_changed, arrays[:, fields.OUT_ITEMSIZE], 0)
    n_bytes += np.where(placing == fields.SELECTED, 8, 0)
    n_bytes = np.where(placing == fields.PICKED, arrays[:, fields.ITEMSIZE], n_bytes)
    return int((n_elements * n_bytes).max(initial=0))


# Selecting elements of sparse rows, after their column indices have been read.


@dataclass(frozen=True, slots=True, eq=False)
class SelectedElements:
    """The elements of sparse rows whose columns are selected.

    Parameters
    ----------
    starts
        Start of each row in the arrays below, int64, shape (n_rows + 1,).
    columns, positions
        Column in the collection, and position in the stored row, of each selected element, in
        stored order, int32, shape (n_selected,).
    ascending
        Whether the columns of each row ascend strictly.
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    positions: NDArray[np.int32]
    ascending: bool

    def __getitem__(self, rows: slice) -> "SelectedElements":
        starts = self.starts[rows.start : rows.stop + 1]
        own = slice(starts[0], starts[-1])
        return SelectedElements(
            starts - starts[0], self.columns[own], self.positions[own], self.ascending
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of selected elements in each row, int64, shape (n_rows,)."""
        return np.diff(self.starts)


# Transforms in the form of compiled code, applied to rows by several threads.


class RowGroup(NamedTuple):
    """Addresses of rows in memory.

    Parameters
    ----------
    n_rows
        Number of consecutive rows.
    values
        Address of the first value.
    row_length
        Number of values in each row, if they are dense.
    pointers
        Address of the row pointers, int32, if they are sparse.
    memory
        Keeps the memory alive.
    """

    n_rows: int
    values: int
    row_length: int
    pointers: int
    memory: object


class ValueSteps:
    """Transforms of the values of one element.

    Parameters
    ----------
    transforms
        The transforms, in the order in which they are applied.
    dtype
        Dtype of the values: float32 or float64.
    counters
        Counters to which what may not be counts is added.
    """

    def __init__(
        self, transforms: Sequence[Transform], dtype: np.dtype[Any], counters: Counters
    ) -> None:
        steps = list[tuple[int, float]]()
        for each in transforms:
            if isinstance(each, NormalizeTotal):
                steps.append((fields.NORMALIZED, each.target_sum))
            elif isinstance(each, Log1p) and steps and steps[-1][0] == fields.NORMALIZED:
                # In one pass, which does not round in between.
                steps[-1] = (fields.NORMALIZED_LOG1P, steps[-1][1])
            elif isinstance(each, Log1p):
                steps.append((fields.LOG1P, 0.0))
        head = kernels.applier(dtype.itemsize), counters.address_of_non_counts, len(steps)
        self.table = np.array([*head, *np.ravel(steps).view(np.int64)], np.int64)
        self._itemsize, self._counters = dtype.itemsize, counters  # which the table refers to

    def apply(
        self, groups: Sequence[RowGroup], threads: Executor | None = None, num_threads: int = 1
    ) -> None:
        """Transform the values of rows in place.

        Parameters
        ----------
        groups
            Rows of the stated dtype, with the same layout.
        threads, num_threads
            The threads and their number; the calling thread if None.
        """
        table = np.zeros((len(groups) + 1, fields.N_GROUP_COLUMNS), np.int64)
        table[1:, fields.FIRST_ROW] = np.cumsum([each.n_rows for each in groups])
        table[:-1, fields.VALUES :] = np.reshape([each[1:4] for each in groups], (-1, 3))
        in_turn = map if threads is None else threads.map

        def work(first: int, stop: int, _memory: Sequence[RowGroup] = groups) -> None:
            kernels.transform_rows(table, self._itemsize, self.table, first, stop)

        shares = np.linspace(0, table[-1, fields.FIRST_ROW], num_threads + 1).astype(int).tolist()
        list(in_turn(work, shares[:-1], shares[1:]))
