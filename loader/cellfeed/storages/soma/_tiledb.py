"""How TileDB stores sparse arrays: the part that is decoded here; TileDB reads all others."""

import itertools
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import decode
from cellfeed.rows import SparseChunks
from cellfeed.sources import files_in
from cellfeed.storages.soma import _tiles

# The container of TileDB's metadata; ``format_spec/generic_tile.md`` and ``tile.md`` there.

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
        for begin, n, _ in _tiles.parts_of_chunk(content, metadata, first):
            part = content[begin : begin + n]
            found += zlib.decompress(part) if kind == GZIP else _zstd().decode(part)
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes, but {size} expected")
    return bytes(found)


# The schema of a sparse matrix; ``format_spec/array_schema.md`` of TileDB.

VERSIONS = range(20, 23)  # of the format, with which this module was tested
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
    row_filters: _tiles.TileFilters
    column_filters: _tiles.TileFilters
    value_filters: _tiles.TileFilters


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
    extents, filters = list[int](), list[_tiles.TileFilters]()
    for _ in range(2):
        extent, own = _dimension(fields)
        extents.append(extent)
        filters.append(_known(*(own if own[0] else of_coordinates), np.dtype(np.int64)))
    if extents[0] > _tiles.MOST_BAND_ROWS:
        raise UnknownLayoutError(
            f"its blocks have {extents[0]} rows, above {_tiles.MOST_BAND_ROWS}"
        )
    if fields.number("I") != 1:
        raise UnknownLayoutError("its elements have several values")
    named, of_values, _ = _field(fields)
    if named is None:
        raise UnknownLayoutError("its values are not numbers")
    if fields.number("B"):
        raise UnknownLayoutError("its values may be missing")
    dtype = np.dtype(named)
    return Schema(
        capacity=capacity,
        block_rows=extents[0],
        block_columns=extents[1],
        dtype=dtype,
        row_filters=filters[0],
        column_filters=filters[1],
        value_filters=_known(*of_values, dtype),
    )


def _filters(fields: Fields) -> tuple[tuple[int, ...], int]:
    """Return kinds of filters, in the order in which they are applied, and the size of chunks."""
    chunk_bytes, n_filters = fields.numbers("II")
    kinds = list[int]()
    for _ in range(n_filters):
        kind, n = fields.numbers("BI")
        fields.bytes(n)
        if kind != _NO_FILTER:
            kinds.append(kind)
    return tuple(kinds), chunk_bytes


def _known(
    kinds: tuple[int, ...], chunk_bytes: int, dtype: np.dtype[np.generic]
) -> _tiles.TileFilters:
    """Return filters in the form that compiled code takes."""
    *before, last = kinds or (_NO_FILTER,)
    if last == _BYTE_SHUFFLE and not before:
        before, last = [last], _NO_FILTER
    if before not in ([], [_BYTE_SHUFFLE]) or last not in (_NO_FILTER, *_CODECS):
        names = [_FILTERS.get(kind, str(kind)) for kind in (*before, last)]
        unknown = [name for name in names if name != str(_BYTE_SHUFFLE)] or names
        raise UnknownLayoutError(f"filter {unknown[0]} is not supported")
    codec = decode.chunk_codec(_CODECS.get(last, "none"))
    shuffled = bool(before) and dtype.itemsize > 1
    return _tiles.TileFilters(codec, shuffled, chunk_bytes)


def _field(fields: Fields) -> tuple[str | None, tuple[tuple[int, ...], int], bytes]:
    """Return the dtype of a dimension or an attribute, its filters, and its domain or fill value.

    The dtype is None unless it has one number per element.
    """
    fields.bytes(fields.number("I"))  # its name
    datatype, n_values = fields.numbers("BI")
    filters = _filters(fields)
    dtype = _DTYPES.get(datatype) if n_values == 1 else None
    return dtype, filters, fields.bytes(fields.number("Q"))


def _dimension(fields: Fields) -> tuple[int, tuple[tuple[int, ...], int]]:
    """Return the extent of blocks along a dimension, and its filters."""
    dtype, filters, domain = _field(fields)
    if dtype != "int64":
        raise UnknownLayoutError("its coordinates are not int64")
    if fields.number("B"):
        raise UnknownLayoutError("it has no blocks")
    if Fields(domain).number("q"):
        raise UnknownLayoutError("its rows are not numbered from 0")
    extent = fields.number("q")
    if extent < 1:
        raise ValueError(f"blocks of {extent}")
    return extent, filters


# The fragments of an array, one per write; ``format_spec/fragment.md`` of TileDB.

