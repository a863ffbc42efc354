"""Fast sorting for a fetch: the random words that shuffle it, and the rows that it reads."""

import numpy as np
from numpy.typing import NDArray

from cellfeed.sampling._compiled import compiled

__all__ = ["distinct", "sorted_order"]

# Below that, clearing the counters of each row takes longer than NumPy takes to sort it.
_LEAST_COMPILED = 1024
_SIGN = np.uint64(1 << 63)


def sorted_order(words: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return ``np.argsort(words, axis=1, kind="stable")``.

    Parameters
    ----------
    words
        uint64, shape (n, size).
    """
    radix_order = compiled("_radix", "radix_order")
    order: NDArray[np.intp]
    if radix_order is None or words.shape[1] < _LEAST_COMPILED:
        order = np.argsort(words, axis=1, kind="stable")
    else:
        order = radix_order(np.ascontiguousarray(words)).astype(np.intp, copy=False)
    return order


def distinct(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return ``np.unique(rows, return_inverse=True)``.

    Examples
    --------
    >>> distinct(np.array([7, 3, 7]))
    (array([3, 7]), array([1, 0, 1]))
    """
    order = sorted_order(rows[None].astype(np.uint64) ^ _SIGN)[0]  # which negative ones precede
    ascending = rows[order]
    is_first = np.ones(rows.size, np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    inverse = np.empty(rows.size, np.intp)
    inverse[order] = np.cumsum(is_first) - 1
    return ascending[is_first], inverse
