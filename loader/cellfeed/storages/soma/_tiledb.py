"""How TileDB stores sparse arrays: the part that is decoded here; TileDB reads all others."""

import itertools
import json
import struct
import zlib
from collections.abc import Mapping
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

_GZIP = 1  # the kind of filter
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
    if pipeline.number("I") != 1 or pipeline.number("B") != _GZIP:
        raise UnknownLayoutError("its metadata have unknown filters")
    found = bytearray()
    for _ in range(fields.number("Q")):
        _, n_filtered, n_metadata = fields.numbers("III")
        metadata = fields.position
        fields.bytes(n_metadata)
        first = fields.position
        fields.bytes(n_filtered)
        for begin, n, _ in _tiles.parts_of_chunk(content, metadata, first):
            found += zlib.decompress(content[begin : begin + n])
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes, but {size} expected")
    return bytes(found)


# The schema of a sparse matrix, as tiledbsoma names it.

VERSIONS = range(20, 23)  # of the format, with which this module was tested
_CODECS = {"ZSTD": "zstd", "GZIP": "zlib"}


def _filters(options: Mapping[str, Any], itemsize: int) -> _tiles.TileFilters:
    """Return the filters of a dimension or an attribute."""
    names = [each["name"] for each in options["filters"] or () if each["name"] != "NOOP"]
    shuffled = names[:1] == ["BYTESHUFFLE"]
    codecs = names[shuffled:]
    for name in codecs:
        if name not in _CODECS or len(codecs) > 1:
            raise UnknownLayoutError(f"filter {name} is not supported")
    codec = decode.chunk_codec(_CODECS[codecs[0]] if codecs else "none")
    return _tiles.TileFilters(codec, shuffled and itemsize > 1)


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
    fields.bytes(n_name)  # of its schema
    is_dense, is_empty = fields.numbers("BB")
    if is_dense or is_empty:
        raise UnknownLayoutError("a fragment is dense, or has no extent")
    first, last, _, _, n_tiles, of_last = fields.numbers("qqqqQQ")
    if any(fields.numbers("BB")):
        raise UnknownLayoutError("elements have their own timestamps, or were deleted")
    sizes = fields.numbers(f"{3 * _N_FIELDS}Q")
    if any(sizes[_N_FIELDS:]):
        raise UnknownLayoutError("its values are no single numbers, or may be missing")
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

_DIMENSIONS = ("soma_dim_0", "soma_dim_1")
_DAMAGE = (OSError, ValueError, OverflowError, MemoryError, RuntimeError, struct.error, zlib.error)


class TiledCsr(SparseChunks):
    """Rows of a sparse array of TileDB.

    Parameters
    ----------
    columns, values
        Columns and values of its elements.
    find
        Locates rows.
    joinids
        The row of the array for each row, ascending, int64; None if they are the same.
    n_columns
        Number of columns.
    """

    def __init__(
        self,
        *,
        columns: _tiles.TileChunks,
        values: _tiles.TileChunks,
        find: _tiles.TileRows,
        joinids: NDArray[np.int64] | None,
        n_columns: int,
    ) -> None:
        self._find, self._joinids, self.n_columns = find, joinids, n_columns
        self._columns, self.indices = columns, columns.array
        self._values, self.data = values, values.array

    def extents(self, rows: NDArray[np.int64]) -> decode.Extents:
        """See `SparseChunks`."""
        found = self._find(rows if self._joinids is None else self._joinids[rows])
        return replace(
            found,
            firsts=self._values.starts(found.firsts),
            index_firsts=self._columns.starts(found.firsts),
        )


def tiled_csr(
    array: Any,
    folder: Path,
    name: str,
    timestamp: int,
    joinids: NDArray[np.int64] | None,
    n_columns: int,
) -> tuple[TiledCsr, float] | None:
    """Return a sparse array, reading only metadata; None if nothing is written there.

    Parameters
    ----------
    array
        The array, opened by tiledbsoma.
    folder
        Folder of the array.
    name
        Name for messages.
    timestamp
        In ms; later writes are ignored.
    joinids, n_columns
        See `TiledCsr`.

    Returns
    -------
    The array, and the mean number of its rows whose columns lie in one chunk.

    Raises
    ------
    UnknownLayoutError
        TileDB has to read the array; the message gives the reason.
    """
    options = array.schema_config_options()
    if (options.cell_order, options.tile_order) != ("row-major", "row-major"):
        raise UnknownLayoutError("its elements are not in row-major order")
    dtype = np.dtype(array.schema.field("soma_data").type.to_pandas_dtype())
    if dtype.kind not in "iuf":
        raise UnknownLayoutError("its values are not numbers")
    dims, coordinates = json.loads(options.dims), np.dtype(np.int64)
    block_rows, block_columns = (int(dims[each]["tile"]) for each in _DIMENSIONS)
    if block_rows > _tiles.MOST_BAND_ROWS:
        raise UnknownLayoutError(
            f"its blocks have {block_rows} rows, above {_tiles.MOST_BAND_ROWS}"
        )
    filters = [_filters(dims[each], coordinates.itemsize) for each in _DIMENSIONS]
    filters.append(_filters(json.loads(options.attrs)["soma_data"], dtype.itemsize))
    try:
        names = fragments_at(folder, timestamp)
        if not names:
            return None
        found = sorted((read_fragment(folder, each) for each in names), key=lambda each: each.rows)
        if any(first.rows[1] >= second.rows[0] for first, second in itertools.pairwise(found)):
            raise UnknownLayoutError("several of its fragments have the same rows")
        n_elements = np.concatenate([each.n_elements(options.capacity) for each in found])
        files = files_in(
            folder, [f"{FRAGMENTS}/{each.name}/{file}" for file in FILES for each in found]
        )
        expected = np.array([each.bounds[:, -1] for each in found]).T.ravel()
        if (files.sizes(np.arange(expected.size)) != expected).any():
            raise UnknownLayoutError("the size of a file differs from its metadata")
    except _DAMAGE as error:
        raise UnknownLayoutError("its metadata cannot be read") from error
    n_tiles = np.array([each.n_tiles for each in found])
    chunks = [
        _tiles.TileChunks(
            f"{name}/{column}",
            _tiles.Tiles(
                files=np.repeat(np.arange(len(found)) + number * len(found), n_tiles),
                offsets=np.concatenate([each.bounds[number, :-1] for each in found]),
                ends=np.concatenate([each.bounds[number, 1:] for each in found]),
                n_elements=n_elements,
                capacity=options.capacity,
            ),
            own,
            filters[number],
            files,
        )
        for number, (column, own) in enumerate(
            zip((*_DIMENSIONS, "soma_data"), (coordinates, coordinates, dtype), strict=True)
        )
    ]
    fragments = _tiles.Fragments(
        rows=np.array([each.rows for each in found], np.int64),
        first_tiles=np.concatenate([[0], np.cumsum(n_tiles, dtype=np.int64)]),
        tile_rows=np.concatenate([each.tile_rows for each in found]),
        block_rows=block_rows,
    )
    rows, columns, values = chunks
    tiled = TiledCsr(
        columns=columns,
        values=values,
        find=_tiles.TileRows(rows, fragments),
        joinids=joinids,
        n_columns=n_columns,
    )
    n_blocks = -(-n_columns // block_columns)
    of_row = n_elements.sum() / ((found[-1].rows[1] + 1) * n_blocks)
    rows_per_chunk = min(columns.chunk_elements / max(1.0, of_row), block_rows)
    return tiled, max(1.0, rows_per_chunk)
