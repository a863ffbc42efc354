"""Transforms in the form of compiled code, applied to rows by several threads."""

from collections.abc import Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._counters import Counters
from cellfeed.transforms import Binarize, Log1p, NormalizeTotal, Scale, Transform

__all__ = ["RowGroup", "ValueSteps", "locate_pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Addresses of rows in memory, valid as long as the memory.

    Parameters
    ----------
    n_rows
        Number of consecutive rows.
    values
        Address of the first value.
    row_length
        Number of values in each row, if they are dense.
    columns, pointers
        Addresses of column indices and of row pointers, if they are sparse.
    index_itemsize
        Bytes per index.
    """

    n_rows: int
    values: int
    row_length: int = 0
    columns: int = 0
    pointers: int = 0
    index_itemsize: int = 0


class ValueSteps:
    """Transforms of the values of one element.

    Parameters
    ----------
    transforms
        The transforms, in the order in which they are applied.
    dtype
        Dtype of the values: float32 or float64.
    counters
        Counters to which values without a logarithm are added.
    """

    def __init__(
        self, transforms: Sequence[Transform], dtype: np.dtype[Any], counters: Counters
    ) -> None:
        steps, moments = list[tuple[int, int, float]](), list[NDArray[np.float64]]()
        for each in transforms:
            if isinstance(each, NormalizeTotal):
                steps.append((kernels.NORMALIZED, 0, each.target_sum))
            elif isinstance(each, Log1p) and steps and steps[-1][0] == kernels.NORMALIZED:
                # In one pass, which does not round in between.
                steps[-1] = (kernels.NORMALIZED_LOG1P, 0, steps[-1][2])
            elif isinstance(each, Log1p):
                steps.append((kernels.LOG1P, 0, 0.0))
            elif isinstance(each, Binarize):
                steps.append((kernels.BINARIZED, 0, float(dtype.type(each.threshold))))
            elif isinstance(each, Scale):
                kind = kernels.CENTRED if each.zero_center else kernels.SCALED
                most = np.inf if each.max_value is None else each.max_value
                steps.append((kind, len(moments), most))
                moments.append(_moments(each))
        self._itemsize = dtype.itemsize
        self._steps = np.array([step[:2] for step in steps], np.int64).reshape(-1, 2)
        self._counters = counters
        address = np.array([counters.address_of_undefined], np.int64).view(np.float64)
        self._numbers = np.concatenate([np.array([s[2] for s in steps], np.float64), address])
        self._moments = np.array(moments) if moments else np.empty((0, 2, 0))
        self._kinds = self._steps[:, 0].copy()

    @property
    def need_columns(self) -> bool:
        """Whether the transform of a value depends on its column."""
        return bool((self._kinds >= kernels.CENTRED).any())

    @property
    def located(self) -> tuple[int, int, int]:
        """Addresses of kinds and numbers, valid as long as this object, and their number."""
        return self._kinds.ctypes.data, self._numbers.ctypes.data, len(self._kinds)

    def __bool__(self) -> bool:
        return len(self._kinds) > 0

    def apply(
        self,
        groups: Sequence[RowGroup],
        rows: NDArray[np.intp] | None = None,
        threads: Executor | None = None,
        n_threads: int = 1,
    ) -> None:
        """Transform the values of rows in place.

        Parameters
        ----------
        groups
            Rows of the stated dtype, with the same layout.
        rows
            Numbers of the rows to transform over all groups, ascending; all rows if None.
        threads, n_threads
            Threads that help the calling thread, and the total number of threads.
        """
        if not groups or not self:
            return
        table, taken = _table(groups), np.zeros(1, np.int64)
        if rows is None:
            rows = np.arange(table[-1, kernels.FIRST_ROW])

        def work() -> None:
            kernels.transform_rows(
                table, rows, self._itemsize, self._steps, self._numbers, self._moments, taken
            )

        n_tasks = -(-rows.size // kernels.ROWS_OF_A_TASK)
        n_helpers = 0 if threads is None else min(n_threads, n_tasks) - 1
        helpers = [threads.submit(work) for _ in range(n_helpers)] if threads is not None else []
        try:
            work()
            for each in helpers:
                each.result()
        except BaseException:
            # The other threads write into memory that the caller is about to let go.
            taken[0] = rows.size
            wait(helpers)
            raise


def locate_pieces(segments: NDArray[np.int64]) -> object:
    """Write to segments of transformed values which piece of a row they are.

    Parameters
    ----------
    segments
        Segments of rows, row by row, as `kernels.plan_flat` returns them; modified.

    Returns
    -------
    An object that must exist as long as the segments are used.
    """
    within = segments[:, kernels.WITHIN]
    is_piece = within != 0
    is_piece[:-1] |= is_piece[1:]
    own = np.flatnonzero(is_piece)
    rows = np.cumsum(within[own] == 0) - 1
    n_pieces, placed = np.bincount(rows), np.zeros(own.size, np.int64)
    pieces = np.empty((own.size, kernels.N_PIECE_COLUMNS), np.int64)
    pieces[:, kernels.PIECE_START] = within[own]
    pieces[:, kernels.ROW_ELEMENTS] = np.bincount(rows, segments[own, kernels.COUNT])[rows]
    pieces[:, kernels.ROW_PIECES] = n_pieces[rows]
    pieces[:, kernels.ROW_PLACED] = placed.ctypes.data + rows * placed.itemsize
    within[:] = kernels.WHOLE_ROW
    within[own] = pieces.ctypes.data + np.arange(own.size) * pieces.strides[0]
    return pieces, placed


def _table(groups: Sequence[RowGroup]) -> NDArray[np.int64]:
    """Return the table of groups that `kernels.transform_rows` takes."""
    table = np.zeros((len(groups) + 1, kernels.N_GROUP_COLUMNS), np.int64)
    first_row = 0
    for row, each in zip(table, groups, strict=False):
        row[:] = (
            first_row,
            each.values,
            each.row_length,
            each.columns,
            each.pointers,
            each.index_itemsize,
        )
        first_row += each.n_rows
    table[-1, kernels.FIRST_ROW] = first_row
    return table


def _moments(scale: Scale) -> NDArray[np.float64]:
    """Return the subtrahend and the divisor of each column, shape (2, n_columns)."""
    std = np.asarray(scale.std)
    mean = np.asarray(scale.mean) if scale.zero_center else np.zeros_like(std)
    return np.stack([mean, np.where(std == 0, 1.0, std)])
