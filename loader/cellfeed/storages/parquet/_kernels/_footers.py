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
from cellfeed.extending import Purpose, compiled
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._kernels import _thrift as thrift
from cellfeed.storages.parquet._kernels._thrift import (
    Bytes,
    field,
    integer,
    list_header,
    skip,
    varint,
)

PURPOSE = Purpose("footers of Parquet files", 3)

# Where each field of a column's metadata is written.
_METADATA = (
    -1, -1, -1, -1, fields.CHUNK_CODEC, fields.N_CHUNK_ENTRIES,
    fields.CHUNK_BYTES, fields.STORED_BYTES, -1, fields.DATA_OFFSET, -1, fields.DICTIONARY_OFFSET,
)  # fmt: skip


@compiled("int64(uint8[::1], int64, int64[::1], int64[:,::1])", inner=True)
def _read_statistics(data: Bytes, i: int, chunk: Ints, stack: Ints) -> int:
    number: Any = 0
    while True:
        of_type, number, i = field(data, i, number)
        if i < 0 or of_type == 0:
            return i
        if number == 3 and thrift.BYTE < of_type < thrift.DOUBLE:
            chunk[fields.N_NULLS], i = integer(data, i)
        elif number in (1, 5) and of_type == thrift.BINARY:  # its former name, and the present one
            n, at = varint(data, i, data.size)
            if number == 5 or chunk[fields.MAX_IS_SIGNED] != 0:
                chunk[fields.MAX_BEGIN], chunk[fields.MAX_SIZE] = at, n
                chunk[fields.MAX_IS_SIGNED] = number == 1
            i = skip(data, i, of_type, stack)
        else:
            i = skip(data, i, of_type, stack)


@compiled("int64(uint8[::1], int64, int64[::1], int64[:,::1])", inner=True)
def _read_metadata(data: Bytes, i: int, chunk: Ints, stack: Ints) -> int:
    """Read the metadata of a column in a row group; return where they end."""
    number: Any = 0
    while True:
        of_type, number, i = field(data, i, number)
        if i < 0 or of_type == 0:
            return i
        if number == 2 and of_type == thrift.LIST:
            _, n, i = list_header(data, i)
            for _ in range(n):
                if i < 0:
                    return -1
                encoding, i = integer(data, i)
                known = 0 <= encoding < fields.MOST_ENCODINGS
                chunk[fields.ENCODINGS] |= 1 << (encoding if known else fields.MOST_ENCODINGS)
        elif number == 12 and of_type == thrift.STRUCT:
            i = _read_statistics(data, i, chunk, stack)
        elif thrift.BYTE < of_type < thrift.DOUBLE and 0 <= number < len(_METADATA):
            value, i = integer(data, i)
            if _METADATA[number] >= 0:
                chunk[_METADATA[number]] = value
        else:
            i = skip(data, i, of_type, stack)


@compiled("int64(uint8[::1], int64, int64[::1], int64[:,::1])", inner=True)
def _read_chunk(data: Bytes, i: int, chunk: Ints, stack: Ints) -> int:
    number: Any = 0
    chunk[:] = -1
    chunk[fields.ENCODINGS] = chunk[fields.MAX_SIZE] = 0
    while True:
        of_type, number, i = field(data, i, number)
        if i < 0 or of_type == 0:
            return i
        if number == 3 and of_type == thrift.STRUCT:
            i = _read_metadata(data, i, chunk, stack)
        else:
            i = skip(data, i, of_type, stack)


@compiled(
    "Tuple((int64, int64))(uint8[::1], int64, int64[::1], int64[:,::1], int64[:,::1])", inner=True
)
def _read_group(data: Bytes, i: int, places: Ints, chunks: Ints, stack: Ints) -> Any:
    """Read a row group; return its number of rows, and where it ends."""
    unwanted = np.empty(fields.N_CHUNK_FIELDS, np.int64)
    n_rows: Any = -1
    number: Any = 0
    n_columns: Any = 0
    while True:
        of_type, number, i = field(data, i, number)
        if i < 0 or of_type == 0:
            return n_rows, i if n_columns == places.size else -1
        if number == 1 and of_type == thrift.LIST:
            _, n_columns, i = list_header(data, i)
            for column in range(min(n_columns, places.size)):
                place = places[column]
                i = _read_chunk(data, i, chunks[place] if place >= 0 else unwanted, stack)
        elif number == 3 and thrift.BYTE < of_type < thrift.DOUBLE:
            n_rows, i = integer(data, i)
        else:
            i = skip(data, i, of_type, stack)


@compiled("int64(int64, int64, int64[::1], int64[::1], int64[:,:,::1])")
def read_footer(source: int, n_bytes: int, places: Ints, n_rows: Ints, chunks: Ints) -> int:
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
    stack = np.empty((thrift.DEEPEST, 2), np.int64)
    i: Any = 0
    number: Any = 0
    n_groups: Any = 0
    while True:
        of_type, number, i = field(data, i, number)
        if i < 0 or of_type == 0:
            return 0 if i >= 0 and n_groups == n_rows.size else -1
        if number == 4 and of_type == thrift.LIST:
            _, n_groups, i = list_header(data, i)
            for group in range(min(n_groups, n_rows.size)):
                n_rows[group], i = _read_group(data, i, places, chunks[group], stack)
        else:
            i = skip(data, i, of_type, stack)
