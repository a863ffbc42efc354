"""Compiled: sorting the columns of sparse rows.

Columns that are close together are ranked by a bitmap of the columns between the first and the
last of a row: the slot of a column is the number of set bits below its own. Other rows, and rows
with repeated columns, are sorted by comparison.
"""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._native import (
    copy_bytes,
    pointer,
    popcount,
)
from cellfeed._compiled import compiled

__all__ = ["WORDS_OF_A_COLUMN", "rank", "sort_rows"]

_LOWER = (1 << 32) - 1
WORDS_OF_A_COLUMN = 4
"""Maximum number of bitmap words per column of a row for ranking by bitmap."""


@compiled(
    *(
        f"boolean({index}[::1], uint64[::1], int32[::1], int32[::1])"
        for index in ("int32", "int64")
    ),
    inner=True,
)
def _by_bits(
    columns: NDArray[Any],
    bits: NDArray[np.uint64],
    before: NDArray[np.int32],
    slots: NDArray[np.int32],
) -> bool:
    """Find slots as `rank` does; return False if columns repeat, or are too far apart."""
    low, high = columns[0], columns[0]
    for j in range(1, columns.size):
        low, high = min(low, columns[j]), max(high, columns[j])
    first = low >> 6
    n_words = (high >> 6) - first + 1
    if n_words > WORDS_OF_A_COLUMN * columns.size:
        return False
    for word in range(n_words):  # assigning to a slice takes seconds to compile
        bits[word] = np.uint64(0)
    for j in range(columns.size):
        bits[(columns[j] >> 6) - first] |= np.uint64(1) << np.uint64(columns[j] & 63)
    n = 0
    for word in range(n_words):
        before[word] = n
        n += popcount(bits[word])
    if n < columns.size:
        return False
    for j in range(columns.size):
        word = (columns[j] >> 6) - first
        below = (np.uint64(1) << np.uint64(columns[j] & 63)) - np.uint64(1)
        slots[j] = before[word] + popcount(bits[word] & below)
    return True


@compiled(
    *(
        f"boolean({index}[::1], uint64[::1], int32[::1], int64[::1], int32[::1])"
        for index in ("int32", "int64")
    ),
    inner=True,
)
def rank(
    columns: NDArray[Any],
    bits: NDArray[np.uint64],
    before: NDArray[np.int32],
    keys: NDArray[np.int64],
    slots: NDArray[np.int32],
) -> bool:
    """Find the slot of each column of a row among all of them; equal columns keep their order.

    Parameters
    ----------
    columns
        At least one.
    bits, before, keys
        Scratch memory: `WORDS_OF_A_COLUMN` per column for ``bits``, one per column for the others.
    slots
        Filled with the slots.

    Returns
    -------
    Whether the columns are distinct.
    """
    if _by_bits(columns, bits, before, slots):
        return True
    own, distinct = keys[: columns.size], True
    for j in range(own.size):
        own[j] = (np.int64(columns[j]) << 32) | j
    own.sort()
    for j in range(own.size):
        slots[own[j] & _LOWER] = j
        distinct &= j == 0 or own[j] >> 32 != own[j - 1] >> 32
    return distinct


@compiled(
    *(
        f"void({index}[::1], int64, int64, int32[::1], {index}[::1], int64)"
        for index in ("int32", "int64")
    ),
    inner=True,
)
def _to_slots(
    columns: NDArray[Any],
    first: int,
    itemsize: int,
    slots: NDArray[np.int32],
    kept: NDArray[Any],
    values: int,
) -> None:
    """Move columns, and values at an address, to their slots, using scratch memory."""
    n = columns.size
    for j in range(n):
        kept[j] = columns[j]
    copy_bytes(values, first, n * itemsize)
    for j in range(n):
        columns[slots[j]] = kept[j]
    if itemsize == 4:
        target = carray(pointer(first), (n,), np.uint32)
        source = carray(pointer(values), (n,), np.uint32)
        for j in range(n):
            target[slots[j]] = source[j]
        return
    for j in range(n):
        copy_bytes(first + slots[j] * itemsize, values + j * itemsize, itemsize)


@compiled(
    *(f"boolean({index}[::1], {index}[::1], uint8[::1], int64)" for index in ("int32", "int64"))
)
def sort_rows(
    indptr: NDArray[Any], indices: NDArray[Any], data: NDArray[np.uint8], itemsize: int
) -> bool:
    """Sort the elements of each row by column, in place; equal columns keep their order.

    Parameters
    ----------
    indptr, indices
        CSR rows with fewer than 2^31 columns.
    data, itemsize
        The bytes of the values, and the size of a value in bytes.

    Returns
    -------
    Whether the columns of each row are distinct.
    """
    longest = 0
    for row in range(indptr.size - 1):
        longest = max(longest, indptr[row + 1] - indptr[row])
    keys, values = np.empty(longest, np.int64), np.empty(longest * itemsize, np.uint8)
    bits = np.empty(longest * WORDS_OF_A_COLUMN, np.uint64)
    before = np.empty(longest * WORDS_OF_A_COLUMN, np.int32)
    slots, kept = np.empty(longest, np.int32), np.empty(longest, indices.dtype)
    distinct = True
    for row in range(indptr.size - 1):
        start, n = np.int64(indptr[row]), np.int64(indptr[row + 1] - indptr[row])
        columns = indices[start : start + n]
        ascending = True
        for j in range(1, n):
            ascending &= columns[j] > columns[j - 1]
        if ascending:
            continue
        distinct &= rank(columns, bits, before, keys, slots)
        first = data.ctypes.data + start * itemsize
        _to_slots(columns, first, itemsize, slots, kept, values.ctypes.data)
    # Named after the last use of its address, so that it is not freed before.
    return distinct and values.size >= 0
