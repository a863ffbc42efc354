"""Compiled: adding up elements that are stored as differences."""

from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from cellfeed._chunks._kernels._native import (
    LANES,
    add_up_lanes,
    pointer,
)
from cellfeed._chunks._kernels._planning import extent
from cellfeed._chunks._kernels._tables import (
    DECODED_BYTES,
    ITEMSIZE,
    N_ARRAY_COLUMNS,
    N_SEGMENT_COLUMNS,
    PLACING,
)
from cellfeed._compiled import compiled, compiled_callback

__all__ = ["adder"]

_word = "uint8", "uint32", "uint64"


@compiled(*(f"void({word}[::1], {word}[::1])" for word in _word), inner=True)
def _add_up(differences: NDArray[Any], sums: NDArray[Any]) -> None:
    """Add up integers, which wrap around at the size of their dtype, signed or not."""
    total = differences.dtype.type(0)
    for i in range(differences.size):
        total = differences.dtype.type(total + differences[i])
        sums[i] = total


@compiled("void(int64, int64, int64)", inner=True)
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


@compiled_callback(types.void(*[types.int64] * 5))
def adder(source, target, segments_at, n_segments, array_at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add up the differences of a chunk, as far as segments need its elements.

    All are addresses, of the chunk's elements, of the output, which may be the same, and of the
    tables of segments and arrays.
    """
    segments = carray(pointer(segments_at), (n_segments, N_SEGMENT_COLUMNS), np.int64)
    array = carray(pointer(array_at), (N_ARRAY_COLUMNS,), np.int64)
    n, wanted = array[DECODED_BYTES] // array[ITEMSIZE], 0
    for k in range(n_segments):
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