FRAGMENTS = "__fragments"
FILES = ("d0.tdb", "d1.tdb", "a0.tdb")  # rows, columns and values
_COMMITS, _WRITTEN = "__commits", ".wrt"
_METADATA = "__fragment_metadata.tdb"
_N_FIELDS = 4  # values, coordinates in their older form, rows and columns
_OF_FILES = (2, 3, 0)  # indices of `FILES` among these


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """One fragment: the result of one write.

    Parameters
    ----------
    name
        Name of its folder.
    schema
        File name of its schema.
    rows
        First and last row with elements in it.
    n_last
        Number of elements of its last tile; all others are full.
    tile_rows
        Smallest and largest row of each tile, int64, shape (n_tiles, 2).
    bounds
        Where tiles begin and end in each of `FILES`, int64, shape (3, n_tiles + 1).
    """

    name: str
    schema: str
    rows: tuple[int, int]
    n_last: int
    tile_rows: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def n_tiles(self) -> int:
        """Number of tiles."""
        return len(self.tile_rows)

    def n_elements(self, capacity: int) -> NDArray[np.int64]:
        """Return the number of elements of each tile, int64, shape (n_tiles,)."""
        if not 0 < self.n_last <= capacity:
            raise ValueError(
                f"it has a tile of {self.n_last} elements, above the capacity of {capacity}"
            )
        n_elements = np.full(self.n_tiles, capacity, np.int64)
        n_elements[-1] = self.n_last
        return n_elements


def fragments_at(folder: Path, timestamp: int) -> list[str]:
    """Return the names of the fragments that an array has at a time.

    Parameters
    ----------
    folder
        The array.
    timestamp
        In ms.

    Raises
    ------
    UnknownLayoutError
        The array is not made of fragments alone, or some fragments end after the time.
    OSError, ValueError
        It is damaged.
    """
    there = list[str]()
    if not (folder / _COMMITS).is_dir():
        return there
    for commit in sorted((folder / _COMMITS).iterdir()):
        if commit.suffix != _WRITTEN:
            raise UnknownLayoutError(f"it has commits of kind {commit.suffix!r}")
        first, last = (int(each) for each in commit.name.split("_")[2:4])
        if first <= timestamp < last:
            raise UnknownLayoutError("fragments of different times were consolidated")
        if last <= timestamp:
            there.append(commit.stem)
    return there


def read_fragment(folder: Path, name: str) -> Fragment:
    """Return the metadata of a fragment.

    Parameters
    ----------
    folder, name
        The array, and the fragment.

    Raises
    ------
    UnknownLayoutError
        The fragment is not decoded here.
    OSError, ValueError, struct.error, zlib.error, RuntimeError
        It is damaged.
    """
    content = (folder / FRAGMENTS / name / _METADATA).read_bytes()
    end = len(content) - 8
    fields = Fields(content, end - Fields(content, end).number("Q"))
    version, n_name = fields.numbers("IQ")
    if version not in VERSIONS:
        raise UnknownLayoutError(f"version {version} of TileDB's format is unknown")
    schema = fields.bytes(n_name).decode()
    is_dense, is_empty = fields.numbers("BB")
    if is_dense or is_empty:
        raise UnknownLayoutError("a fragment is dense, or has no extent")
    first, last, _, _, n_tiles, of_last = fields.numbers("qqqqQQ")
    if any(fields.numbers("BB")):
        raise UnknownLayoutError("elements have their own timestamps, or were deleted")
    sizes = fields.numbers(f"{3 * _N_FIELDS}Q")
    tree, *tiles = fields.numbers(f"{1 + _N_FIELDS}Q")
    offsets = np.stack([_offsets(generic_tile(content, tiles[k]), n_tiles) for k in _OF_FILES])
    ends = np.array([[sizes[k]] for k in _OF_FILES], np.int64)
    if n_tiles < 1 or (np.diff(offsets, append=ends) < 0).any() or (offsets[:, 0] < 0).any():
        raise ValueError("its tiles overlap")
    tile_rows = _tile_rows(generic_tile(content, tree), n_tiles)
    if (tile_rows[:, 0].min(), tile_rows[:, 1].max()) != (first, last):
        raise ValueError("the rows of its tiles differ from its metadata")
    return Fragment(
        name=name,
        schema=schema,
        rows=(first, last),
        n_last=of_last,
        tile_rows=tile_rows,
        bounds=np.concatenate([offsets, ends], axis=1),
    )


def _offsets(content: bytes, n_tiles: int) -> NDArray[np.int64]:
    """Return the offsets of tiles in a file."""
    if Fields(content).number("Q") != n_tiles:
        raise ValueError("its tile offsets do not match its tiles")
    return np.frombuffer(content, "<i8", n_tiles, offset=8).astype(np.int64)


def _tile_rows(content: bytes, n_tiles: int) -> NDArray[np.int64]:
    """Return the smallest and largest row of each tile, from the leaves of the R-tree."""
    fields = Fields(content)
    _, n_levels = fields.numbers("II")
    extents = b""
    for _ in range(n_levels):
        extents = fields.bytes(32 * fields.number("Q"))
    found = np.frombuffer(extents, "<i8").astype(np.int64).reshape(-1, 4)[:, :2]
    if len(found) != n_tiles:
        raise ValueError("its tile extents do not match its tiles")
    return found


# A sparse array of TileDB whose tiles are decoded here.

_SCHEMAS = "__schema"
_DAMAGE = (OSError, ValueError, OverflowError, MemoryError, RuntimeError, struct.error, zlib.error)


