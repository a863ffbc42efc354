"""Compiled: Thrift's compact protocol, in which Parquet files describe themselves.

Format: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Where a
value is not there whole, the place that follows it is -1.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode._kernels._fields import Ints
from cellfeed.extending import compiled

Bytes: TypeAlias = NDArray[np.uint8]

ENDS, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
DEEPEST = 12  # rows of the stack of `skip`
_MOST_SHIFT = 56
_LONG_LIST = 15  # in the header of a list, if its length follows
_OPEN = -1  # left in a struct, whose end is marked


@compiled("Tuple((int64, int64))(uint8[::1], int64, int64)", inner=True)
def varint(data: Bytes, i: int, stop: int) -> Any:
    """Return a number, and where the next one begins; -1 if there is none."""
    value = shift = np.int64(0)
    while i < stop and shift <= _MOST_SHIFT:
        byte = np.int64(data[np.uint64(i)])
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i
        shift += 7
    return 0, -1


@compiled("Tuple((int64, int64, int64))(uint8[::1], int64, int64)", inner=True)
def field(data: Bytes, i: int, last: int) -> Any:
    """Return the type and number of the next field, and where it begins: type 0 ends a struct."""
    if not 0 <= i < data.size:
        return 0, 0, -1
    byte = np.int64(data[i])
    i += 1
    number = last + (byte >> 4)
    if byte and byte >> 4 == 0:
        number, i = varint(data, i, data.size)
        number = (number >> 1) ^ -(number & 1)
    return byte & 15, number, i


@compiled("Tuple((int64, int64, int64))(uint8[::1], int64)", inner=True)
def list_header(data: Bytes, i: int) -> Any:
    """Return the type and number of the values of a list, and where they begin."""
    if not 0 <= i < data.size:
        return 0, 0, -1
    byte = np.int64(data[i])
    i, n = i + 1, byte >> 4
    if n == _LONG_LIST:
        n, i = varint(data, i, data.size)
    if n < 0 or n > data.size - i:  # each takes at least a byte
        return 0, 0, -1
    return byte & 15, n, i


@compiled("Tuple((int64, int64))(uint8[::1], int64)", inner=True)
def integer(data: Bytes, i: int) -> Any:
    value, i = varint(data, i, data.size)
    return (value >> 1) ^ -(value & 1), i


@compiled("int64(uint8[::1], int64, int64, int64[:,::1])", inner=True)
def skip(  # noqa: PLR0912 - one for each type
    data: Bytes, i: int, of_type: int, stack: Ints
) -> int:
    """Return where a value ends; the stack has the type and number of values that are left."""
    depth: Any = 0
    stack[0, 0], stack[0, 1] = of_type, 1
    if of_type in (TRUE, FALSE):  # in the header of its field
        return i
    while depth >= 0:
        if not 0 <= i <= data.size or depth == DEEPEST - 1:
            return -1
        of_type = stack[depth, 0]
        if stack[depth, 1] == 0:
            depth -= 1
            continue
        if stack[depth, 1] == _OPEN:
            of_type, _, i = field(data, i, 0)
            if i < 0:
                return -1
            if of_type in (TRUE, FALSE):
                continue
            if of_type == 0:
                depth -= 1
                continue
        else:
            stack[depth, 1] -= 1
        if of_type in (TRUE, FALSE, BYTE):
            i += 1
        elif of_type < DOUBLE:
            _, i = varint(data, i, data.size)
        elif of_type == DOUBLE:
            i += 8
        elif of_type == BINARY:
            n, i = varint(data, i, data.size)
            if i < 0 or n < 0 or n > data.size - i:
                return -1
            i += n
        elif of_type in (LIST, SET):
            depth += 1
            stack[depth, 0], stack[depth, 1], i = list_header(data, i)
        elif of_type == STRUCT:
            depth += 1
            stack[depth, 0], stack[depth, 1] = STRUCT, _OPEN
        else:
            return -1
    return i
