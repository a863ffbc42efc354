"""The container of TileDB's metadata; ``format_spec/generic_tile.md`` and ``tile.md`` there."""

import struct
import zlib
from typing import Any

from cellfeed._chunks import parts_of_chunk

__all__ = ["GZIP", "ZSTD", "Fields", "UnknownLayoutError", "generic_tile"]

GZIP, ZSTD = 1, 2  # kinds of filters
_HEADER = struct.Struct("<IQQBQBI")


class UnknownLayoutError(Exception):
    """An array is stored in a way that only TileDB decodes; the message says which."""


class Fields:
    """A sequence of binary numbers and names.

    Parameters
    ----------
    content
        The bytes.
    position
        Position of the first one.
    """

    def __init__(self, content: bytes, position: int = 0) -> None:
        self.content, self.position = content, position

    def numbers(self, kinds: str) -> tuple[int, ...]:
        """Return the next numbers, with the format of `struct`."""
        fields = struct.Struct(f"<{kinds}")
        found = fields.unpack_from(self.content, self.position)
        self.position += fields.size
        return found

    def number(self, kind: str) -> int:
        """Return the next number."""
        return self.numbers(kind)[0]

    def bytes(self, n: int) -> bytes:
        """Return the next bytes."""
        found = self.content[self.position : self.position + n]
        if len(found) != n:
            raise ValueError("it ends too early")
        self.position += n
        return found


def _zstd() -> Any:
    from numcodecs import Zstd  # noqa: PLC0415 - takes long to import

    return Zstd()


def generic_tile(content: bytes, position: int) -> bytes:
    """Return the contents of a generic tile.

    Parameters
    ----------
    content, position
        The bytes of a file, and the position of the tile.

    Raises
    ------
    UnknownLayoutError
        It is encrypted, or has unexpected filters.
    ValueError, struct.error, zlib.error, RuntimeError
        It is damaged.
    """
    _, _, size, _, _, encryption, n_pipeline = _HEADER.unpack_from(content, position)
    if encryption:
        raise UnknownLayoutError("it is encrypted")
    fields = Fields(content, position + _HEADER.size)
    pipeline = Fields(fields.bytes(n_pipeline), 4)  # after the size of chunks
    n_filters = pipeline.number("I")
    kind = pipeline.number("B") if n_filters else None
    if n_filters > 1 or kind not in (None, GZIP, ZSTD):
        raise UnknownLayoutError("its metadata have unknown filters")
    found = bytearray()
    for _ in range(fields.number("Q")):
        _, n_filtered, n_metadata = fields.numbers("III")
        metadata = fields.position
        fields.bytes(n_metadata)
        first = fields.position
        stored = fields.bytes(n_filtered)
        if kind is None:
            found += stored
            continue
        for begin, n, _ in parts_of_chunk(content, metadata, first):
            part = content[begin : begin + n]
            found += zlib.decompress(part) if kind == GZIP else _zstd().decode(part)
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes, but {size} expected")
    return bytes(found)
