"""Compiled: Thrift's compact protocol, in which Parquet files describe themselves.

Format: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. A struct
is read step by step, each of which is a value with its path: the numbers of its field and of those
around it, as digits of a number to the base 32. Elements of a list have the path of the list.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode._kernels._fields import Ints
from cellfeed.extending import compiled

Bytes: TypeAlias = NDArray[np.uint8]

ENDS, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
DAMAGED = -1  # in place of a type
DIGIT_BITS = 5
_BASE = 1 << DIGIT_BITS
_MOST_SHIFT = 56
_LONG_LIST = 15  # in the header of a list, if its length follows

# A reader: its position and depth in the first row, and a row for each open struct or list.
POSITION, _DEPTH = 0, 1
_PATH, _LAST_FIELD, _N_LEFT, _OF_TYPE, _N_COLUMNS = range(5)
_IS_STRUCT = -1  # in place of the number of elements that are left
_DEEPEST = 12


@compiled("Tuple((int64, int64))(uint8[::1], int64, int64)", inner=True)
def varint(data: Bytes, i: int, stop: int) -> Any:
    """Return a number, and where the next one begins; -1 if there is none."""
    value = shift = np.int64(0)
    while 0 <= i < stop and shift <= _MOST_SHIFT:
        byte = np.int64(data[np.uint64(i)])
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i
        shift += 7
    return 0, -1


@compiled("int64[:,::1]()", inner=True)
def new_reader() -> Ints:
    """Return the memory of a reader."""
    return np.zeros((1 + _DEEPEST, _N_COLUMNS), np.int64)


@compiled("void(int64[:,::1], int64)", inner=True)
def begin(reader: Ints, i: int) -> None:
    """Begin to read a struct at a position."""
    reader[0, POSITION], reader[0, _DEPTH] = i, 1
    reader[1, _PATH], reader[1, _LAST_FIELD], reader[1, _N_LEFT] = 0, 0, _IS_STRUCT


@compiled("Tuple((int64, int64, int64))(uint8[::1], int64[:,::1])", inner=True)
def step(data: Bytes, reader: Ints) -> Any:  # noqa: PLR0912 - one for each type
    """Read the next value of a struct.

    Returns
    -------
    Its type, path and value: an integer, a boolean, or the number of bytes, which end at the
    position of the reader, or of elements. The type is `ENDS` where a struct ends, with path 0
    where all do; `DAMAGED` where bytes are missing, or structs are too deep.
    """
    i, depth = reader[0, POSITION], reader[0, _DEPTH]
    while reader[depth, _N_LEFT] == 0:
        depth -= 1
    path, value, is_struct = reader[depth, _PATH], np.int64(0), reader[depth, _N_LEFT] < 0
    if is_struct:
        if not 0 <= i < data.size:
            return DAMAGED, path, value
        head, i = np.int64(data[i]), i + 1
        of_type = head & 15
        if head == ENDS:
            reader[0, POSITION], reader[0, _DEPTH] = i, depth - 1
            return ENDS, path, value
        number = reader[depth, _LAST_FIELD] + (head >> 4)
        if head >> 4 == 0:
            number, i = varint(data, i, data.size)
            number = (number >> 1) ^ -(number & 1)
        reader[depth, _LAST_FIELD] = number
        path = path * _BASE + number if path >= 0 and 0 < number < _BASE else np.int64(-1)
    else:
        of_type = reader[depth, _OF_TYPE]
        reader[depth, _N_LEFT] -= 1
    if of_type in (TRUE, FALSE):
        value = np.int64(of_type == TRUE)
        i += not is_struct  # there, the type of a field says it
    elif of_type == BYTE:
        i += 1
    elif of_type < DOUBLE:
        value, i = varint(data, i, data.size)
        value = (value >> 1) ^ -(value & 1)
    elif of_type == DOUBLE:
        i += 8
    elif of_type == BINARY:
        value, i = varint(data, i, data.size)
        if i < 0 or value < 0 or value > data.size - i:
            return DAMAGED, path, value
        i += value
    elif of_type in (LIST, SET, STRUCT):
        depth += 1
        if depth > _DEEPEST:
            return DAMAGED, path, value
        reader[depth, _PATH], reader[depth, _LAST_FIELD] = path, 0
        reader[depth, _N_LEFT] = _IS_STRUCT
        if of_type != STRUCT:
            if not 0 <= i < data.size:
                return DAMAGED, path, value
            head, i = np.int64(data[i]), i + 1
            value = head >> 4
            if value == _LONG_LIST:
                value, i = varint(data, i, data.size)
            if value < 0 or value > data.size - i:  # each takes at least a byte
                return DAMAGED, path, value
            reader[depth, _N_LEFT], reader[depth, _OF_TYPE] = value, head & 15
    else:
        of_type = np.int64(DAMAGED)
    if not 0 <= i <= data.size:
        return DAMAGED, path, value
    reader[0, POSITION], reader[0, _DEPTH] = i, depth
    return of_type, path, value
