"""Compiled: finding the chunks that contain the requested elements, and their destinations."""

from typing import Any

import numpy as np

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    address_of,
    atomic_add,
    elements,
    pointer_to,
    table,
)

segment_table = table(fields.N_SEGMENT_COLUMNS)


# A planning function counts segments, has memory allocated by NumPy, and fills it by a compiled
# function. That compiled code allocates nothing halves the time to compile it.


def plan_flat(
    starts: Ints, counts: Ints, destinations: Ints, chunk_elements: int, out_itemsize: int
) -> tuple[Ints, Ints, Ints, Ints]:
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
    n_segments = _count_flat(starts, counts, chunk_elements)
    segments = np.empty((n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts, crossings = np.empty((3, n_segments), np.int64)
    n_chunks, n_crossings = _plan_flat(
        starts, counts, destinations, chunk_elements, out_itemsize, segments, chunks, firsts,
        crossings,
    )  # fmt: skip
    return (
        chunks[:n_chunks].copy(),
        firsts[:n_chunks].copy(),
        segments,
        crossings[:n_crossings].copy(),
    )


@compiled("int64(int64[::1], int64[::1], int64)")
def _count_flat(starts: Ints, counts: Ints, chunk_elements: int) -> int:
    """Return the number of segments that ranges of a one-dimensional array consist of."""
    n, n_segments = starts.size, 0
    starts, counts = pointer_to(starts), pointer_to(counts)
    for i in range(n):
        if counts[i]:
            last = starts[i] + counts[i] - 1
            n_segments += last // chunk_elements - starts[i] // chunk_elements + 1
    return n_segments


@compiled(
    "UniTuple(int64, 2)(int64[::1], int64[::1], int64[::1], int64, int64, int64[:,::1], "
    "int64[::1], int64[::1], int64[::1])"
)
def _plan_flat(
    starts: Ints,
    counts: Ints,
    destinations: Ints,
    chunk_elements: int,
    out_itemsize: int,
    segments: Ints,
    chunks: Ints,
    firsts: Ints,
    crossings: Ints,
) -> tuple[int, int]:
    """Fill the arrays of `plan_flat`; return the number of chunks and of crossings."""
    n_ranges = starts.size
    starts, counts, destinations = pointer_to(starts), pointer_to(counts), pointer_to(destinations)
    segments = segment_table(address_of(segments))
    chunks, firsts, crossings = pointer_to(chunks), pointer_to(firsts), pointer_to(crossings)
    n_chunks = n_crossings = k = 0
    for i in range(n_ranges):
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
            segments[k, fields.FROM] = start - chunk * chunk_elements
            segments[k, fields.COUNT] = n
            segments[k, fields.TO] = address
            segments[k, fields.WITHIN] = start - starts[i]
            k += 1
            start += n
            address += n * out_itemsize
    return n_chunks, n_crossings


def plan_grid(
    rows: Ints,
    destinations: Ints,
    n_columns: int,
    chunk_rows: int,
    chunk_columns: int,
    out_itemsize: int,
) -> tuple[Ints, Ints, Ints]:
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
    n_segments = rows.size * -(-n_columns // chunk_columns)
    segments = np.empty((n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts = np.empty((2, n_segments), np.int64)
    n_chunks = _plan_grid(
        rows, destinations, n_columns, chunk_rows, chunk_columns, out_itemsize, segments, chunks,
        firsts,
    )  # fmt: skip
    return chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments


@compiled(
    "int64(int64[::1], int64[::1], int64, int64, int64, int64, int64[:,::1], int64[::1], "
    "int64[::1])"
)
def _plan_grid(
    rows: Ints,
    destinations: Ints,
    n_columns: int,
    chunk_rows: int,
    chunk_columns: int,
    out_itemsize: int,
    segments: Ints,
    chunks: Ints,
    firsts: Ints,
) -> int:
    """Fill the arrays of `plan_grid`; return the number of chunks."""
    n_rows = rows.size
    rows, destinations = pointer_to(rows), pointer_to(destinations)
    segments = segment_table(address_of(segments))
    chunks, firsts = pointer_to(chunks), pointer_to(firsts)
    across = (n_columns + chunk_columns - 1) // chunk_columns
    n_chunks = k = first = 0
    while first < n_rows:
        down = rows[first] // chunk_rows
        last = first
        while last < n_rows and rows[last] // chunk_rows == down:
            last += 1
        for column in range(across):
            chunks[n_chunks] = down * across + column
            firsts[n_chunks] = k
            n_chunks += 1
            n = min(chunk_columns, n_columns - column * chunk_columns)
            for i in range(first, last):
                segments[k, fields.FROM] = (rows[i] - down * chunk_rows) * chunk_columns
                segments[k, fields.COUNT] = n
                segments[k, fields.TO] = destinations[i] + column * chunk_columns * out_itemsize
                segments[k, fields.WITHIN] = column * chunk_columns
                k += 1
        first = last
    return n_chunks


@compiled("UniTuple(int64, 2)(CPointer(int64), int64)", inner=True)
def extent(segment: Ints, placing: int) -> Any:
    """Return the first element of a chunk in a segment, and the one after the last."""
    first, n = segment[fields.FROM], segment[fields.COUNT]
    if placing == fields.SCATTERED:
        entries = elements(segment[fields.WITHIN], np.int64)
        return first + (entries[0] >> 32), first + (entries[n - 1] >> 32) + 1
    return first, first + n


@compiled("void(int64[::1], int64[::1], int64[::1], int64[:,::1], int64, int64)")
def trim(
    offsets: Ints, sizes: Ints, firsts: Ints, segments: Ints, itemsize: int, placing: int
) -> None:
    """Cut uncompressed chunks to their requested elements, in place."""
    own = segment_table(address_of(segments))
    for c in range(offsets.size):
        if sizes[c] == 0:
            continue
        stop = firsts[c + 1] if c + 1 < offsets.size else len(segments)
        lowest, highest = extent(own[firsts[c]], placing)
        for k in range(firsts[c], stop):
            first, last = extent(own[k], placing)
            lowest, highest = min(lowest, first), max(highest, last)
        for k in range(firsts[c], stop):
            own[k, fields.FROM] -= lowest
        offsets[c] += lowest * itemsize
        sizes[c] = (highest - lowest) * itemsize


# Compiled: counters that threads and processes update concurrently.


@compiled("void(int64, int64)")
def count(address: int, n: int) -> None:
    """Add to the int64 at an address."""
    atomic_add(address, n)
