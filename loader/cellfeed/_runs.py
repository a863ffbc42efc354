"""Runs of rows: sorted, disjoint ranges ``[start, stop)``, int64, shape (n, 2)."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.int64]


def merge_consecutive(rows: NDArray[np.int64]) -> Runs:
    """Return the runs of distinct ``rows``, in order.

    Examples
    --------
    >>> merge_consecutive(np.array([4, 5, 6, 9])).tolist()
    [[4, 7], [9, 10]]
    """
    if rows.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(rows) != 1)
    runs = np.empty((breaks.size + 1, 2), dtype=np.int64)
    runs[0, 0], runs[1:, 0] = rows[0], rows[breaks + 1]
    runs[-1, 1], runs[:-1, 1] = rows[-1] + 1, rows[breaks] + 1
    return runs


def count_rows(runs: Runs) -> int:
    """Return the number of rows in ``runs``."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def expand(runs: Runs) -> NDArray[np.int64]:
    """Return the rows of ``runs``, ascending; the inverse of `merge_consecutive`.

    Any list of ranges can be expanded, such as the stored elements of CSR rows.

    Examples
    --------
    >>> expand(np.array([[4, 7], [9, 10]])).tolist()
    [4, 5, 6, 9]
    """
    lengths = runs[:, 1] - runs[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.repeat(runs[:, 0] - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


def split_at(runs: Runs, boundaries: NDArray[np.int64]) -> Iterator[tuple[int, Runs]]:
    """Split ``runs`` at ``boundaries``, and number the rows of each part from its start.

    Parameters
    ----------
    runs
        The runs to split.
    boundaries
        Ascending, from 0 to at least the last row, int64, shape (n + 1,). Part ``k``, such as a
        file of a collection, is ``[boundaries[k], boundaries[k + 1])``.

    Yields
    ------
    The number of each part that has rows, and its runs, relative to the part's first row.

    Examples
    --------
    >>> for part, local in split_at(np.array([[2, 6], [8, 9]]), np.array([0, 4, 10])):
    ...     print(part, local.tolist())
    0 [[2, 4]]
    1 [[0, 2], [4, 5]]
    """
    # Runs are disjoint and ascend, so those of a part stand together.
    firsts = np.searchsorted(runs[:, 1], boundaries[:-1], side="right")
    lasts = np.searchsorted(runs[:, 0], boundaries[1:], side="left")
    for part in np.flatnonzero((firsts < lasts) & (np.diff(boundaries) > 0)).tolist():
        start, stop = boundaries[part], boundaries[part + 1]
        yield part, np.clip(runs[firsts[part] : lasts[part]], start, stop) - start
