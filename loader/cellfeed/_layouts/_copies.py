"""Rows that are delivered more than once, which are read once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Copies", "first_deliveries"]


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows that are delivered again, which are read once: int64 arrays of one shape.

    Parameters
    ----------
    sources, targets
        Places to copy from and to.
    sizes
        Bytes.
    """

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    sizes: NDArray[np.int64]


def first_deliveries(
    order: NDArray[np.intp], n_distinct: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where each distinct row is delivered first, and where all others are delivered."""
    first = np.empty(n_distinct, np.intp)
    first[order[::-1]] = np.arange(order.size)[::-1]
    is_again = np.ones(order.size, np.bool_)
    is_again[first] = False
    return first, np.flatnonzero(is_again)
