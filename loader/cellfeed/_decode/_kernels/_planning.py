"""Compiled: finding the chunks that contain the requested elements, and their destinations."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._compiled import compiled, compiled_callback
from cellfeed._decode._kernels._fields import (
    COUNT,
    FROM,
    GRID,
    LISTED,
    LISTED_ADDRESS,
    LISTED_MASK,
    LISTED_SIZE,
    N_DIMENSIONS,
    N_LISTED_COLUMNS,
    N_SEGMENT_COLUMNS,
    N_STATE,
    ODD,
    SCATTERED,
    TO,
    WITHIN,
)
from cellfeed._decode._kernels._native import atomic_add, pointer

_int64_2d = "int64[:,::1]"


def plan_flat(
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    destinations: NDArray[np.int64],
    chunk_elements: int,
    out_itemsize: int,
) -> Any:
    """Return the chunks and segments that ranges of a one-dimensional array consist of.

    Parameters
    ----------
    starts, counts
        Ascending, disjoint ranges of elements, shape (n,).
    destinations
        Address of the destination of each range, shape (n,).
    chunk_elements
        Number of elements of a chunk.
    out_itemsize
        Size in bytes of an element at the destination.

    Returns
    -------
    The distinct chunks, ascending; the first segment of each; the segments; and the addresses
    inside destinations where a range continues in another chunk.
    """
    n_segments = _count_segments(starts, counts, chunk_elements)
    segments = np.empty((n_segments, N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts, crossings = np.empty((3, n_segments), np.int64)
    ranges = (starts, counts, destinations)
    n_chunks, n_crossings = _plan_flat(
        *ranges, chunk_elements, out_itemsize, segments, chunks, firsts, crossings
    )
    return chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments, crossings[:n_crossings]


@compiled("int64(int64[::1], int64[::1], int64)")
def _count_segments(
    starts: NDArray[np.int64], counts: NDArray[np.int64], chunk_elements: int
) -> int:
    n_segments = 0
    for i in range(starts.size):
        if counts[i]:
            n_segments += (
                (starts[i] + counts[i] - 1) // chunk_elements - starts[i] // chunk_elements + 1
            )
    return n_segments


@compiled(
    f"UniTuple(int64, 2)(int64[::1], int64[::1], int64[::1], int64, int64, {_int64_2d}, "
    "int64[::1], int64[::1], int64[::1])"
)
def _plan_flat(
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    destinations: NDArray[np.int64],
    chunk_elements: int,
    out_itemsize: int,
    segments: NDArray[np.int64],
    chunks: NDArray[np.int64],
    firsts: NDArray[np.int64],
    crossings: NDArray[np.int64],
) -> Any:
    """Fill the tables; return how many chunks and crossings there are."""
    n_chunks = n_crossings = k = 0
    for i in range(starts.size):
        start, stop, address = starts[i], starts[i] + counts[i], destinations[i]
        while start < stop:
            chunk = start // chunk_elements
            n = min(stop, (chunk + 1) * chunk_elements) - start
            if n_chunks == 0 or chunks[n_chunks - 1] != chunk:
                chunks[n_chunks] = chunk
                firsts[n_chunks] = k
                n_chunks += 1
            if start != starts[i]:
                crossings[n_crossings] = address
                n_crossings += 1
            segments[k, FROM] = start - chunk * chunk_elements
            segments[k, COUNT] = n
            segments[k, TO] = address
            segments[k, WITHIN] = start - starts[i]
            k += 1
            start += n
            address += n * out_itemsize
    return n_chunks, n_crossings


@compiled(
    f"Tuple((int64[::1], int64[::1], {_int64_2d}))"
    "(int64[::1], int64[::1], int64, int64, int64, int64)"
)
def plan_grid(
    rows: NDArray[np.int64],
    destinations: NDArray[np.int64],
    n_columns: int,
    chunk_rows: int,
    chunk_columns: int,
    out_itemsize: int,
) -> Any:
    """Return the chunks and segments that rows of a two-dimensional array consist of.

    Parameters
    ----------
    rows
        Ascending row numbers, shape (n,).
    destinations
        Address of the destination of each row, shape (n,).
    n_columns
        Number of columns of the array.
    chunk_rows, chunk_columns
        Shape of a chunk.
    out_itemsize
        Size in bytes of an element at the destination.

    Returns
    -------
    The distinct chunks in C order of the chunk grid; the first segment of each; the segments.
    """
    across = (n_columns + chunk_columns - 1) // chunk_columns
    segments = np.empty((rows.size * across, N_SEGMENT_COLUMNS), np.int64)
    chunks = np.empty(rows.size * across, np.int64)
    firsts = np.empty(rows.size * across, np.int64)
    n_chunks = k = first = 0
    while first < rows.size:
        down = rows[first] // chunk_rows
        last = first
        while last < rows.size and rows[last] // chunk_rows == down:
            last += 1
        for column in range(across):
            chunks[n_chunks] = down * across + column
            firsts[n_chunks] = k
            n_chunks += 1
            n = min(chunk_columns, n_columns - column * chunk_columns)
            for i in range(first, last):
                segments[k, FROM] = (rows[i] - down * chunk_rows) * chunk_columns
                segments[k, COUNT] = n
                segments[k, TO] = destinations[i] + column * chunk_columns * out_itemsize
                segments[k, WITHIN] = column * chunk_columns
                k += 1
        first = last
    return chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments


@compiled("Tuple((int64, int64))(int64[::1], int64)", inner=True)
def extent(segment: NDArray[np.int64], placing: int) -> Any:
    """Return the first element of a chunk in a segment, and the one after the last."""
    first, n = segment[FROM], segment[COUNT]
    if placing == SCATTERED:
        entries = carray(pointer(segment[WITHIN]), (n,), np.int64)
        return first + (entries[0] >> 32), first + (entries[n - 1] >> 32) + 1
    return first, first + n


@compiled("void(int64[::1], int64[::1], int64[::1], int64[:,::1], int64, int64)")
def trim(
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    firsts: NDArray[np.int64],
    segments: NDArray[np.int64],
    itemsize: int,
    placing: int,
) -> None:
    """Cut uncompressed chunks to their requested elements, in place."""
    for c in range(offsets.size):
        if sizes[c] == 0:
            continue
        stop = firsts[c + 1] if c + 1 < offsets.size else len(segments)
        lowest, highest = extent(segments[firsts[c]], placing)
        for k in range(firsts[c], stop):
            first, last = extent(segments[k], placing)
            lowest, highest = min(lowest, first), max(highest, last)
        for k in range(firsts[c], stop):
            segments[k, FROM] -= lowest
        offsets[c] += lowest * itemsize
        sizes[c] = (highest - lowest) * itemsize


# Compiled: the callback by which HDF5 lists the chunks of an array and their locations.


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


# Compiled: counters that threads and processes update concurrently.


@compiled("void(int64, int64)")
def count(address: int, n: int) -> None:
    """Add to the int64 at an address."""
    atomic_add(address, n)
