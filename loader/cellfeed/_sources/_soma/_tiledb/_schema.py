"""The schema of a sparse matrix; ``format_spec/array_schema.md`` of TileDB."""

from dataclasses import dataclass

import numpy as np

from cellfeed._chunks import MOST_BAND_ROWS, TileFilters, chunk_codec
from cellfeed._sources._soma._tiledb._generic import (
    GZIP,
    ZSTD,
    Fields,
    UnknownLayoutError,
    generic_tile,
)

__all__ = ["VERSIONS", "Schema", "read_schema"]

VERSIONS = range(20, 23)  # of the format, with which this module was tested
_INT64 = 1
_DTYPES = {
    0: "int32",
    1: "int64",
    2: "float32",
    3: "float64",
    5: "int8",
    6: "uint8",
    7: "int16",
    8: "uint16",
    9: "uint32",
    10: "uint64",
}
_NO_FILTER, _BYTE_SHUFFLE = 0, 9
_CODECS = {GZIP: "zlib", ZSTD: "zstd"}
_FILTERS = {
    3: "LZ4",
    4: "RLE",
    5: "bzip2",
    6: "double delta",
    7: "bit width reduction",
    8: "bit shuffle",
    10: "positive delta",
    12: "checksum MD5",
    13: "checksum SHA256",
    15: "float scale",
    16: "XOR",
    19: "delta",
}


@dataclass(frozen=True, slots=True)
class Schema:
    """How a sparse matrix is stored.

    Parameters
    ----------
    capacity
        Number of elements of a tile.
    block_rows, block_columns
        Extents of the blocks by which elements are ordered.
    dtype
        Dtype of the values.
    row_filters, column_filters, value_filters
        How rows, columns and values of elements are encoded.
    """

    capacity: int
    block_rows: int
    block_columns: int
    dtype: np.dtype[np.generic]
    row_filters: TileFilters
    column_filters: TileFilters
    value_filters: TileFilters


def read_schema(content: bytes) -> Schema:
    """Return the schema in a file.

    Raises
    ------
    UnknownLayoutError
        This module does not decode arrays of this schema.
    ValueError, struct.error, zlib.error, RuntimeError
        It is damaged.
    """
    fields = Fields(generic_tile(content, 0))
    version, _, is_sparse, tile_order, cell_order, capacity = fields.numbers("IBBBBQ")
    if version not in VERSIONS:
        raise UnknownLayoutError(f"version {version} of TileDB's format is unknown")
    if not is_sparse:
        raise UnknownLayoutError("it is dense")
    if tile_order or cell_order:
        raise UnknownLayoutError("its elements are not in row-major order")
    of_coordinates = _filters(fields)
    _filters(fields)  # filters of offsets, which there are none of
    _filters(fields)  # filters of validity, which are unused
    if fields.number("I") != 2:  # noqa: PLR2004 - rows and columns
        raise UnknownLayoutError("it does not have two dimensions")
    extents, filters = list[int](), list[TileFilters]()
    for _ in range(2):
        extent, own = _dimension(fields)
        extents.append(extent)
        filters.append(_known(own or of_coordinates, np.dtype(np.int64)))
    if extents[0] > MOST_BAND_ROWS:
        raise UnknownLayoutError(f"its blocks have {extents[0]} rows, above {MOST_BAND_ROWS}")
    if fields.number("I") != 1:
        raise UnknownLayoutError("its elements have several values")
    dtype, of_values = _attribute(fields)
    return Schema(
        capacity=capacity,
        block_rows=extents[0],
        block_columns=extents[1],
        dtype=dtype,
        row_filters=filters[0],
        column_filters=filters[1],
        value_filters=_known(of_values, dtype),
    )


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """Kinds of filters, in the order in which they are applied."""

    kinds: tuple[int, ...]
    chunk_bytes: int

    def __bool__(self) -> bool:
        return bool(self.kinds)


def _filters(fields: Fields) -> _Pipeline:
    chunk_bytes, n_filters = fields.numbers("II")
    kinds = list[int]()
    for _ in range(n_filters):
        kind, n = fields.numbers("BI")
        fields.bytes(n)
        if kind != _NO_FILTER:
            kinds.append(kind)
    return _Pipeline(tuple(kinds), chunk_bytes)


def _known(pipeline: _Pipeline, dtype: np.dtype[np.generic]) -> TileFilters:
    """Return filters in the form that compiled code takes."""
    *before, last = pipeline.kinds or (_NO_FILTER,)
    if last == _BYTE_SHUFFLE and not before:
        before, last = [last], _NO_FILTER
    if before not in ([], [_BYTE_SHUFFLE]) or last not in (_NO_FILTER, *_CODECS):
        names = [_FILTERS.get(kind, str(kind)) for kind in (*before, last)]
        unknown = [name for name in names if name != str(_BYTE_SHUFFLE)] or names
        raise UnknownLayoutError(f"filter {unknown[0]} is not supported")
    codec = chunk_codec(_CODECS.get(last, "none"))
    shuffled = bool(before) and dtype.itemsize > 1
    return TileFilters(codec, shuffled, pipeline.chunk_bytes)


def _dimension(fields: Fields) -> tuple[int, _Pipeline]:
    """Return the extent of blocks along a dimension, and its filters."""
    fields.bytes(fields.number("I"))  # its name
    datatype, n_values = fields.numbers("BI")
    pipeline = _filters(fields)
    domain = fields.bytes(fields.number("Q"))
    if datatype != _INT64 or n_values != 1:
        raise UnknownLayoutError("its coordinates are not int64")
    if fields.number("B"):
        raise UnknownLayoutError("it has no blocks")
    if Fields(domain).number("q"):
        raise UnknownLayoutError("its rows are not numbered from 0")
    extent = fields.number("q")
    if extent < 1:
        raise ValueError(f"blocks of {extent}")
    return extent, pipeline


def _attribute(fields: Fields) -> tuple[np.dtype[np.generic], _Pipeline]:
    """Return the dtype of the values, and their filters."""
    fields.bytes(fields.number("I"))  # its name
    datatype, n_values = fields.numbers("BI")
    pipeline = _filters(fields)
    fields.bytes(fields.number("Q"))  # its fill value
    if datatype not in _DTYPES or n_values != 1:
        raise UnknownLayoutError("its values are not numbers")
    if fields.number("B"):
        raise UnknownLayoutError("its values may be missing")
    return np.dtype(_DTYPES[datatype]), pipeline
