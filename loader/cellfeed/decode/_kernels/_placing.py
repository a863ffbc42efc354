"""Compiled: finding the chunks of requested elements; copying or casting these to destinations."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    BLOCK_BYTES,
    address_of,
    call,
    clear_bytes,
    copy_bytes,
    elements,
    finish_streams,
    pointer_to,
    prefetch,
    row_of,
    stream_blocks,
)
from cellfeed.decode._kernels._selecting import (
    PLACING_SIGNATURE,
    pick,
    select,
    spread,
)

# Functions that plan fill arrays that `cellfeed.decode._array` allocates: that compiled code
# allocates nothing halves the time to compile it. They return how many chunks and segments there
# are.


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


# Placing the elements of chunks.

_UNSORTED, _OUT_OF_BOUNDS = range(1, 3)
_LEAST_STREAMED = 1 << 10  # bytes; the unaligned ends are copied normally
_PAGE = 1 << 12
_TILE_BYTES = 24 << 10  # of a dense matrix; they fit in the L1 cache
_SPARSE = 16  # elements per placed one from which clearing only placed ones is faster


@compiled("int64(CPointer(int32), int64, int64)", inner=True)
def _check_indices(indices: NDArray[np.int32], n: int, limit: int) -> int:
    """Return 0 if indices ascend strictly within [0, limit), otherwise the kind of error."""
    if n == 0:
        return 0
    descents, lowest, highest = 0, indices[0], indices[0]
    for i in range(1, n):
        descents += indices[i] <= indices[i - 1]
        lowest = min(lowest, indices[i])
        highest = max(highest, indices[i])
    if lowest < 0 or highest >= limit:
        return _OUT_OF_BOUNDS
    return _UNSORTED if descents else 0


@compiled("int64(CPointer(int32), int64, int64, CPointer(int32))", inner=True)
def _renumber(indices: NDArray[np.int32], n: int, limit: int, columns: NDArray[np.int32]) -> int:
    """Renumber indices in place; return what `_check_indices` returns of the new ones."""
    last, descents = -1, 0
    for i in range(n):
        if not 0 <= indices[i] < limit:
            return _OUT_OF_BOUNDS
        column = columns[indices[i]]
        if column < 0:
            return _OUT_OF_BOUNDS
        descents += column <= last
        last = column
        indices[i] = column
    return _UNSORTED if descents else 0


@compiled("void(int64, int64, int64)", inner=True)
def _stream_bytes(target: int, source: int, n: int) -> None:
    """Copy bytes, bypassing the cache; see `finish_streams`."""
    if n < _LEAST_STREAMED:
        copy_bytes(target, source, n)
        return
    head = -target % BLOCK_BYTES
    n_blocks = (n - head) // BLOCK_BYTES
    tail = head + n_blocks * BLOCK_BYTES
    copy_bytes(target, source, head)
    stream_blocks(target + head, source + head, n_blocks)
    copy_bytes(target + tail, source + tail, n - tail)


@compiled("void(int64, int64, CPointer(int64))", inner=True)
def _look_up_pages(segments_at: int, n_segments: int, array: Ints) -> None:
    """Look up the pages of streamed segments at once, instead of each when it is written to."""
    if not array[fields.STREAMED]:
        return
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        target = segment[fields.TO]
        for page in range(0, segment[fields.COUNT] * array[fields.OUT_ITEMSIZE], _PAGE):
            prefetch(target + page)


@compiled(PLACING_SIGNATURE, callback=True)
def _copy(source, segments_at, n_segments, array_at, report_at, scratch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Copy or cast elements of a chunk contiguously; indices are checked, values transformed."""
    array = elements(array_at, np.int64)
    report = elements(report_at, np.int64)
    columns, limit, steps = array[fields.COLUMN_MAP], array[fields.INDEX_LIMIT], array[fields.STEPS]
    _look_up_pages(segments_at, n_segments, array)
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        begin = source + segment[fields.FROM] * array[fields.ITEMSIZE]
        n, target = segment[fields.COUNT], segment[fields.TO]
        changed = scratch if array[fields.STREAMED] else target
        if array[fields.CAST]:
            call(array[fields.CAST], (begin, changed, n))
            begin = changed
        elif columns or steps:
            copy_bytes(changed, begin, n * array[fields.ITEMSIZE])
            begin = changed
        if limit >= 0:
            indices = elements(begin, np.int32)
            if columns:
                problem = _renumber(indices, n, limit, elements(columns, np.int32))
            else:
                problem = _check_indices(indices, n, limit)
            if problem == _OUT_OF_BOUNDS:
                return fields.BAD_INDEX
            if problem == _UNSORTED:
                report[fields.ASCENDING] = 0
        if steps:
            call(elements(steps, np.int64)[fields.APPLY], (begin, n, steps))
        if array[fields.STREAMED]:
            _stream_bytes(target, begin, n * array[fields.OUT_ITEMSIZE])
        elif begin != target:
            copy_bytes(target, begin, n * array[fields.ITEMSIZE])
    return 0


