"""One file of tables, of which any change is noticed.

It begins with a mark, the CRC-32 of all that follows, and the number of bytes of a description
in JSON. This holds the key, and the name, dtype and length of each table. The tables follow, each
at a multiple of 64 bytes. A checksum notices every change of up to four bytes in a row, and others
but for one in four billion.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tables", "parse", "size_of", "write"]

Tables = Mapping[str, NDArray[Any]]

_MARK = b"cellfeed"
_HEAD = struct.Struct("<8sII")  # mark, checksum, bytes of the description
_CHECKED_FROM = 12
_ALIGNMENT = 64


def size_of(key: bytes, tables: Tables) -> int:
    """Return how many bytes a file of these tables has."""
    return len(_begin(key, tables)) + sum(_padded(table.nbytes) for table in tables.values())


def write(file: BinaryIO, key: bytes, tables: Tables) -> None:
    """Write one-dimensional tables."""
    begin = _begin(key, tables)
    parts: list[Any] = [begin[_CHECKED_FROM:]]
    for table in tables.values():
        content = np.ascontiguousarray(table).view(np.uint8)
        parts += [content, bytes(_padded(content.size) - content.size)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    file.write(_MARK + struct.pack("<I", checksum))
    for part in parts:
        file.write(part)


def parse(content: NDArray[np.uint8], key: bytes) -> Tables:
    """Return the tables in the content of a file, as views of it.

    Raises
    ------
    ValueError
        It is not what was written for this key.
    """
    if content.size < _HEAD.size:
        raise ValueError("a file of tables is too short")
    mark, checksum, n_described = _HEAD.unpack(content[: _HEAD.size].tobytes())
    if mark != _MARK or zlib.crc32(content[_CHECKED_FROM:].data) != checksum:
        raise ValueError("the checksum of a file of tables does not match")
    described = json.loads(content[_HEAD.size : _HEAD.size + n_described].tobytes())
    if described["key"] != key.decode():
        raise ValueError("a file of tables belongs to other data")
    tables, first = dict[str, NDArray[Any]](), _padded(_HEAD.size + n_described)
    for name, dtype, size in described["tables"]:
        n_bytes = size * np.dtype(dtype).itemsize
        tables[name] = content[first : first + n_bytes].view(dtype)
        first += _padded(n_bytes)
    if first != content.size:
        raise ValueError("the size of a file of tables does not match its tables")
    return tables


def _begin(key: bytes, tables: Tables) -> bytes:
    """Return all that comes before the tables, with no checksum yet."""
    described = json.dumps(
        {
            "key": key.decode(),
            "tables": [[name, table.dtype.str, table.size] for name, table in tables.items()],
        }
    ).encode()
    head = _HEAD.pack(_MARK, 0, len(described)) + described
    return head + bytes(_padded(len(head)) - len(head))


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
