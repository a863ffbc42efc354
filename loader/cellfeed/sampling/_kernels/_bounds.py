# ruff: noqa: ARG001 - numba fixes what an intrinsic takes
"""Compiled: where blocks begin."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cellfeed._compiled import compiled

__all__ = ["CHUNK", "FIRST_ROW", "N_COLUMNS", "POINTER", "ROW", "bound", "moments"]

# Columns of the table of files, whose last row has the number of all rows and nothing else: its
# first row, the address of the row pointer or 0, elements of a row where all have as many, and
# elements of a chunk, 0 if every row may begin a block.
FIRST_ROW, POINTER, ROW, CHUNK, N_COLUMNS = range(5)


def _to_pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


_integers_at: Any = intrinsic(_to_pointer)  # of an address, the pointer that `carray` wants


@compiled("int64(int64[:,::1], int64)", inner=True)
def _file_of(files: NDArray[np.int64], row: int) -> int:
    low, high = 0, files.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if files[middle, FIRST_ROW] <= row:
            low = middle
        else:
            high = middle
    return low


@compiled("int64(int64[::1], int64, int64)", inner=True)
def _first_at_least(values: NDArray[np.int64], low: int, least: int) -> int:
    """Return where the first of ascending values is that is not below ``least``.

    ``values[low]`` is below. Searched from there, as it is close by.
    """
    step, high = 1, low + 1
    while high < values.size and values[high] < least:
        low = high
        step *= 2
        high = min(values.size, high + step)
    while high - low > 1:
        middle = (low + high) // 2
        if values[middle] < least:
            low = middle
        else:
            high = middle
    return high


@compiled("int64(int64[:,::1], int64, int64, int64)", inner=True)
def _start_from(files: NDArray[np.int64], number: int, before: int, row: int) -> int:
    """Return ``row`` if it begins in another chunk than ``before``, else where the next begins.

    That is the first row from ``row`` on, of the file of that number, that begins in a chunk after
    its own; the row after the last of the file if there is none.
    """
    first, chunk = files[number, FIRST_ROW], files[number, CHUNK]
    if before < first or chunk == 0:
        return row
    n_rows = files[number + 1, FIRST_ROW] - first
    address = files[number, POINTER]
    if address == 0:
        size = files[number, ROW]
        start = (row - first) * size // chunk * chunk
        if (before - first) * size < start:
            return row
        return int(first + min(n_rows, -(-(start + chunk) // size)))
    pointer = carray(_integers_at(address), n_rows)
    start = pointer[row - first] // chunk * chunk
    if pointer[before - first] < start:
        return row
    return int(first + _first_at_least(pointer, row - first, start + chunk))


@compiled("int64(int64[:,::1], int64[::1], int64, int64)")
def bound(files: NDArray[np.int64], indices: NDArray[np.int64], n: int, place: int) -> int:
    """Return where the block begins whose first row, were it not aligned, is at a place.

    Parameters
    ----------
    files
        See the top of this module.
    indices
        The rows to visit, ascending; empty if all are.
    n
        How many they are.
    place
        A multiple of the block size.
    """
    if place == 0 or place >= n:
        return min(place, n)
    if indices.size == 0:
        return int(_start_from(files, _file_of(files, place), place - 1, place))
    row = indices[place]
    start = _start_from(files, _file_of(files, row), indices[place - 1], row)
    return place if start == row else int(_first_at_least(indices, place, start))


@compiled("Tuple((int64, int64, float64))(int64[:,::1], int64[::1], int64, int64)")
def moments(
    files: NDArray[np.int64], indices: NDArray[np.int64], n: int, block_size: int
) -> tuple[int, int, float]:
    """Return how many blocks there are, the size of the largest, and the sum of their squares."""
    n_blocks, largest, squares = 0, 0, 0.0
    begin = 0
    for place in range(block_size, n + block_size, block_size):
        if begin >= place:
            continue
        end = bound(files, indices, n, place)
        if end > begin:
            n_blocks += 1
            largest = max(largest, end - begin)
            squares += float(end - begin) ** 2
        begin = end
    return n_blocks, largest, squares