class TiledCsr(SparseChunks):
    """Rows of a sparse array of TileDB.

    Parameters
    ----------
    schema
        How the array is stored.
    columns, values
        Columns and values of its elements.
    find
        Locates rows.
    joinids
        The row of the array for each row, ascending, int64; None if they are the same.
    n_columns, n_elements
        Number of columns and of elements.
    """

    def __init__(
        self,
        *,
        schema: Schema,
        columns: _tiles.TileChunks,
        values: _tiles.TileChunks,
        find: _tiles.TileRows,
        joinids: NDArray[np.int64] | None,
        n_columns: int,
        n_elements: int,
    ) -> None:
        self._schema, self._find = schema, find
        self._columns, self.indices = columns, columns.array
        self._values, self.data = values, values.array
        self._joinids, self.n_columns, self._n_elements = joinids, n_columns, n_elements

    def rows_per_chunk(self, n_rows: int) -> float:
        """Return the mean number of rows whose columns lie in one chunk, of ``n_rows`` rows."""
        blocks = -(-self.n_columns // self._schema.block_columns)
        of_row = max(1.0, self._n_elements / max(1, n_rows * blocks))
        return max(1.0, min(self._columns.chunk_elements / of_row, self._schema.block_rows))

    def extents(self, rows: NDArray[np.int64]) -> decode.Extents:
        """See `SparseChunks`."""
        found = self._find(rows if self._joinids is None else self._joinids[rows])
        return replace(
            found,
            firsts=self._values.starts(found.firsts),
            index_firsts=self._columns.starts(found.firsts),
        )


def tiled_csr(
    folder: Path,
    name: str,
    timestamp: int,
    joinids: NDArray[np.int64] | None,
    n_columns: int,
) -> TiledCsr | None:
    """Return a sparse array, reading only metadata; None if nothing is written there.

    Parameters
    ----------
    folder
        Folder of the array.
    name
        Name for messages.
    timestamp
        In ms; later writes are ignored.
    joinids, n_columns
        See `TiledCsr`.

    Raises
    ------
    UnknownLayoutError
        TileDB has to read the array; the message gives the reason.
    """
    try:
        names = fragments_at(folder, timestamp)
        if not names:
            return None
        schema, found = _read(folder, names)
        return _joined(folder, name, schema, found, joinids, n_columns)
    except _DAMAGE as error:
        raise UnknownLayoutError("its metadata cannot be read") from error


def _read(folder: Path, names: list[str]) -> tuple[Schema, list[Fragment]]:
    """Return the schema of fragments, which must share one, and the fragments, by their rows."""
    found = sorted((read_fragment(folder, name) for name in names), key=lambda each: each.rows)
    if any(first.rows[1] >= second.rows[0] for first, second in itertools.pairwise(found)):
        raise UnknownLayoutError("several of its fragments have the same rows")
    of_fragments = {each.schema for each in found}
    schemas = {read_schema((folder / _SCHEMAS / each).read_bytes()) for each in of_fragments}
    if len(schemas) > 1:
        raise UnknownLayoutError("its fragments have different schemas")
    return schemas.pop(), found


def _joined(
    folder: Path,
    name: str,
    schema: Schema,
    found: list[Fragment],
    joinids: NDArray[np.int64] | None,
    n_columns: int,
) -> TiledCsr:
    """Return an array of fragments, in row order."""
    names = [f"{FRAGMENTS}/{each.name}/{file}" for file in FILES for each in found]
    files = files_in(folder, names)
    expected = np.array([each.bounds[:, -1] for each in found]).T.ravel()
    if (files.sizes(np.arange(len(names))) != expected).any():
        raise UnknownLayoutError("the size of a file differs from its metadata")
    n_tiles = np.array([each.n_tiles for each in found])
    n_elements = np.concatenate([each.n_elements(schema.capacity) for each in found])

    def array(
        number: int, column: str, dtype: np.dtype[Any], filters: _tiles.TileFilters
    ) -> _tiles.TileChunks:
        tiles = _tiles.Tiles(
            files=np.repeat(np.arange(len(found)) + number * len(found), n_tiles),
            offsets=np.concatenate([each.bounds[number, :-1] for each in found]),
            ends=np.concatenate([each.bounds[number, 1:] for each in found]),
            n_elements=n_elements,
            capacity=schema.capacity,
        )
        return _tiles.TileChunks(f"{name}/{column}", tiles, dtype, filters, files)

    number_of_row = np.dtype(np.int64)
    fragments = _tiles.Fragments(
        rows=np.array([each.rows for each in found], np.int64),
        first_tiles=np.concatenate([[0], np.cumsum(n_tiles, dtype=np.int64)]),
        tile_rows=np.concatenate([each.tile_rows for each in found]),
        block_rows=schema.block_rows,
    )
    rows = array(0, "soma_dim_0", number_of_row, schema.row_filters)
    return TiledCsr(
        schema=schema,
        columns=array(1, "soma_dim_1", number_of_row, schema.column_filters),
        values=array(2, "soma_data", schema.dtype, schema.value_filters),
        find=_tiles.TileRows(rows, fragments),
        joinids=joinids,
        n_columns=n_columns,
        n_elements=int(n_elements.sum()),
    )
