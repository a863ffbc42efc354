"""Compiled: mapping columns of a source to columns of a collection, leaving some out.

How many elements of a sparse row are selected is known only after its column indices are read. So
indices are decoded first, and each selected element is listed, as its column in the collection and
its position in the stored row (`select`). This list determines the columns of each row, and the
slot among them of each element (`gather`). Values are decoded last, and only selected ones are
touched (`plan_selected`, `scatter`).

Two int32 are packed into one int64: the first is its upper half.
"""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from cellfeed._compiled import Purpose, compiled, compiled_callback
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    address_of,
    atomic_add,
    call,
    clear_bytes,
    copy_bytes,
    elements,
    pointer_to,
    popcount,
)
from cellfeed.decode._kernels._planning import segment_table

PURPOSE = Purpose("selected genes, or genes in another order", 3)

# Compiled: sorting the columns of sparse rows.
#
# Columns that are close together are ranked by a bitmap of the columns between the first and the
# last of a row: the slot of a column is the number of set bits below its own. Other rows, and rows
# with repeated columns, are sorted by comparison.

_LOWER = (1 << 32) - 1
WORDS_OF_A_COLUMN = 4
"""Maximum number of bitmap words per column of a row for ranking by bitmap."""


@compiled(
    *(f"boolean(CPointer({index}), int64, int64, int64)" for index in ("int32", "int64")),
    inner=True,
)
def _by_bits(columns: NDArray[Any], n: int, slots_at: int, scratch: int) -> bool:
    """Find slots as `_rank` does; return False if columns repeat, or are too far apart."""
    low = high = np.int64(columns[0])
    for j in range(1, n):
        low, high = min(low, np.int64(columns[j])), max(high, np.int64(columns[j]))
    first = low >> 6
    n_words = (high >> 6) - first + 1
    if n_words > WORDS_OF_A_COLUMN * n:
        return False
    bits, slots = elements(scratch, np.uint64), elements(slots_at, np.int32)
    before = elements(scratch + 8 * n_words, np.int32)
    clear_bytes(scratch, 8 * n_words)
    for j in range(n):
        bits[(columns[j] >> 6) - first] |= np.uint64(1) << np.uint64(columns[j] & 63)
    n_bits = 0
    for word in range(n_words):
        before[word] = n_bits
        n_bits += popcount(bits[word])
    if n_bits < n:
        return False
    for j in range(n):
        word = (columns[j] >> 6) - first
        below = (np.uint64(1) << np.uint64(columns[j] & 63)) - np.uint64(1)
        slots[j] = before[word] + popcount(bits[word] & below)
    return True


@compiled("int64(int64, int64, int64)", inner=True)
def _sort(keys_at: int, other_at: int, n: int) -> int:
    """Sort integers by merging ever longer sorted runs; return which of two addresses has them.

    (NumPy's sort takes numba two seconds to compile.)
    """
    length = 1
    while length < n:
        keys, merged = elements(keys_at, np.int64), elements(other_at, np.int64)
        for first in range(0, n, 2 * length):
            i, middle = first, min(first + length, n)
            j, stop = middle, min(first + 2 * length, n)
            for k in range(first, stop):
                if j >= stop or (i < middle and keys[i] <= keys[j]):
                    merged[k] = keys[i]
                    i += 1
                else:
                    merged[k] = keys[j]
                    j += 1
        keys_at, other_at = other_at, keys_at
        length *= 2
    return keys_at


SORTING_BYTES = 12 * WORDS_OF_A_COLUMN
"""Bytes of scratch memory that ranking a row takes for each of its columns."""


@compiled(
    *(f"boolean(CPointer({index}), int64, int64, int64)" for index in ("int32", "int64")),
    inner=True,
)
def _rank(columns: NDArray[Any], n: int, slots_at: int, scratch: int) -> bool:
    """Find the slot of each column of a row among all of them; equal columns keep their order.

    Parameters
    ----------
    columns, n
        At least one.
    slots_at
        Address of an int32 for each column, which becomes its slot.
    scratch
        Address of `SORTING_BYTES` per column.

    Returns
    -------
    Whether the columns are distinct.
    """
    if _by_bits(columns, n, slots_at, scratch):
        return True
    keys, slots = elements(scratch, np.int64), elements(slots_at, np.int32)
    for j in range(n):
        keys[j] = (np.int64(columns[j]) << 32) | j
    keys, distinct = elements(_sort(scratch, scratch + 8 * n, n), np.int64), True
    for j in range(n):
        slots[keys[j] & _LOWER] = j
        distinct &= j == 0 or keys[j] >> 32 != keys[j - 1] >> 32
    return distinct


