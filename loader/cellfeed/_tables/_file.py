"""One file of tables, in which any change is detected.

It begins with a mark, the CRC-32 of all that follows, and the number of bytes of a description
in JSON. The description contains the key, and the name, dtype and length of each table. The tables
follow, each at a multiple of 64 bytes. The checksum detects every change of up to four adjacent
bytes, and all but one in four billion of the others.
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
_HEAD = struct.Struct("<8sII")  # mark, checksum, size of the description in bytes
_CHECKED_FROM = 12
_ALIGNMENT = 64


def size_of(key: bytes, tables: Tables) -> int:
    """Return the size in bytes of a file with these tables."""
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
        The content was not written for this key, or is damaged.
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
    """Return everything before the tables, with the checksum not yet set."""
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
