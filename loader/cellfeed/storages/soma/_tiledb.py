"""How TileDB stores sparse arrays: the part that is decoded here; TileDB reads all others."""

import itertools
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import decode
from cellfeed.sources import files_in
from cellfeed.storages.soma import _tiles

# The container of TileDB's metadata; ``format_spec/generic_tile.md`` and ``tile.md`` there.

_GZIP = 1  # the kind of filter
_HEADER = struct.Struct("<IQQBQBI")
_PIPELINE = struct.Struct("<4xIB")  # number of filters, after the size of chunks; kind of the first


class UnknownLayoutError(Exception):
    """An array is stored in a way that only TileDB decodes; the message says which."""


def _numbers(file: BytesIO, kinds: str) -> tuple[int, ...]:
    """Return the next numbers of a file, with the format of `struct`."""
    fields = struct.Struct(f"<{kinds}")
    return fields.unpack(file.read(fields.size))


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
    position += _HEADER.size
    n_filters, kind = _PIPELINE.unpack_from(content, position)
    if (n_filters, kind) != (1, _GZIP):
        raise UnknownLayoutError("its metadata have unknown filters")
    chunks = _tiles.chunks_of(content, position + n_pipeline, is_compressed=True)
    found = b"".join(zlib.decompress(content[first : first + n]) for _, first, n, _ in chunks)
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes, but {size} expected")
    return found


# The schema of a sparse matrix, as tiledbsoma names it.

VERSIONS = range(20, 23)  # of the format, with which this module was tested
_CODECS = {"ZSTD": "zstd", "GZIP": "zlib"}


