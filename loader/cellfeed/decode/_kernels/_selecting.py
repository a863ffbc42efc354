"""Compiled: mapping columns of a source to columns of a collection, leaving some out.

How many elements of a sparse row are selected is known only after its column indices are read. So
indices are decoded first, and each selected element is listed, as its column in the collection and
its position in the stored row (`select`). The list is brought into the order of rows (`gather`).
Values are decoded last, and only selected ones are touched (`plan_selected`, `pick`).
"""

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
# The place of a column is the number of smaller ones in a bitmap of all columns of its row. Rows
# with repeated columns are left to NumPy.

_LOWER = (1 << 32) - 1
_MOST_WORDS = 1 << 18  # of a bitmap: 16 million columns


def sort_rows(
    indptr: NDArray[np.int32], indices: NDArray[np.int32], data: NDArray[np.uint8], itemsize: int
) -> bool:
    """Sort the elements of each row by column, in place; equal columns keep their order.

    Parameters
    ----------
    indptr, indices
        CSR rows, int32.
    data, itemsize
        The bytes of the values, and the size of a value in bytes.

    Returns
    -------
    Whether the columns of each row are distinct.
    """
    longest = int(np.diff(indptr).max(initial=0))
    n_words = 2 * (int(indices.max(initial=0)) // 128 + 1)
    if n_words <= _MOST_WORDS:
        scratch = np.empty(12 * n_words + longest * (4 + itemsize), np.uint8)
        if _sort_rows(indptr, indices, data, itemsize, n_words, scratch):
            return True
    rows = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    order = np.lexsort((indices, rows))
    indices[:] = indices[order]
    values = data.reshape(-1, itemsize)
    values[:] = values[order]
    return not bool(((np.diff(indices) == 0) & (np.diff(rows) == 0)).any())


@compiled("boolean(int32[::1], int32[::1], uint8[::1], int64, int64, uint8[::1])")
def _sort_rows(
    indptr: NDArray[np.int32],
    indices: NDArray[np.int32],
    data: NDArray[np.uint8],
    itemsize: int,
    n_words: int,
    scratch: NDArray[np.uint8],
) -> bool:
    """Sort the elements of each row, until one has repeated columns; return whether none has."""
    n_rows, pointers, bits_at = indptr.size - 1, pointer_to(indptr), address_of(scratch)
    copied_at = bits_at + 12 * n_words
    bits, before = elements(bits_at, np.uint64), elements(bits_at + 8 * n_words, np.int32)
    copied = elements(copied_at, np.int32)
    for row in range(n_rows):
        start, n = np.int64(pointers[row]), np.int64(pointers[row + 1] - pointers[row])
        columns, ascending = elements(address_of(indices) + 4 * start, np.int32), True
        for j in range(1, n):
            ascending &= columns[j] > columns[j - 1]
        if ascending:
            continue
        clear_bytes(bits_at, 8 * n_words)
        for j in range(n):
            bits[columns[j] >> 6] |= np.uint64(1) << np.uint64(columns[j] & 63)
        n_bits = 0
        for word in range(n_words):
            before[word] = n_bits
            n_bits += popcount(bits[word])
        if n_bits < n:
            return False
        values, copied_values = address_of(data) + start * itemsize, copied_at + 4 * n
        copy_bytes(copied_at, address_of(columns), 4 * n)
        copy_bytes(copied_values, values, n * itemsize)
        for j in range(n):
            word = copied[j] >> 6
            below = (np.uint64(1) << np.uint64(copied[j] & 63)) - np.uint64(1)
            place = before[word] + popcount(bits[word] & below)
            columns[place] = copied[j]
            _copy_one(values, copied_values + j * itemsize, place, itemsize)
    return True


@compiled("void(int64, int64, int64, int64)", inner=True)
def _copy_one(target: int, source: int, k: int, itemsize: int) -> None:
    """Copy one element to the ``k``-th position of the target."""
    if itemsize == 4:
        elements(target, np.uint32)[k] = elements(source, np.uint32)[0]
    else:
        copy_bytes(target + k * itemsize, source, itemsize)


# A function that places elements takes the address of a chunk's elements; of its segments, their
# number, the row of its array and the report; and of `scratch_bytes` of memory. It returns 0, or a
# failure.
PLACING_SIGNATURE = f"int64({', '.join(['int64'] * 6)})"


@compiled("int64(CPointer(uint32), int64, CPointer(uint8), int64, CPointer(int32))", inner=True)
def _find_selected(
    indices: NDArray[np.uint32],
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


@compiled(PLACING_SIGNATURE, callback=True)
def select(source, segments_at, n_segments, array_at, report_at, scratch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """List the selected elements of each segment.

    Each segment receives the number of its selected elements in ``COUNT``, and the position of the
    first one in the list in ``TO``.
    ``scratch`` has 8 bytes for each element, and as many for each that is cast.
    """
    array = elements(array_at, np.int64)
    report = elements(report_at, np.int64)
    columns, limit = elements(array[fields.COLUMN_MAP], np.int32), array[fields.INDEX_LIMIT]
    is_selected = elements(array[fields.IS_SELECTED], np.uint8)
    positions = elements(scratch, np.int32)
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        begin, n = source + segment[fields.FROM] * array[fields.ITEMSIZE], segment[fields.COUNT]
        within = segment[fields.WITHIN]
        if array[fields.CAST]:
            cast = scratch + n * 8
            call(array[fields.CAST], (begin, cast, n))
            begin = cast
        indices = elements(begin, np.uint32)
        n_selected = _find_selected(indices, n, is_selected, limit, positions)
        if n_selected < 0:
            return fields.BAD_INDEX
        start = atomic_add(report_at + fields.N_SELECTED * 8, n_selected)
        listed = elements(report[fields.SELECTION] + start * 8, np.int64)
        for j in range(n_selected):
            i = np.int64(positions[j])
            listed[j] = (np.int64(columns[indices[i]]) << 32) | (within + i)
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


@compiled(PLACING_SIGNATURE, callback=True)
def pick(source, segments_at, n_segments, array_at, report_at, scratch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
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
def spread(source, segments_at, n_segments, array_at, report_at, scratch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
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
