"""Requested rows of a collection, and how many elements they store."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellfeed._reading import Part

__all__ = ["known_mean", "row_numbers"]


def known_mean(parts: Sequence[Part]) -> float | None:
    """Return the mean number of elements of rows; None if that requires reading them."""
    lengths = [part.stored.row_lengths(part.runs) if part.keeps_all else None for part in parts]
    known = [each for each in lengths if each is not None]
    return float(np.concatenate(known).mean()) if len(known) == len(parts) else None


def row_numbers(
    rows: NDArray[np.integer] | Sequence[int] | slice, n_rows: int
) -> NDArray[np.int64]:
    """Return ``np.arange(n_rows)[rows]`` without making numbers for other rows."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n_rows), dtype=np.int64)
    given = np.atleast_1d(rows)
    if given.dtype.kind == "b" and given.shape == (n_rows,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        msg = f"rows must be integers, a slice or a mask of {n_rows} booleans, but got {rows!r}"
        raise IndexError(msg)
    outside = given[(given < -n_rows) | (given >= n_rows)]
    if outside.size:
        msg = f"row {outside[0]} is outside a collection of {n_rows} rows"
        raise IndexError(msg)
    numbers = given.astype(np.int64)
    return np.where(numbers < 0, numbers + n_rows, numbers)