@compiled(
    *(
        f"void(CPointer({index}), int64, int64, int64, int64, int64)"
        for index in ("int32", "int64")
    ),
    inner=True,
)
def _to_slots(
    columns: NDArray[Any], n: int, first: int, itemsize: int, slots_at: int, scratch: int
) -> None:
    """Move columns, and values at an address, to their slots, using scratch memory."""
    slots = elements(slots_at, np.int32)
    values, copied = scratch + 8 * n, elements(scratch, np.int64)
    for j in range(n):
        copied[j] = columns[j]
    copy_bytes(values, first, n * itemsize)
    for j in range(n):
        columns[slots[j]] = copied[j]
    if itemsize == 4:
        target, source = elements(first, np.uint32), elements(values, np.uint32)
        for j in range(n):
            target[slots[j]] = source[j]
        return
    for j in range(n):
        copy_bytes(first + slots[j] * itemsize, values + j * itemsize, itemsize)


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
    longest = int(np.diff(indptr).max(initial=0))
    scratch = np.empty(8 + longest * (4 + SORTING_BYTES + itemsize), np.uint8)
    return bool(_sort_rows(indptr, indices, data, itemsize, longest, scratch))


@compiled(
    *(
        f"boolean({index}[::1], {index}[::1], uint8[::1], int64, int64, uint8[::1])"
        for index in ("int32", "int64")
    )
)
def _sort_rows(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[np.uint8],
    itemsize: int,
    longest: int,
    scratch: NDArray[np.uint8],
) -> bool:
    """Do what `sort_rows` does; ``longest`` is the number of elements of the longest row."""
    n_rows, values, slots = indptr.size - 1, address_of(data), address_of(scratch)
    room, index_itemsize = slots + (4 * longest + 7) // 8 * 8, indices.itemsize
    pointers, distinct = pointer_to(indptr), True
    for row in range(n_rows):
        start, n = np.int64(pointers[row]), np.int64(pointers[row + 1] - pointers[row])
        columns = elements(address_of(indices) + start * index_itemsize, indices.dtype)
        ascending = True
        for j in range(1, n):
            ascending &= columns[j] > columns[j - 1]
        if not ascending:
            distinct &= _rank(columns, n, slots, room)
            _to_slots(columns, n, values + start * itemsize, itemsize, slots, room)
    return distinct


# A function that places elements takes the address of a chunk's elements; of its segments, their
# number, the row of its array and the report; of `scratch_bytes` of memory; and 1 if the elements
# may be changed in place, else 0. It returns 0, or a failure.
PLACING_SIGNATURE = types.int64(*[types.int64] * 7)


@compiled(
    *(f"int64(CPointer({index}), int64, CPointer(int32), int64)" for index in ("int32", "int64")),
    inner=True,
)
def _renumber(indices: NDArray[Any], n: int, columns: NDArray[np.int32], limit: int) -> int:
    """Renumber indices in place; return -1 if one is out of bounds, else whether they ascend."""
    last, ascending = -1, 1
    for i in range(n):
        if not 0 <= indices[i] < limit:
            return -1
        column = columns[indices[i]]
        if column < 0:
            return -1
        ascending &= column > last
        last = column
        indices[i] = column
    return ascending


