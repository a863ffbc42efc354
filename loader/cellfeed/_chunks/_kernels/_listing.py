"""Compiled: the callback by which HDF5 lists the chunks of an array and their locations."""

from typing import Any

import numpy as np
from numba import carray

from cellfeed._chunks._kernels._native import (
    pointer,
)
from cellfeed._chunks._kernels._tables import (
    GRID,
    LISTED,
    LISTED_ADDRESS,
    LISTED_MASK,
    LISTED_SIZE,
    N_DIMENSIONS,
    N_LISTED_COLUMNS,
    N_STATE,
    ODD,
)
from cellfeed._compiled import compiled_callback

__all__ = ["note_chunk"]


@compiled_callback("int32(CPointer(uint64), uint32, uint64, uint64, voidptr)")
def note_chunk(offset: Any, filter_mask: Any, address: Any, size: Any, state: Any) -> Any:
    """Note a chunk; compiled, so that it cannot raise an exception."""
    known = carray(state, (N_STATE,), np.int64)
    number, n_chunks = np.int64(0), np.int64(1)
    for k in range(known[N_DIMENSIONS]):
        place = np.int64(offset[k]) // known[GRID + 2 * k]
        n = known[GRID + 2 * k + 1]
        if place < 0 or place >= n:
            known[ODD] = 1
            return np.int32(1)  # stops the iteration
        number = number * n + place
        n_chunks *= n
    first, n_bytes = np.int64(address), np.int64(size)
    if first < 0 or n_bytes < 0:
        known[ODD] = 1
        return np.int32(1)
    table = carray(pointer(known[LISTED]), (n_chunks, N_LISTED_COLUMNS), np.int64)
    table[number, LISTED_ADDRESS] = first
    table[number, LISTED_SIZE] = n_bytes
    table[number, LISTED_MASK] = np.int64(filter_mask)
    return np.int32(0)
