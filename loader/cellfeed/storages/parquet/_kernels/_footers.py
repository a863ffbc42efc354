"""Compiled: what the footer of a Parquet file says of its columns in each row group.

pyarrow reads footers too, but some of its attributes end the process where an enumeration has a
value that it does not know. Format: `FileMetaData` in the Thrift definitions of
https://github.com/apache/parquet-format, in Thrift's compact protocol.
"""

from typing import Any

import numpy as np
from numba import carray

from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import pointer
from cellfeed.extending import compiled
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._kernels import _thrift as thrift

# Paths of structs and fields.
_GROUP = 4
_COLUMN, _N_ROWS = _GROUP << thrift.DIGIT_BITS | 1, _GROUP << thrift.DIGIT_BITS | 3
_METADATA = _COLUMN << thrift.DIGIT_BITS | 3
_STATISTICS = _METADATA << thrift.DIGIT_BITS | 12
# Of metadata and statistics, the numbers of these fields.
_ENCODINGS, _NULLS, _FORMER_MAX, _MAX = 2, 3, 1, 5

# Where each field of a column's metadata is written.
_FIELDS = (
    -1, -1, -1, -1, fields.CHUNK_CODEC, fields.N_CHUNK_ENTRIES,
    fields.CHUNK_BYTES, fields.STORED_BYTES, -1, fields.DATA_OFFSET, -1, fields.DICTIONARY_OFFSET,
)  # fmt: skip


@compiled("int64(int64, int64, int64[::1], int64[::1], int64[:,:,::1])")
def read_footer(  # noqa: PLR0912 - one for each field
    source: int, n_bytes: int, places: Ints, n_rows: Ints, chunks: Ints
) -> int:
    """Read what a footer says of some columns.

    Parameters
    ----------
    source, n_bytes
        Address of the footer, without its size and the magic number, and its number of bytes.
    places
        Number of each stored column among the wanted ones; -1 if it is not wanted.
    n_rows
        Filled with the number of rows of each row group.
    chunks
        Filled with each wanted column of each row group; -1 where the footer does not say it.

    Returns
    -------
    0; -1 if the footer has other numbers of row groups or columns, or ends within a field.
    """
    data = carray(pointer(source), (n_bytes,), np.uint8)
    unwanted = np.empty(fields.N_CHUNK_FIELDS, np.int64)
    chunk, reader = unwanted, thrift.new_reader()
    n_groups: Any = 0
    n_columns: Any = 0
    thrift.begin(reader, 0)
    while True:
        of_type, path, value = thrift.step(data, reader)
        within, number = path >> thrift.DIGIT_BITS, path & ((1 << thrift.DIGIT_BITS) - 1)
        is_integer = thrift.BYTE < of_type < thrift.DOUBLE
        if of_type < 0:
            return -1
        if of_type == thrift.ENDS:
            if path == 0:
                return 0 if n_groups == n_rows.size else -1
            if path == _GROUP and n_columns != places.size:
                return -1
        elif of_type == thrift.STRUCT and path == _GROUP:
            n_groups, n_columns = n_groups + 1, 0
            if n_groups > n_rows.size:
                return -1
        elif of_type == thrift.STRUCT and path == _COLUMN:
            n_columns += 1
            if n_columns > places.size:
                return -1
            place = places[n_columns - 1]
            chunk = chunks[n_groups - 1, place] if place >= 0 else unwanted
            chunk[:] = -1
            chunk[fields.ENCODINGS] = chunk[fields.MAX_SIZE] = 0
        elif is_integer and path == _N_ROWS:
            n_rows[n_groups - 1] = value
        elif is_integer and within == _METADATA:
            if number == _ENCODINGS:
                known = 0 <= value < fields.MOST_ENCODINGS
                chunk[fields.ENCODINGS] |= 1 << (value if known else fields.MOST_ENCODINGS)
            elif number < len(_FIELDS) and _FIELDS[number] >= 0:
                chunk[_FIELDS[number]] = value
        elif is_integer and within == _STATISTICS and number == _NULLS:
            chunk[fields.N_NULLS] = value
        elif (
            of_type == thrift.BINARY
            and within == _STATISTICS
            and (number == _MAX or (number == _FORMER_MAX and chunk[fields.MAX_IS_SIGNED] != 0))
        ):
            chunk[fields.MAX_BEGIN] = reader[0, thrift.POSITION] - value
            chunk[fields.MAX_SIZE], chunk[fields.MAX_IS_SIGNED] = value, number == _FORMER_MAX
