"""Compiled: mapping columns of a source to columns of a collection, leaving some out.

How many elements of a sparse row are selected is known only after its column indices are read. So
indices are decoded first, and each selected element is listed, as its column in the collection and
its position in the stored row (`select`). The list is brought into the order of rows (`gather`).
Values are decoded last, and only selected ones are touched (`plan_selected`, `pick`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled
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
    row_of,
)

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
PLACING_SIGNATURE = f"int64({', '.join(['int64'] * 7)})"


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


@compiled(PLACING_SIGNATURE, callback=True)
def renumber(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place column indices, renumbered to the collection's columns."""
    array = elements(array_at, np.int64)
    report = elements(report_at, np.int64)
    columns, limit = elements(array[fields.COLUMN_MAP], np.int32), array[fields.INDEX_LIMIT]
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        begin, n = source + segment[fields.FROM] * array[fields.ITEMSIZE], segment[fields.COUNT]
        target = segment[fields.TO]
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


@compiled(PLACING_SIGNATURE, callback=True)
def select(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """List the selected elements of each segment.

    Each segment receives the number of its selected elements in ``COUNT``, and the position of the
    first one in the list in ``TO``.
    ``scratch`` has 8 bytes for each element, and as many for each that is cast.
    """
    array = elements(array_at, np.int64)
    report = elements(report_at, np.int64)
    columns, limit = elements(array[fields.COLUMN_MAP], np.int32), array[fields.INDEX_LIMIT]
    is_selected, positions = (
        elements(array[fields.IS_SELECTED], np.uint8),
        elements(scratch, np.int32),
    )
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        begin, n = source + segment[fields.FROM] * array[fields.ITEMSIZE], segment[fields.COUNT]
        within = segment[fields.WITHIN]
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
        segment[fields.TO], segment[fields.COUNT] = start, n_selected
    return 0


@compiled("boolean(int64[:,::1], int64[::1], int64[::1], int64[::1], int32[::1], int32[::1])")
def gather(
    segments: Ints,
    rows: Ints,
    starts: Ints,
    listed: Ints,
    columns: NDArray[np.int32],
    positions: NDArray[np.int32],
) -> bool:
    """Gather the selected elements of each row, in stored order.

    Parameters
    ----------
    segments, rows
        Segments as `select` left them, in row order, and the row of each.
    starts
        Where each row begins, shape (n_rows + 1,).
    listed
        The list of selected elements: columns in the upper 32 bits, positions in the lower ones.
    columns, positions
        Output: column in the collection, and position in the stored row, of each element.

    Returns
    -------
    Whether the columns of each row ascend strictly.
    """
    n_segments, segments_at = len(segments), address_of(segments)
    rows, starts, listed = pointer_to(rows), pointer_to(starts), pointer_to(listed)
    columns, positions, ascending, k = pointer_to(columns), pointer_to(positions), True, 0
    while k < n_segments:
        row = rows[k]
        n, last = starts[row], np.int64(-1)
        while k < n_segments and rows[k] == row:
            segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
            first = segment[fields.TO]
            for j in range(first, first + segment[fields.COUNT]):
                column = listed[j] >> 32
                ascending &= column > last
                last = column
                columns[n] = column
                positions[n] = listed[j] & _LOWER
                n += 1
            k += 1
    return ascending


@compiled("void(int64, int64, int64, int64)", inner=True)
def _copy_one(target: int, source: int, k: int, itemsize: int) -> None:
    """Copy one element to the ``k``-th position of the target."""
    if itemsize == 4:
        elements(target, np.uint32)[k] = elements(source, np.uint32)[0]
    else:
        copy_bytes(target + k * itemsize, source, itemsize)


@compiled(PLACING_SIGNATURE, callback=True)
def pick(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place the selected values contiguously; ``scratch`` has room for those that are cast."""
    array = elements(array_at, np.int64)
    itemsize = array[fields.ITEMSIZE]
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        n, target = segment[fields.COUNT], segment[fields.TO]
        begin = source + segment[fields.FROM] * itemsize
        positions = elements(segment[fields.WITHIN], np.int32)
        picked = scratch if array[fields.CAST] else target
        for j in range(n):
            _copy_one(picked, begin + positions[j] * itemsize, j, itemsize)
        if array[fields.CAST]:
            call(array[fields.CAST], (picked, target, n))
    return 0


@compiled(PLACING_SIGNATURE, callback=True)
def spread(source, segments_at, n_segments, array_at, report_at, scratch, may_change):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Place the elements of dense rows, each in its column of the collection."""
    array = elements(array_at, np.int64)
    itemsize = array[fields.OUT_ITEMSIZE]
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        begin, n = source + segment[fields.FROM] * array[fields.ITEMSIZE], segment[fields.COUNT]
        within = segment[fields.WITHIN]
        columns = elements(array[fields.COLUMN_MAP], np.int32)
        if array[fields.CAST]:
            call(array[fields.CAST], (begin, scratch, n))
            begin = scratch
        row = segment[fields.TO] - within * itemsize
        for j in range(n):
            column = np.int64(columns[within + j])
            if column >= 0:
                _copy_one(row, begin + j * itemsize, column, itemsize)
    return 0
