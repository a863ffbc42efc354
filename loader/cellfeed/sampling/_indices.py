"""The rows that a strategy may visit: all rows, or the given indices."""

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError
from cellfeed.sampling._base import EpochOrder

__all__ = ["among", "n_available", "sorted_indices", "sorted_with"]


def sorted_indices(indices: ArrayLike | None) -> NDArray[np.int64] | None:
    """Return the rows to visit, checked and in storage order; None for all rows.

    ``__post_init__`` of a strategy calls this, and warnings point to the caller of its caller.

    Raises
    ------
    ParameterError
        The indices are not one-dimensional non-negative integers, or there are none.

    Warns
    -----
    UserWarning
        The indices were not sorted.
    """
    if indices is None:
        return None
    given = np.asarray(indices)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        msg = (
            "`indices` must be one-dimensional integers, at least one, "
            f"but got shape {given.shape} and dtype {given.dtype}"
        )
        if given.dtype.kind == "U" and not given.ndim:
            msg += "; write `collection.where(query)`"
        elif given.dtype.kind == "b":
            msg += "; write `np.flatnonzero(mask)`"
        raise ParameterError(msg)
    rows = given.astype(np.int64)
    if np.any(rows[1:] < rows[:-1]):
        warnings.warn(
            (
                "`indices` were not sorted; they are read in sorted order, so sort them to "
                "silence this warning"
            ),
            UserWarning,
            stacklevel=4,
        )
        rows = np.sort(rows)
    if rows[0] < 0:
        msg = f"`indices >= 0` must hold, but the smallest is {rows[0]}"
        raise ParameterError(msg)
    return rows


def sorted_with(indices: ArrayLike | None, values: NDArray[Any]) -> NDArray[Any]:
    """Return values in the order of `sorted_indices` if there is one for each index."""
    given = None if indices is None else np.asarray(indices)
    if given is None or given.shape != values.shape or not np.any(given[1:] < given[:-1]):
        return values
    in_order: NDArray[Any] = values[np.argsort(given, kind="stable")]
    return in_order


def n_available(indices: ArrayLike | None, n_rows: int) -> int:
    """Return how many rows may be visited.

    Raises
    ------
    ParameterError
        A row is beyond the collection.
    """
    if indices is None:
        return n_rows
    rows = np.asarray(indices)
    if rows[-1] >= n_rows:
        msg = f"`indices < {n_rows}` (the number of rows) must hold, but the largest is {rows[-1]}"
        raise ParameterError(msg)
    return rows.size


def among(indices: ArrayLike | None, order: EpochOrder) -> EpochOrder:
    """Return an order of rows, from an order of their numbers among ``indices``."""
    if indices is None:
        return order
    rows: NDArray[np.int64] = np.asarray(indices)
    return lambda positions: rows[order(positions)]