_PLACERS = {
    fields.COPIED: _copy,
    fields.SELECTED: select,
    fields.PICKED: pick,
    fields.SPREAD: spread,
}


def placer(placing: int) -> int:
    """Return the address of the function that places elements in one of the ways."""
    return int(_PLACERS[placing].address)


def place(source: int, segments: Ints, array: Ints, report: Ints, scratch: int) -> None:
    """Place elements that are already in memory, as `decode` does for chunks."""
    _place(placer(int(array[fields.PLACING])), source, segments, array, report, scratch)


@compiled("void(int64, int64, int64[:,::1], int64[::1], int64[::1], int64)")
def _place(
    function: int, source: int, segments: Ints, array: Ints, report: Ints, scratch: int
) -> None:
    own, n_own, reported = address_of(segments), len(segments), address_of(report)
    failure = call(function, (source, own, n_own, address_of(array), reported, scratch))
    pointer_to(report)[fields.FAILURE] = failure
    finish_streams()


@compiled("boolean(int64[::1])")
def crossings_ascend(crossings: Ints) -> bool:
    """Return whether the index at each address is larger than the one before it in memory."""
    at = pointer_to(crossings)
    for i in range(crossings.size):
        indices = elements(at[i] - 4, np.int32)
        if indices[1] <= indices[0]:
            return False
    return True


def densify(
    pointers: NDArray[Any], indices: NDArray[Any], data: NDArray[Any], dense: NDArray[Any]
) -> None:
    """Fill ``dense`` from CSR rows with ascending columns; values are treated as plain bits."""
    size = _TILE_BYTES // dense.itemsize
    tile, places = np.zeros(size, dense.dtype), np.empty(size, np.int32)
    _densify(pointers, indices, data, dense, tile, places)


@compiled(
    *(
        f"void(int32[::1], int32[::1], {value}[::1], {value}[:,::1], {value}[::1], int32[::1])"
        for value in ("uint8", "uint16", "uint32", "uint64")
    )
)
def _densify(
    pointers: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[Any],
    dense: NDArray[Any],
    tile: NDArray[Any],
    places: NDArray[np.int32],
) -> None:
    """Assemble ``dense`` in tiles in the L1 cache, and write these in whole cache lines.

    In a sparse tile, only the placed elements are reset to zero. (Indices are unsigned, so that
    numba does not check for negative ones. With pointers in place of arrays, this loop is a tenth
    slower.)
    """
    n_vars, n_elements, size, itemsize = dense.shape[1], dense.size, tile.size, dense.itemsize
    row, k = 0, np.int64(pointers[0])
    for first in range(0, n_elements, size):
        n, n_placed = min(size, n_elements - first), np.int64(0)
        while row < len(dense):
            start, stop = row * n_vars - first, np.int64(pointers[row + 1])
            while k < stop:
                place = np.uint64(start + np.int64(indices[np.uint64(k)]))
                if place >= np.uint64(n):
                    break
                tile[place] = data[np.uint64(k)]
                places[np.uint64(n_placed)] = place
                n_placed += 1
                k += 1
            if start + n_vars > n:
                break
            row += 1
        _stream_bytes(address_of(dense) + first * itemsize, address_of(tile), n * itemsize)
        if n_placed > n // _SPARSE:
            clear_bytes(address_of(tile), n * itemsize)
        else:
            for i in range(n_placed):
                tile[np.uint64(places[np.uint64(i)])] = 0
    finish_streams()


@compiled("void(int64[::1], int64[::1], int64[::1])")
def copy_all(sources: Ints, targets: Ints, sizes: Ints) -> None:
    """Copy pieces of memory, given by addresses and sizes in bytes."""
    n = sizes.size
    sources, targets, sizes = pointer_to(sources), pointer_to(targets), pointer_to(sizes)
    for i in range(n):
        copy_bytes(targets[i], sources[i], sizes[i])
