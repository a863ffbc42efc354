"""Compiled: adding up elements that are stored as differences."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._native import LANES, add_up_lanes, pointer
from cellfeed._chunks._kernels._planning import extent
from cellfeed._chunks._kernels._tables import DECODED_BYTES, ITEMSIZE, PLACING
from cellfeed._compiled import compiled

__all__ = ["add_up"]

_word = "uint8", "uint32", "uint64"


@compiled(*(f"void({word}[::1], {word}[::1])" for word in _word))
def _add_up(differences: NDArray[Any], sums: NDArray[Any]) -> None:
    """Add up integers, which wrap around at the size of their dtype, signed or not."""
    total = differences.dtype.type(0)
    for i in range(differences.size):
        total = differences.dtype.type(total + differences[i])
        sums[i] = total


@compiled("void(int64, int64, int64)")
def _add_up_16_bits(source: int, target: int, n: int) -> None:
    """Add up 16-bit integers from one address to another; most indices have 16 bits."""
    total, whole = np.uint16(0), n - n % LANES
    for i in range(0, whole, LANES):
        total = add_up_lanes(target + 2 * i, source + 2 * i, total)
    differences = carray(pointer(source), (n,), np.uint16)
    sums = carray(pointer(target), (n,), np.uint16)
    for i in range(whole, n):
        total = np.uint16(total + differences[i])
        sums[i] = total


@compiled("void(int64, int64, int64[:,::1], int64[::1])")
def add_up(
    source: int,
    target: int,
    segments: NDArray[np.int64],
    array: NDArray[np.int64],
) -> None:
    """Add up the differences of a chunk, as far as segments need its elements.

    ``source`` and ``target`` are addresses, and may be the same.
    """
    n = array[DECODED_BYTES] // array[ITEMSIZE]
    wanted = 0
    for k in range(len(segments)):
        _, stop = extent(segments[k], array[PLACING])
        wanted = max(wanted, stop)
    n = min(n, wanted)
    if array[ITEMSIZE] == 1:
        _add_up(carray(pointer(source), (n,), np.uint8), carray(pointer(target), (n,), np.uint8))
    elif array[ITEMSIZE] == 2:
        _add_up_16_bits(source, target, n)
    elif array[ITEMSIZE] == 4:
        _add_up(carray(pointer(source), (n,), np.uint32), carray(pointer(target), (n,), np.uint32))
    else:
        _add_up(carray(pointer(source), (n,), np.uint64), carray(pointer(target), (n,), np.uint64))
