"""Destinations in memory that is not allocated yet.

The reads of a fetch are planned while the previous fetch is still being decoded, and memory is
allocated only when it is needed. Until then, a destination is the number of a group of rows, such
as a minibatch, and a byte offset into the future memory of that group.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["bind", "destination", "groups_of"]

_OFFSET_BITS = 40  # a group has less than 1 TB, and there are fewer than 8 million groups


def destination(groups: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return destinations ``offsets`` bytes into the memory of ``groups``."""
    return (groups << _OFFSET_BITS) | offsets


def groups_of(destinations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the groups of destinations."""
    return destinations >> _OFFSET_BITS


def bind(destinations: NDArray[np.int64], bases: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the addresses of destinations, with the memory of group ``k`` at ``bases[k]``.

    Examples
    --------
    >>> bind(destination(np.array([0, 1]), np.array([8, 16])), np.array([1000, 2000])).tolist()
    [1008, 2016]
    """
    addresses: NDArray[np.int64] = bases[groups_of(destinations)] + (
        destinations & ((1 << _OFFSET_BITS) - 1)
    )
    return addresses