def _filters(options: Mapping[str, Any], itemsize: int) -> tuple[int, bool]:
    """Return the codec of a dimension or an attribute, and whether bytes are shuffled before."""
    names = [each["name"] for each in options["filters"] or () if each["name"] != "NOOP"]
    shuffled = names[:1] == ["BYTESHUFFLE"]
    codecs = names[shuffled:]
    for name in codecs:
        if name not in _CODECS or len(codecs) > 1:
            raise UnknownLayoutError(f"filter {name} is not supported")
    codec = decode.chunk_codec(_CODECS[codecs[0]] if codecs else "none")
    return codec, shuffled and itemsize > 1


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
    n_elements
        Number of elements of each tile, int64, shape (n_tiles,).
    tile_rows
        Smallest and largest row of each tile, int64, shape (n_tiles, 2).
    bounds
        See `_tiles.Tiles`, int64, shape (3, n_tiles, 2).
    """

    name: str
    rows: tuple[int, int]
    n_elements: NDArray[np.int64]
    tile_rows: NDArray[np.int64]
    bounds: NDArray[np.int64]


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


def read_fragment(folder: Path, name: str, capacity: int) -> Fragment:
    """Return the metadata of a fragment.

    Parameters
    ----------
    folder, name, capacity
        The array, the fragment, and the number of elements of a full tile.

    Raises
    ------
    UnknownLayoutError
        The fragment is not decoded here.
    OSError, ValueError, struct.error, zlib.error, RuntimeError
        It is damaged.
    """
    content = (folder / FRAGMENTS / name / _METADATA).read_bytes()
    end = len(content) - 8  # with the size of what follows the tiles of metadata
    file = BytesIO(content)
    file.seek(end - struct.unpack_from("<Q", content, end)[0])
    version, n_name = _numbers(file, "IQ")
    if version not in VERSIONS:
        raise UnknownLayoutError(f"version {version} of TileDB's format is unknown")
    file.seek(n_name, os.SEEK_CUR)  # of its schema
    is_dense, is_empty = _numbers(file, "BB")
    if is_dense or is_empty:
        raise UnknownLayoutError("a fragment is dense, or has no extent")
    first, last, _, _, n_tiles, of_last = _numbers(file, "qqqqQQ")
    if any(_numbers(file, "BB")):
        raise UnknownLayoutError("elements have their own timestamps, or were deleted")
    sizes = _numbers(file, f"{3 * _N_FIELDS}Q")
    if any(sizes[_N_FIELDS:]):
        raise UnknownLayoutError("its values are no single numbers, or may be missing")
    tree, *tiles = _numbers(file, f"{1 + _N_FIELDS}Q")
    offsets = np.stack([_offsets(generic_tile(content, tiles[k]), n_tiles) for k in _OF_FILES])
    ends = np.array([[sizes[k]] for k in _OF_FILES], np.int64)
    if n_tiles < 1 or (np.diff(offsets, append=ends) < 0).any() or (offsets[:, 0] < 0).any():
        raise ValueError("its tiles overlap")
    tile_rows = _tile_rows(generic_tile(content, tree), n_tiles)
    if (tile_rows[:, 0].min(), tile_rows[:, 1].max()) != (first, last):
        raise ValueError("the rows of its tiles differ from its metadata")
    if not 0 < of_last <= capacity:
        raise ValueError(f"it has a tile of {of_last} elements, above the capacity of {capacity}")
    n_elements = np.full(n_tiles, capacity, np.int64)
    n_elements[-1] = of_last
    bounds = np.stack([offsets, np.concatenate([offsets[:, 1:], ends], axis=1)], axis=2)
    return Fragment(name, (first, last), n_elements, tile_rows, bounds)


def _offsets(content: bytes, n_tiles: int) -> NDArray[np.int64]:
    """Return the offsets of tiles in a file."""
    if struct.unpack_from("<Q", content) != (n_tiles,):
        raise ValueError("its tile offsets do not match its tiles")
    return np.frombuffer(content, "<i8", n_tiles, offset=8).astype(np.int64)


def _tile_rows(content: bytes, n_tiles: int) -> NDArray[np.int64]:
    """Return the smallest and largest row of each tile, from the leaves of the R-tree."""
    file, extents = BytesIO(content), b""
    _, n_levels = _numbers(file, "II")
    for _ in range(n_levels):
        extents = file.read(32 * _numbers(file, "Q")[0])
    found = np.frombuffer(extents, "<i8").astype(np.int64).reshape(-1, 4)[:, :2]
    if len(found) != n_tiles:
        raise ValueError("its tile extents do not match its tiles")
    return found


# A sparse array of TileDB whose tiles are decoded here.

_COLUMNS = ("soma_dim_0", "soma_dim_1", "soma_data")
_DAMAGE = (OSError, ValueError, OverflowError, MemoryError, RuntimeError, struct.error, zlib.error)


def tiled_csr(
    array: Any,
    folder: Path,
    name: str,
    timestamp: int,
    joinids: NDArray[np.int64] | None,
    n_columns: int,
) -> tuple[_tiles.TiledCsr, float] | None:
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
        See `_tiles.TiledCsr`.

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
    dims, dtypes = json.loads(options.dims), [np.dtype(np.int64), np.dtype(np.int64), dtype]
    block_rows, block_columns = (int(dims[each]["tile"]) for each in _COLUMNS[:2])
    if block_rows > _tiles.MOST_BAND_ROWS:
        raise UnknownLayoutError(
            f"its blocks have {block_rows} rows, above {_tiles.MOST_BAND_ROWS}"
        )
    stored = dims | json.loads(options.attrs)
    filters = [
        _filters(stored[each], own.itemsize) for each, own in zip(_COLUMNS, dtypes, strict=True)
    ]
    try:
        names = fragments_at(folder, timestamp)
        if not names:
            return None
        read = [read_fragment(folder, each, options.capacity) for each in names]
        found = sorted(read, key=lambda each: each.rows)
        if any(first.rows[1] >= second.rows[0] for first, second in itertools.pairwise(found)):
            raise UnknownLayoutError("several of its fragments have the same rows")
        files = files_in(
            folder, [f"{FRAGMENTS}/{each.name}/{file}" for file in FILES for each in found]
        )
        expected = np.array([each.bounds[:, -1, 1] for each in found]).T.ravel()
        if (files.sizes(np.arange(expected.size)) != expected).any():
            raise UnknownLayoutError("the size of a file differs from its metadata")
    except _DAMAGE as error:
        raise UnknownLayoutError("its metadata cannot be read") from error
    fragment_rows = np.array([each.rows for each in found], np.int64)
    tiles = _tiles.Tiles(
        fragment_rows=fragment_rows,
        first_tiles=np.cumsum([0, *(len(each.tile_rows) for each in found)], dtype=np.int64),
        rows=np.concatenate([each.tile_rows for each in found]),
        n_elements=np.concatenate([each.n_elements for each in found]),
        bounds=np.concatenate([each.bounds for each in found], axis=1),
        capacity=options.capacity,
        block_rows=block_rows,
    )
    chunks = [
        _tiles.TileChunks(
            f"{name}/{column}", tiles, k, dtypes[k], codec=codec, shuffled=shuffled, files=files
        )
        for k, (column, (codec, shuffled)) in enumerate(zip(_COLUMNS, filters, strict=True))
    ]
    rows, columns, values = chunks
    tiled = _tiles.TiledCsr(rows, columns, values, joinids, n_columns)
    n_blocks = -(-n_columns // block_columns)
    of_row = tiles.n_elements.sum() / ((fragment_rows[-1, 1] + 1) * n_blocks)
    rows_per_chunk = min(columns.chunk_elements / max(1.0, of_row), block_rows)
    return tiled, max(1.0, rows_per_chunk)
