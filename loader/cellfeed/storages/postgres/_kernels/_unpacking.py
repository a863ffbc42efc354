"""Compiled: unpacking rows that are compressed one by one; `_packed` describes them."""

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode._kernels import _codecs as codecs
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import call
from cellfeed.extending import compiled

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
