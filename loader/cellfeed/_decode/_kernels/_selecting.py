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
from numba import carray, types
from numpy.typing import NDArray

from cellfeed._compiled import compiled, compiled_callback
from cellfeed._decode._kernels import _fields as fields
from cellfeed._decode._kernels._fields import Ints
from cellfeed._decode._kernels._native import atomic_add, call, copy_bytes, pointer, popcount

# Compiled: sorting the columns of sparse rows.
#
# Columns that are close together are ranked by a bitmap of the columns between the first and the
# last of a row: the slot of a column is the number of set bits below its own. Other rows, and rows
# with repeated columns, are sorted by comparison.

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
    keys: Ints,
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
    copied: NDArray[Any],
    values: int,
) -> None:
    """Move columns, and values at an address, to their slots, using scratch memory."""
    n = columns.size
    for j in range(n):
        copied[j] = columns[j]
    copy_bytes(values, first, n * itemsize)
    for j in range(n):
        columns[slots[j]] = copied[j]
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
    slots, copied = np.empty(longest, np.int32), np.empty(longest, indices.dtype)
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
        _to_slots(columns, first, itemsize, slots, copied, values.ctypes.data)
    # Named after the last use of its address, so that it is not freed before.
    return distinct and values.size >= 0


# A function that places elements takes the address of a chunk's elements; of its segments, their
# number, the row of its array and the report; of `scratch_bytes` of memory; and 1 if the elements
# may be changed in place, else 0. It returns 0, or a failure.
PLACING_SIGNATURE = types.int64(*[types.int64] * 7)

_int64_2d = "int64[:,::1]"


