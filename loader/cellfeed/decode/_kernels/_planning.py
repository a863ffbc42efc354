"""Compiled: finding the chunks that contain the requested elements, and their destinations.

Functions fill arrays that `cellfeed.decode._planning` allocates: that compiled code allocates
nothing halves the time to compile it. They return how many chunks and segments there are.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import address_of, elements, pointer_to, row_of


@compiled(
    "UniTuple(int64, 3)(int64[::1], int64[::1], int64[::1], int64, int64, int64[:,::1], "
    "int64[::1], int64[::1], int64[::1])"
)
def plan_ranges(
    starts: Ints,
    counts: Ints,
    destinations: Ints,
    chunk_elements: int,
    out_itemsize: int,
    segments: Ints,
    chunks: Ints,
    firsts: Ints,
    crossings: Ints,
) -> tuple[int, int, int]:
    """Plan ranges of a one-dimensional array; also return the number of ``crossings``."""
    n_ranges, segments_at = starts.size, address_of(segments)
    starts, counts, destinations = pointer_to(starts), pointer_to(counts), pointer_to(destinations)
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
            segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
            segment[fields.FROM] = start - chunk * chunk_elements
            segment[fields.COUNT] = n
            segment[fields.TO] = address
            segment[fields.WITHIN] = start - starts[i]
            k += 1
            start += n
            address += n * out_itemsize
    return n_chunks, k, n_crossings


@compiled(
    "int64(int64[::1], int64[::1], int64, int64, int64, int64, int64[:,::1], int64[::1], "
    "int64[::1])"
)
def plan_rows(
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
    """Plan rows of a two-dimensional array; return the number of chunks."""
    n_rows, segments_at = rows.size, address_of(segments)
    rows, destinations = pointer_to(rows), pointer_to(destinations)
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
                segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
                segment[fields.FROM] = (rows[i] - down * chunk_rows) * chunk_columns
                segment[fields.COUNT] = n
                segment[fields.TO] = destinations[i] + column * chunk_columns * out_itemsize
                segment[fields.WITHIN] = column * chunk_columns
                k += 1
        first = last
    return n_chunks


@compiled(
    "UniTuple(int64, 2)(int64[::1], int64[::1], int32[::1], int64[::1], int64, int64, "
    "int64[:,::1], int64[::1], int64[::1])"
)
def plan_selected(
    starts: Ints,
    selected_starts: Ints,
    positions: NDArray[np.int32],
    destinations: Ints,
    chunk_elements: int,
    out_itemsize: int,
    segments: Ints,
    chunks: Ints,
    firsts: Ints,
) -> tuple[int, int]:
    """Find the chunks and segments that contain the selected elements of rows.

    Parameters
    ----------
    starts
        Where each row begins in the stored array, ascending, shape (n_rows,).
    selected_starts, positions
        Where the selected elements of each row begin, shape (n_rows + 1,), and their positions.
    destinations
        Where the values of each row begin, shape (n_rows,).
    chunk_elements, out_itemsize
        Number of elements of a chunk, and size in bytes of an element at the destination.
    segments, chunks, firsts
        Output: segments, chunks, and the first segment of each chunk.

    Returns
    -------
    Number of chunks and of segments.
    """
    n_rows, positions_at = starts.size, address_of(positions)
    starts, selected_starts = pointer_to(starts), pointer_to(selected_starts)
    positions, destinations = pointer_to(positions), pointer_to(destinations)
    segments_at = address_of(segments)
    chunks, firsts = pointer_to(chunks), pointer_to(firsts)
    n_chunks = k = 0
    for i in range(n_rows):
        begin, stop = selected_starts[i], selected_starts[i + 1]
        j = begin
        while j < stop:
            chunk = (starts[i] + positions[j]) // chunk_elements
            end, first = (chunk + 1) * chunk_elements, j
            while j < stop and starts[i] + positions[j] < end:
                j += 1
            if n_chunks == 0 or chunks[n_chunks - 1] != chunk:
                chunks[n_chunks] = chunk
                firsts[n_chunks] = k
                n_chunks += 1
            segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
            segment[fields.FROM] = starts[i] - chunk * chunk_elements
            segment[fields.COUNT] = j - first
            segment[fields.TO] = destinations[i] + (first - begin) * out_itemsize
            segment[fields.WITHIN] = positions_at + first * 4
            k += 1
    return n_chunks, k


@compiled("UniTuple(int64, 2)(CPointer(int64), int64)", inner=True)
def extent(segment: Ints, placing: int) -> Any:
    """Return the first element of a chunk in a segment, and the one after the last."""
    first, n = segment[fields.FROM], segment[fields.COUNT]
    if placing == fields.PICKED:
        positions = elements(segment[fields.WITHIN], np.int32)
        return first + positions[0], first + positions[n - 1] + 1
    return first, first + n


@compiled("void(int64[::1], int64[::1], int64[::1], int64[:,::1], int64, int64)")
def trim(
    offsets: Ints, sizes: Ints, firsts: Ints, segments: Ints, itemsize: int, placing: int
) -> None:
    """Cut uncompressed chunks to their requested elements, in place."""
    segments_at = address_of(segments)
    for c in range(offsets.size):
        if sizes[c] == 0:
            continue
        stop = firsts[c + 1] if c + 1 < offsets.size else len(segments)
        lowest, highest = extent(row_of(segments_at, firsts[c], fields.N_SEGMENT_COLUMNS), placing)
        for k in range(firsts[c], stop):
            first, last = extent(row_of(segments_at, k, fields.N_SEGMENT_COLUMNS), placing)
            lowest, highest = min(lowest, first), max(highest, last)
        for k in range(firsts[c], stop):
            row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)[fields.FROM] -= lowest
        offsets[c] += lowest * itemsize
        sizes[c] = (highest - lowest) * itemsize