@compiled_callback(PLACING_SIGNATURE)
def renumber(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place column indices, renumbered to the collection's columns."""
    segments, array = segment_table(segments_at), elements(array_at, np.int64)
    report = elements(report_at, np.int64)
    columns, limit = elements(array[fields.COLUMN_MAP], np.int32), array[fields.INDEX_LIMIT]
    for k in range(n_segments):
        begin, n = (
            source + segments[k, fields.FROM] * array[fields.ITEMSIZE],
            segments[k, fields.COUNT],
        )
        target = segments[k, fields.TO]
        if array[fields.CAST]:
            call(array[fields.CAST], (begin, target, n))
        else:
            copy_bytes(target, begin, n * array[fields.ITEMSIZE])
        if array[fields.OUT_ITEMSIZE] == 4:
            ascending = _renumber(elements(target, np.int32), n, columns, limit)
        else:
            ascending = _renumber(elements(target, np.int64), n, columns, limit)
        if ascending < 0:
            return fields.BAD_INDEX
        if not ascending:
            report[fields.ASCENDING] = 0
    return 0


@compiled(
    *(
        f"int64(CPointer({index}), int64, CPointer(uint8), int64, CPointer(int32))"
        for index in ("uint32", "uint64")
    ),
    inner=True,
)
def _find_selected(
    indices: NDArray[Any],
    n: int,
    is_selected: NDArray[np.uint8],
    limit: int,
    positions: NDArray[np.int32],
) -> int:
    """Write the positions of selected indices; return their number.

    If an index is out of bounds (a negative one counts as large), return -1.
    """
    highest = indices[0]
    for i in range(1, n):
        highest = max(highest, indices[i])
    if highest >= np.uint64(limit):
        return -1
    n_selected = 0
    for i in range(n):
        positions[n_selected] = i  # overwritten by the next one if it is not selected
        n_selected += is_selected[indices[i]]
    return n_selected


@compiled(
    *(
        f"void(CPointer({index}), CPointer(int32), int64, CPointer(int32), CPointer(int64), int64)"
        for index in ("uint32", "uint64")
    ),
    inner=True,
)
def _list_selected(
    indices: NDArray[Any],
    columns: NDArray[np.int32],
    within: int,
    positions: NDArray[np.int32],
    listed: Ints,
    n: int,
) -> None:
    """List what `_find_selected` found; the first index is at ``within``."""
    for j in range(n):
        i = np.int64(positions[j])
        listed[j] = (np.int64(columns[indices[i]]) << 32) | (within + i)


@compiled_callback(PLACING_SIGNATURE)
def select(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """List the selected elements of each segment.

    Each segment receives the number of its selected elements in ``COUNT``, and the position of the
    first one in the list in ``TO``.
    ``scratch`` has 8 bytes for each element, and as many for each that is cast.
    """
    segments, array = segment_table(segments_at), elements(array_at, np.int64)
    report = elements(report_at, np.int64)
    columns, limit = elements(array[fields.COLUMN_MAP], np.int32), array[fields.INDEX_LIMIT]
    is_selected, positions = (
        elements(array[fields.IS_SELECTED], np.uint8),
        elements(scratch, np.int32),
    )
    for k in range(n_segments):
        begin, n = (
            source + segments[k, fields.FROM] * array[fields.ITEMSIZE],
            segments[k, fields.COUNT],
        )
        within = segments[k, fields.WITHIN]
        if array[fields.CAST]:
            cast = scratch + n * 8
            call(array[fields.CAST], (begin, cast, n))
            begin = cast
        narrow, wide = elements(begin, np.uint32), elements(begin, np.uint64)
        is_narrow = array[fields.OUT_ITEMSIZE] == 4
        if is_narrow:
            n_selected = _find_selected(narrow, n, is_selected, limit, positions)
        else:
            n_selected = _find_selected(wide, n, is_selected, limit, positions)
        if n_selected < 0:
            return fields.BAD_INDEX
        start = atomic_add(report_at + fields.N_SELECTED * 8, n_selected)
        listed = elements(report[fields.SELECTION] + start * 8, np.int64)
        if is_narrow:
            _list_selected(narrow, columns, within, positions, listed, n_selected)
        else:
            _list_selected(wide, columns, within, positions, listed, n_selected)
        segments[k, fields.TO], segments[k, fields.COUNT] = start, n_selected
    return 0


@compiled("boolean(int64, CPointer(int32), CPointer(int64), int64)", inner=True)
def _sort_row(n: int, columns: NDArray[np.int32], entries: Ints, scratch: int) -> bool:
    """Sort the columns of a row, with their slots; return whether the columns are distinct."""
    own, slots = elements(scratch, np.int32), elements(scratch + 4 * n, np.int32)
    copy_bytes(scratch, address_of(columns), 4 * n)
    distinct = bool(_rank(own, n, address_of(slots), scratch + 8 * n))
    for j in range(n):
        columns[slots[j]] = own[j]
        entries[j] = (entries[j] & ~_LOWER) | slots[j]
    return distinct


def gather(
    segments: Ints,
    rows: Ints,
    starts: Ints,
    listed: Ints,
    columns: NDArray[np.int32],
    entries: Ints,
) -> bool:
    """Gather the selected elements of each row.

    Parameters
    ----------
    segments, rows
        Segments as `select` left them, in row order, and the row of each.
    starts
        Where each row begins, shape (n_rows + 1,).
    listed
        The list of selected elements.
    columns
        Output: the columns of each row, ascending.
    entries
        Output, in stored order: for each element, its position in the stored row and its slot among
        ``columns``.

    Returns
    -------
    Whether the columns of every row are distinct.
    """
    longest = int(np.diff(starts).max(initial=0))
    scratch = np.empty(longest * (8 + SORTING_BYTES), np.uint8)
    return bool(_gather(segments, rows, starts, listed, columns, entries, scratch))


@compiled(
    "boolean(int64[:,::1], int64[::1], int64[::1], int64[::1], int32[::1], int64[::1], uint8[::1])"
)
def _gather(
    segments: Ints,
    rows: Ints,
    starts: Ints,
    listed: Ints,
    columns: NDArray[np.int32],
    entries: Ints,
    scratch: NDArray[np.uint8],
) -> bool:
    """Do what `gather` does, with memory for sorting its longest row."""
    n_segments, columns_at, entries_at = len(segments), address_of(columns), address_of(entries)
    segments, rows = segment_table(address_of(segments)), pointer_to(rows)
    starts, listed = pointer_to(starts), pointer_to(listed)
    columns, entries, scratch_at = pointer_to(columns), pointer_to(entries), address_of(scratch)
    distinct, k = True, 0
    while k < n_segments:
        row = rows[k]
        n, last, ascending = starts[row], -1, True
        while k < n_segments and rows[k] == row:
            first = segments[k, fields.TO]
            for j in range(first, first + segments[k, fields.COUNT]):
                column = listed[j] >> 32
                ascending &= column > last
                last = column
                columns[n] = column
                entries[n] = ((listed[j] & _LOWER) << 32) | (n - starts[row])
                n += 1
            k += 1
        if not ascending:
            start = starts[row]
            own, own_entries = (
                elements(columns_at + 4 * start, np.int32),
                elements(entries_at + 8 * start, np.int64),
            )
            distinct &= _sort_row(n - start, own, own_entries, scratch_at)
    return distinct


def plan_selected(
    starts: Ints, entry_starts: Ints, entries: Ints, destinations: Ints, chunk_elements: int
) -> tuple[Ints, Ints, Ints]:
    """Return the chunks and segments that contain the selected elements of rows; see `plan_flat`.

    Parameters
    ----------
    starts
        Where each row begins in the stored array, ascending, shape (n_rows,).
    entry_starts
        Where the entries of each row begin, shape (n_rows + 1,).
    entries
        See `gather`.
    destinations
        Where the values of each row begin, shape (n_rows,).
    chunk_elements
        Number of elements of a chunk.
    """
    n_segments = _count_selected(starts, entry_starts, entries, chunk_elements)
    segments = np.empty((n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts = np.empty((2, n_segments), np.int64)
    n_chunks = _plan_selected(
        starts, entry_starts, entries, destinations, chunk_elements, segments, chunks, firsts
    )
    return chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments


@compiled("int64(int64[::1], int64[::1], int64[::1], int64)")
def _count_selected(starts: Ints, entry_starts: Ints, entries: Ints, chunk_elements: int) -> int:
    """Return the number of segments of `plan_selected`."""
    n_rows, n_segments = starts.size, 0
    starts, entry_starts = pointer_to(starts), pointer_to(entry_starts)
    entries = pointer_to(entries)
    for i in range(n_rows):
        end = np.int64(0)
        for j in range(entry_starts[i], entry_starts[i + 1]):
            place = starts[i] + (entries[j] >> 32)
            if place >= end:
                end = (place // chunk_elements + 1) * chunk_elements
                n_segments += 1
    return n_segments


@compiled(
    "int64(int64[::1], int64[::1], int64[::1], int64[::1], int64, int64[:,::1], int64[::1], "
    "int64[::1])"
)
def _plan_selected(
    starts: Ints,
    entry_starts: Ints,
    entries: Ints,
    destinations: Ints,
    chunk_elements: int,
    segments: Ints,
    chunks: Ints,
    firsts: Ints,
) -> int:
    """Fill the arrays of `plan_selected`; return the number of chunks."""
    n_rows, entries_at = starts.size, address_of(entries)
    starts, entry_starts = pointer_to(starts), pointer_to(entry_starts)
    entries, destinations = pointer_to(entries), pointer_to(destinations)
    segments = segment_table(address_of(segments))
    chunks, firsts = pointer_to(chunks), pointer_to(firsts)
    n_chunks = k = 0
    for i in range(n_rows):
        j, stop = entry_starts[i], entry_starts[i + 1]
        while j < stop:
            chunk = (starts[i] + (entries[j] >> 32)) // chunk_elements
            end, first = (chunk + 1) * chunk_elements, j
            while j < stop and starts[i] + (entries[j] >> 32) < end:
                j += 1
            if n_chunks == 0 or chunks[n_chunks - 1] != chunk:
                chunks[n_chunks] = chunk
                firsts[n_chunks] = k
                n_chunks += 1
            segments[k, fields.FROM] = starts[i] - chunk * chunk_elements
            segments[k, fields.COUNT] = j - first
            segments[k, fields.TO] = destinations[i]
            segments[k, fields.WITHIN] = entries_at + first * 8
            k += 1
    return n_chunks


@compiled("void(int64, int64, int64, int64)", inner=True)
def _copy_one(target: int, source: int, k: int, itemsize: int) -> None:
    """Copy one element to the ``k``-th position of the target."""
    if itemsize == 4:
        elements(target, np.uint32)[k] = elements(source, np.uint32)[0]
    else:
        copy_bytes(target + k * itemsize, source, itemsize)


@compiled_callback(PLACING_SIGNATURE)
def scatter(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place the selected values, each in its slot."""
    segments, array = segment_table(segments_at), elements(array_at, np.int64)
    itemsize, out_itemsize = array[fields.ITEMSIZE], array[fields.OUT_ITEMSIZE]
    for k in range(n_segments):
        n, target = segments[k, fields.COUNT], segments[k, fields.TO]
        begin = source + segments[k, fields.FROM] * itemsize
        entries = elements(segments[k, fields.WITHIN], np.int64)
        for j in range(n):
            value, slot = begin + (entries[j] >> 32) * itemsize, entries[j] & _LOWER
            if array[fields.CAST]:
                call(array[fields.CAST], (value, target + slot * out_itemsize, 1))
            else:
                _copy_one(target, value, slot, itemsize)
    return 0


@compiled_callback(PLACING_SIGNATURE)
def spread(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place the elements of dense rows, each in its column of the collection."""
    segments, array = segment_table(segments_at), elements(array_at, np.int64)
    itemsize = array[fields.OUT_ITEMSIZE]
    for k in range(n_segments):
        begin, n = (
            source + segments[k, fields.FROM] * array[fields.ITEMSIZE],
            segments[k, fields.COUNT],
        )
        within = segments[k, fields.WITHIN]
        columns = elements(array[fields.COLUMN_MAP], np.int32)
        if array[fields.CAST]:
            call(array[fields.CAST], (begin, scratch, n))
            begin = scratch
        row = segments[k, fields.TO] - within * itemsize
        for j in range(n):
            column = np.int64(columns[within + j])
            if column >= 0:
                _copy_one(row, begin + j * itemsize, column, itemsize)
    return 0