@compiled(*(f"int64({index}[::1], int32[::1])" for index in ("int32", "int64")), inner=True)
def _renumber(indices: NDArray[Any], columns: NDArray[np.int32]) -> int:
    """Renumber indices in place; return -1 if one is out of bounds, else whether they ascend."""
    last, ascending = -1, 1
    for i in range(indices.size):
        if not 0 <= indices[i] < columns.size:
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
    segments = carray(pointer(segments_at), (n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    array = carray(pointer(array_at), (fields.N_ARRAY_COLUMNS,), np.int64)
    report = carray(pointer(report_at), (fields.N_REPORTS,), np.int64)
    columns = carray(pointer(array[fields.COLUMN_MAP]), (array[fields.INDEX_LIMIT],), np.int32)
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
            ascending = _renumber(carray(pointer(target), (n,), np.int32), columns)
        else:
            ascending = _renumber(carray(pointer(target), (n,), np.int64), columns)
        if ascending < 0:
            return fields.BAD_INDEX
        if not ascending:
            report[fields.ASCENDING] = 0
    return 0


@compiled(
    *(f"int64({index}[::1], uint8[::1], int64)" for index in ("uint32", "uint64")), inner=True
)
def _find_selected(indices: NDArray[Any], is_selected: NDArray[np.uint8], positions: int) -> int:
    """Write the positions of selected indices to an address; return their number.

    They are int32. If an index is out of bounds (a negative one counts as large), return -1.
    """
    highest = indices[0]
    for i in range(1, indices.size):
        highest = max(highest, indices[i])
    if highest >= np.uint64(is_selected.size):
        return -1
    out, n = carray(pointer(positions), (indices.size,), np.int32), np.uint64(0)
    for i in range(indices.size):
        out[n] = i  # overwritten by the next one if it is not selected
        n += np.uint64(is_selected[indices[i]])
    return int(n)


@compiled(
    *(
        f"void({index}[::1], int32[::1], int64, int64, int64, int64)"
        for index in ("uint32", "uint64")
    ),
    inner=True,
)
def _list_selected(
    indices: NDArray[Any],
    columns: NDArray[np.int32],
    within: int,
    positions: int,
    listed: int,
    n: int,
) -> None:
    """List at an address what `_find_selected` found; the first index is at ``within``."""
    found = carray(pointer(positions), (n,), np.int32)
    out = carray(pointer(listed), (n,), np.int64)
    for j in range(n):
        i = np.uint64(found[j])
        out[j] = (np.int64(columns[indices[i]]) << 32) | (within + found[j])


@compiled_callback(PLACING_SIGNATURE)
def select(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """List the selected elements of each segment.

    Each segment receives the number of its selected elements in ``COUNT``, and the position of the
    first one in the list in ``TO``.
    ``scratch`` has 8 bytes for each element, and as many for each that is cast.
    """
    segments = carray(pointer(segments_at), (n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    array = carray(pointer(array_at), (fields.N_ARRAY_COLUMNS,), np.int64)
    report = carray(pointer(report_at), (fields.N_REPORTS,), np.int64)
    columns = carray(pointer(array[fields.COLUMN_MAP]), (array[fields.INDEX_LIMIT],), np.int32)
    is_selected = carray(pointer(array[fields.IS_SELECTED]), (array[fields.INDEX_LIMIT],), np.uint8)
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
        narrow = carray(pointer(begin), (n,), np.uint32)
        wide = carray(pointer(begin), (n,), np.uint64)
        is_narrow = array[fields.OUT_ITEMSIZE] == 4
        if is_narrow:
            n_selected = int(_find_selected(narrow, is_selected, scratch))
        else:
            n_selected = int(_find_selected(wide, is_selected, scratch))
        if n_selected < 0:
            return fields.BAD_INDEX
        start = atomic_add(report_at + fields.N_SELECTED * 8, n_selected)
        listed = report[fields.SELECTION] + start * 8
        if is_narrow:
            _list_selected(narrow, columns, within, scratch, listed, n_selected)
        else:
            _list_selected(wide, columns, within, scratch, listed, n_selected)
        segments[k, fields.TO], segments[k, fields.COUNT] = start, n_selected
    return 0


@compiled("boolean(int64, int64, int32[::1], int64[::1])", inner=True)
def _sort_row(start: int, stop: int, columns: NDArray[np.int32], entries: Ints) -> bool:
    """Sort the columns of a row, with their slots; return whether the columns are distinct."""
    n = stop - start
    n_words = n * WORDS_OF_A_COLUMN
    bits, before = np.empty(n_words, np.uint64), np.empty(n_words, np.int32)
    keys, slots = np.empty(n, np.int64), np.empty(n, np.int32)
    own = columns[start:stop].copy()
    distinct = bool(rank(own, bits, before, keys, slots))
    for j in range(n):
        columns[start + slots[j]] = own[j]
        entries[start + j] = (entries[start + j] & ~_LOWER) | slots[j]
    return distinct


@compiled(f"boolean({_int64_2d}, int64[::1], int64[::1], int64[::1], int32[::1], int64[::1])")
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
    distinct, k = True, 0
    while k < len(segments):
        row = rows[k]
        n, last, ascending = starts[row], -1, True
        while k < len(segments) and rows[k] == row:
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
            distinct &= _sort_row(starts[row], n, columns, entries)
    return distinct


@compiled(
    f"Tuple((int64[::1], int64[::1], {_int64_2d}))"
    "(int64[::1], int64[::1], int64[::1], int64[::1], int64)"
)
def plan_selected(
    starts: Ints, entry_starts: Ints, entries: Ints, destinations: Ints, chunk_elements: int
) -> Any:
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
    n_segments = 0
    for i in range(starts.size):
        end = np.int64(0)
        for j in range(entry_starts[i], entry_starts[i + 1]):
            place = starts[i] + (entries[j] >> 32)
            if place >= end:
                end = (place // chunk_elements + 1) * chunk_elements
                n_segments += 1
    segments = np.empty((n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks = np.empty(n_segments, np.int64)
    firsts = np.empty(n_segments, np.int64)
    n_chunks = k = 0
    for i in range(starts.size):
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
            segments[k, fields.WITHIN] = entries.ctypes.data + first * 8
            k += 1
    return chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments


@compiled("void(int64, int64, int64, int64)", inner=True)
def _copy_one(target: int, source: int, k: int, itemsize: int) -> None:
    """Copy one element to the ``k``-th position of the target."""
    if itemsize == 4:
        carray(pointer(target), (k + 1,), np.uint32)[k] = carray(pointer(source), (1,), np.uint32)[
            0
        ]
    else:
        copy_bytes(target + k * itemsize, source, itemsize)


@compiled_callback(PLACING_SIGNATURE)
def scatter(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place the selected values, each in its slot."""
    segments = carray(pointer(segments_at), (n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    array = carray(pointer(array_at), (fields.N_ARRAY_COLUMNS,), np.int64)
    itemsize, out_itemsize = array[fields.ITEMSIZE], array[fields.OUT_ITEMSIZE]
    for k in range(n_segments):
        n, target = segments[k, fields.COUNT], segments[k, fields.TO]
        begin = source + segments[k, fields.FROM] * itemsize
        entries = carray(pointer(segments[k, fields.WITHIN]), (n,), np.int64)
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
    segments = carray(pointer(segments_at), (n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    array = carray(pointer(array_at), (fields.N_ARRAY_COLUMNS,), np.int64)
    itemsize = array[fields.OUT_ITEMSIZE]
    for k in range(n_segments):
        begin, n = (
            source + segments[k, fields.FROM] * array[fields.ITEMSIZE],
            segments[k, fields.COUNT],
        )
        within = segments[k, fields.WITHIN]
        columns = carray(pointer(array[fields.COLUMN_MAP]), (within + n,), np.int32)
        if array[fields.CAST]:
            call(array[fields.CAST], (begin, scratch, n))
            begin = scratch
        row = segments[k, fields.TO] - within * itemsize
        for j in range(n):
            column = np.int64(columns[within + j])
            if column >= 0:
                _copy_one(row, begin + j * itemsize, column, itemsize)
    return 0
