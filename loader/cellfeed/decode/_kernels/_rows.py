"""Compiled: converting values with row and column numbers to rows."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _codecs as codecs
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import call, pointer


@compiled("int64(int64[::1], int64)", inner=True)
def _find(ids: Ints, wanted: int) -> int:
    """Return the position of a number in an ascending array, -1 if it is not there."""
    first, last = 0, ids.size
    while first < last:
        middle = (first + last) // 2
        if ids[middle] < wanted:
            first = middle + 1
        else:
            last = middle
    return first if first < ids.size and ids[first] == wanted else -1


@compiled("boolean(int64, int64, int64[::1], int64[::1])")
def count_by_row(rows_address: int, n: int, ids: Ints, counts: Ints) -> bool:
    """Add the number of values of each of the ascending ``ids``, out of n values, to ``counts``.

    Returns
    -------
    Whether every value belongs to one of them.
    """
    rows = carray(pointer(rows_address), (n,), np.int64)
    row, previous = -1, np.int64(0)
    for k in range(n):
        if row < 0 or rows[k] != previous:
            previous = rows[k]
            row = _find(ids, previous)
            if row < 0:
                return False
        counts[row] += 1
    return True


@compiled(
    *(
        f"boolean(int64, int64, int64, int64, int64[::1], int64[::1], int32[::1], {bits}[::1])"
        for bits in ("uint8", "uint16", "uint32", "uint64")
    )
)
def scatter_by_row(
    rows_address: int,
    columns_address: int,
    values_address: int,
    n: int,
    ids: Ints,
    ends: Ints,
    indices: NDArray[np.int32],
    data: NDArray[Any],
) -> bool:
    """Append n values, counted by `count_by_row`, to their rows.

    Parameters
    ----------
    rows_address, columns_address, values_address
        Addresses of rows and columns, int64, and of values.
    ids
        Ids of the rows, ascending.
    ends
        Where each row ends so far; updated.
    indices, data
        Indices and data of all rows.

    Returns
    -------
    Whether all columns fit in a non-negative int32.
    """
    rows = carray(pointer(rows_address), (n,), np.int64)
    columns = carray(pointer(columns_address), (n,), np.int64)
    values = carray(pointer(values_address), (n,), data.dtype)
    row, previous, fits = -1, np.int64(0), True
    for k in range(n):
        if row < 0 or rows[k] != previous:
            previous = rows[k]
            row = _find(ids, previous)
        end = ends[row]
        fits &= 0 <= columns[k] < (1 << 31)
        indices[end] = columns[k]
        data[end] = values[k]
        ends[row] = end + 1
    return fits


# Compiled: converting individually compressed rows to sparse or dense rows.
#
# `cellfeed.storages.postgres._packed` describes packed rows.

HEADER_BYTES = 12
_VERSION, _ZSTD = 1, 1
_UNSIGNED = 117  # "u"


@compiled("int64(uint8[::1], int64[::1], int64, int64, int64[::1], boolean[::1])")
def count_packed(
    packed: NDArray[np.uint8],
    starts: Ints,
    itemsize: int,
    n_columns: int,
    counts: Ints,
    is_raw: NDArray[np.bool_],
) -> int:
    """Read the headers of rows, of which row k is ``packed[starts[k] : starts[k + 1]]``.

    Parameters
    ----------
    itemsize, n_columns
        Size in bytes of a value in raw form, and maximum number of values of a row.
    counts, is_raw
        Output: the number of values of each row, and whether they are in raw form.

    Returns
    -------
    The first row with a damaged header, -1 if none.
    """
    for k in range(counts.size):
        first = starts[k]
        if starts[k + 1] - first < HEADER_BYTES:
            return k
        header = packed[first : first + HEADER_BYTES]
        if header[0] != _VERSION or header[1] != _ZSTD:
            return k
        width, index_width = np.int64(header[4]), np.int64(header[2])
        is_raw[k] = header[3] != _UNSIGNED or width == 8
        if is_raw[k]:
            if width != itemsize:
                return k
        elif width not in (1, 2, 4):
            return k
        if index_width not in (0, 1, 2, 4):
            return k
        count = np.int64(0)
        for byte in range(4):
            count |= np.int64(header[8 + byte]) << (8 * byte)
        if count > n_columns or (index_width == 0 and count != n_columns):
            return k
        counts[k] = count
    return -1


@compiled("int64(uint8[::1], int64, int64, int64)", inner=True)
def _joined(planes: NDArray[np.uint8], n: int, width: int, k: int) -> int:
    """Return the number with its bytes at position k of ``width`` planes of ``n`` bytes each."""
    value = np.int64(planes[k])
    for byte in range(1, width):
        value |= np.int64(planes[byte * n + k]) << (8 * byte)
    return int(value)


@compiled(
    "int64(uint8[::1], int64[::1], int64, int64, int64[::1], boolean[::1], int32[::1], "
    "uint32[::1], uint8[::1], int64[::1])"
)
def unpack(
    packed: NDArray[np.uint8],
    starts: Ints,
    itemsize: int,
    n_columns: int,
    indptr: Ints,
    is_raw: NDArray[np.bool_],
    indices: NDArray[np.int32],
    small: NDArray[np.uint32],
    raw: NDArray[np.uint8],
    functions: Ints,
) -> int:
    """Decompress rows whose headers `count_packed` has read.

    Parameters
    ----------
    indptr
        Where the values of each row begin, shape (n_rows + 1,).
    indices
        Output: columns; unchanged for dense rows, whose `indices` is empty.
    small, raw
        Output: values, as small integers, and as bytes of values in raw form; ``raw`` may be empty
        if there are none.
    functions
        Addresses from `function_addresses`.

    Returns
    -------
    The first damaged row, -1 if none.
    """
    most = np.int64(0)
    for k in range(is_raw.size):
        most = max(most, indptr[k + 1] - indptr[k])
    room = np.empty(most * (4 + max(4, itemsize)) + 1, np.uint8)
    context = call(functions[codecs.ZSTD_NEW], ())
    damaged = -1
    for k in range(is_raw.size):
        first, at, n = starts[k], indptr[k], indptr[k + 1] - indptr[k]
        index_width, width = np.int64(packed[first + 2]), np.int64(packed[first + 4])
        size = n * (index_width + width)
        found = call(
            functions[codecs.ZSTD_DECOMPRESS],
            (
                context,
                room.ctypes.data,
                size,
                packed.ctypes.data + first + HEADER_BYTES,
                starts[k + 1] - first - HEADER_BYTES,
            ),
        )
        if found != size or (n > 0 and (index_width == 0) != (indices.size == 0)):
            damaged = k
            break
        column = np.int64(0)
        if index_width:
            for j in range(n):
                column += _joined(room, n, index_width, j)
                indices[at + j] = column
            if n > 0 and column >= n_columns:
                damaged = k
                break
        values = room[n * index_width : size]
        if is_raw[k]:
            for j in range(n):
                for byte in range(width):
                    raw[(at + j) * itemsize + byte] = values[byte * n + j]
        else:
            for j in range(n):
                small[at + j] = _joined(values, n, width, j)
    call(functions[codecs.ZSTD_FREE], (context,))
    return damaged


# Compiled: finding where rows begin in tiles of TileDB, which store the row of each element.
#
# A run is a sequence of elements of one row within one tile. Rows are numbered within a band of
# rows, so that 16 bits suffice.


@compiled("Tuple((int64, int64, int64))(int64[::1], int64, int64, int64, uint16[::1], uint16[::1])")
def find_runs(
    rows: Ints,
    capacity: int,
    first_row: int,
    n_rows: int,
    run_rows: NDArray[np.uint16],
    run_lengths: NDArray[np.uint16],
) -> Any:
    """Find the runs of a band in whole tiles.

    Parameters
    ----------
    rows
        The row of each element.
    capacity
        Number of elements of a tile.
    first_row, n_rows
        The band.
    run_rows, run_lengths
        Output; as long as ``rows``.

    Returns
    -------
    Number of elements of earlier bands before the first run, of elements up to the end of the last
    run, and of runs.
    """
    skipped = 0
    while skipped < rows.size and rows[skipped] < first_row:
        skipped += 1
    i, n = skipped, 0
    while i < rows.size:
        row = rows[i] - first_row
        if not 0 <= row < n_rows:
            break
        stop = min(rows.size, (i // capacity + 1) * capacity, i + fields.MOST_ROWS)
        k = i + 1
        while k < stop and rows[k] == rows[i]:
            k += 1
        run_rows[n], run_lengths[n] = row, k - i
        n += 1
        i = k
    return skipped, i, n


@compiled(
    "int64(uint16[::1], uint16[::1], int64, int32[::1], int64[::1], int64[:,::1])",
)
def find_row_pieces(
    run_rows: NDArray[np.uint16],
    run_lengths: NDArray[np.uint16],
    first: int,
    places: NDArray[np.int32],
    lengths: Ints,
    pieces: Ints,
) -> int:
    """List the runs of some rows of a band.

    Parameters
    ----------
    run_rows, run_lengths
        As `find_runs` found them.
    first
        Number of the first element of the first run.
    places
        Number of each row of the band among the requested rows, -1 for other rows.
    lengths
        Number of elements of each requested row; added to.
    pieces
        Output; as many rows as there are runs.

    Returns
    -------
    Number of pieces.
    """
    n, element = 0, np.int64(first)
    for k in range(run_rows.size):
        place, length = places[run_rows[k]], np.int64(run_lengths[k])
        if place >= 0:
            pieces[n, fields.ROW] = place
            pieces[n, fields.FIRST] = element
            pieces[n, fields.N_ELEMENTS] = length
            pieces[n, fields.BEFORE] = lengths[place]
            lengths[place] += length
            n += 1
        element += length
    return n
