"""Tiles of TileDB as chunks: each tile contains several, each compressed separately.

See ``format_spec/tile.md`` of TileDB. A tile begins with the number of its chunks. A chunk has a
header with its size before and after filters, and the metadata of its filters.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import ByteStore
from cellfeed.decode import STORED, ChunkedArray, Extents, Located
from cellfeed.extending import FormatError

_N_CHUNKS = struct.Struct("<Q")
_HEAD = struct.Struct("<III")  # bytes before and after filters, and of metadata
_PAIR = struct.Struct("<II")
_CHUNK_BYTES = 1 << 16  # largest size of a chunk before its filters, always the default
_TILES_AT_ONCE = 16  # whose heads are read together


@dataclass(frozen=True, slots=True)
class TileFilters:
    """How chunks of tiles are encoded.

    Parameters
    ----------
    codec
        Compression, the last filter; see `chunk_codec`.
    shuffled
        Whether bytes are shuffled before compression.
    """

    codec: int
    shuffled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Locations of the tiles of an array; arrays are int64, shape (n_tiles,).

    Parameters
    ----------
    files
        Number of each tile's file.
    offsets, ends
        Its first byte there, and the byte after its last.
    n_elements
        Number of its elements, at most ``capacity``.
    capacity
        Number of elements in a full tile.
    """

    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    ends: NDArray[np.int64]
    n_elements: NDArray[np.int64]
    capacity: int


class TileChunks:
    """An array in tiles, and the locations of its chunks.

    Those of a tile are read the first time that they are asked for.

    Elements are numbered as if every tile were full, and its last chunk as well: the first
    element of a tile is ``padded`` after that of the tile before.

    Parameters
    ----------
    name
        Name of the array in messages.
    tiles
        Locations of the tiles.
    dtype
        Native dtype of the elements.
    filters
        Encoding of the chunks.
    files
        The files.

    Attributes
    ----------
    tiles
        Locations of the tiles.
    chunk_elements
        Number of elements in a whole chunk.
    padded
        Number of element numbers per tile.
    array
        The array, whose elements have padded numbers.
    """

    def __init__(
        self, name: str, tiles: Tiles, dtype: np.dtype[Any], filters: TileFilters, files: ByteStore
    ) -> None:
        self.chunk_elements = _CHUNK_BYTES // dtype.itemsize
        self._per_tile = -(-tiles.capacity // self.chunk_elements)
        self.padded = self._per_tile * self.chunk_elements
        self._name, self.tiles, self._files = name, tiles, files
        self._itemsize, self._filters = dtype.itemsize, filters
        self._is_listed = np.zeros(tiles.offsets.size, np.bool_)
        self._offsets = np.zeros(tiles.offsets.size * self._per_tile, np.int64)
        self._sizes = np.zeros(tiles.offsets.size * self._per_tile, np.int32)
        self.array = ChunkedArray(
            name=name,
            shape=(self.padded * tiles.offsets.size,),
            dtype=dtype,
            chunk_shape=(self.chunk_elements,),
            codec=filters.codec,
            shuffled=filters.shuffled,
            locations=self,
            files=files,
        )

    def starts(self, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the padded numbers of elements that are numbered as if every tile were full."""
        return elements + elements // self.tiles.capacity * (self.padded - self.tiles.capacity)

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Return the locations of the chunks with these numbers.

        Raises
        ------
        FormatError
            A tile is damaged.
        """
        tiles = chunks // self._per_tile
        touched = np.unique(tiles)
        self._list(touched[~self._is_listed[touched]])
        before = chunks % self._per_tile * self.chunk_elements
        n_elements = np.clip(self.tiles.n_elements[tiles] - before, 0, self.chunk_elements)
        return Located(
            files=self.tiles.files[tiles],
            offsets=self._offsets[chunks],
            sizes=self._sizes[chunks].astype(np.int64),
            flags=np.zeros(len(chunks), np.int64),
            decoded_bytes=n_elements * self._itemsize,
        )

    def _list(self, tiles: NDArray[np.int64]) -> None:
        """Read the positions of the chunks of tiles."""
        of = self.tiles
        for first in range(0, tiles.size, _TILES_AT_ONCE):
            some = tiles[first : first + _TILES_AT_ONCE]
            files, begins = of.files[some], of.offsets[some]
            try:
                read = self._files.read_ranges(files, begins, of.ends[some] - begins)
            except OSError as error:
                where = self._files.location_of(int(files[0]))
                msg = f"{where}: `{self._name}` cannot be read ({error.strerror or error})"
                raise FormatError(f"{msg}; check the disk and its permissions") from error
            for tile, content in zip(some.tolist(), read, strict=True):
                try:
                    self._list_chunks(tile, b"" if content is None else bytes(content))
                except (ValueError, struct.error) as error:
                    where = self._files.location_of(int(of.files[tile]))
                    msg = f"{where}: `{self._name}`, tile at byte {of.offsets[tile]}: {error}"
                    raise FormatError(f"{msg}; the file is damaged, copy it again") from error
            self._is_listed[some] = True

    def _list_chunks(self, tile: int, content: bytes) -> None:
        left = int(self.tiles.n_elements[tile]) * self._itemsize
        most = self.chunk_elements * self._itemsize
        (n_chunks,) = _N_CHUNKS.unpack_from(content)
        if n_chunks != -(-left // most):
            raise ValueError(f"it has {n_chunks} chunks, but {-(-left // most)} expected")
        number, position = tile * self._per_tile, _N_CHUNKS.size
        for _ in range(n_chunks):
            decoded, first, size, position = _chunk_at(content, position, self._filters)
            if decoded != min(left, most):
                raise ValueError(
                    f"it has a chunk of {decoded} bytes, but {min(left, most)} expected"
                )
            self._offsets[number] = self.tiles.offsets[tile] + first
            self._sizes[number] = size
            left, number = left - decoded, number + 1
        if position != len(content):
            raise ValueError(f"it has {len(content) - position} bytes after its chunks")


def _chunk_at(content: bytes, position: int, filters: TileFilters) -> tuple[int, int, int, int]:
    """Return the decoded size of a chunk, the position and size of its elements, and its end."""
    decoded, n_filtered, n_metadata = _HEAD.unpack_from(content, position)
    begin = position + _HEAD.size
    first = begin + n_metadata
    end = first + n_filtered
    if end > len(content):
        raise ValueError("a chunk exceeds its end")
    if filters.codec == STORED:
        if n_filtered != decoded:
            raise ValueError(f"it has {n_filtered} bytes in a chunk of {decoded}")
        return decoded, first, n_filtered, end
    (part,) = parts_of_chunk(content, begin, first)
    if part[2] != decoded:
        raise ValueError(f"it has {part[2]} bytes in a chunk of {decoded}")
    if part[0] + part[1] > end:
        raise ValueError("a part exceeds its chunk")
    return decoded, part[0], part[1], end


def parts_of_chunk(content: bytes, metadata: int, first: int) -> Iterator[tuple[int, int, int]]:
    """Yield position, compressed size and decompressed size of each part of a chunk's elements.

    Parameters
    ----------
    content
        Bytes with the chunk.
    metadata, first
        Start of its metadata, and of its compressed bytes.
    """
    n_metadata, n_parts = _PAIR.unpack_from(content, metadata)
    for k in range(n_metadata + n_parts):
        decompressed, compressed = _PAIR.unpack_from(content, metadata + _PAIR.size * (k + 1))
        if k >= n_metadata:  # what comes before are metadata of other filters
            yield first, compressed, decompressed
        first += compressed


# Locating rows in tiles of TileDB, whose elements are stored with their row numbers.
#
# Elements are ordered by blocks of rows, in each of these by blocks of columns, and only then by
# row, so a row is in as many extents as there are blocks of columns. These are located when a row
# of their band is first requested, from the row numbers of all elements of the band.

MOST_BAND_ROWS = (1 << 16) - 1  # and elements of a run
_BAND_ROWS = 2048  # blocks with fewer rows are taken together
_MOST_BANDS = 1024  # that are cached: 4 bytes for each row and block of columns
_DECODED_AT_ONCE = 8  # tiles whose rows are decoded together


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Rows and tiles that were written together; no row is in two fragments.

    Parameters
    ----------
    rows
        First and last row of each fragment, ascending, int64, shape (n_fragments, 2).
    first_tiles
        First tile of each fragment, and the total number of tiles, int64, shape (n_fragments + 1,).
    tile_rows
        Smallest and largest row of each tile, int64, shape (n_tiles, 2).
    block_rows
        Number of rows in a block, at most `MOST_BAND_ROWS`.
    """

    rows: NDArray[np.int64]
    first_tiles: NDArray[np.int64]
    tile_rows: NDArray[np.int64]
    block_rows: int


class TileRows:
    """Finds rows in tiles.

    The bands that were used last are cached.

    Parameters
    ----------
    chunks
        The row number of each element, int64.
    fragments
        The fragments of the tiles.
    """

    def __init__(self, chunks: TileChunks, fragments: Fragments) -> None:
        self._chunks, self._tiles, self._fragments = chunks, chunks.tiles, fragments
        blocks = max(1, _BAND_ROWS // fragments.block_rows)
        self._band_rows = blocks * fragments.block_rows
        self._band = lru_cache(_MOST_BANDS)(self._read)

    def __reduce__(self) -> Any:
        return TileRows, (self._chunks, self._fragments)

    def __call__(self, rows: NDArray[np.int64]) -> Extents:
        """Return where rows lie, with elements numbered as if every tile were full.

        Parameters
        ----------
        rows
            Ascending, distinct rows, int64, shape (n_rows,).

        Raises
        ------
        FormatError
            A tile is damaged.
        """
        from cellfeed.storages.soma import _kernels as kernels  # noqa: PLC0415 - it imports numba

        extents = self._fragments.rows
        fragments = np.searchsorted(extents[:, 0], rows, side="right") - 1
        there = np.flatnonzero(fragments >= 0)
        there = there[rows[there] <= extents[fragments[there], 1]]
        keys = np.stack([fragments[there], rows[there] // self._band_rows], axis=1)
        changes = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
        lengths = np.zeros(rows.size, np.int64)
        tables = [np.empty((0, kernels.N_ROW_PIECE_COLUMNS), np.int64)]
        for own in np.split(there, changes) if there.size else ():
            number = int(rows[own[0]]) // self._band_rows
            band = self._band(int(fragments[own[0]]), number)
            places = np.full(self._band_rows, -1, np.int32)
            places[rows[own] - number * self._band_rows] = own
            table = np.empty((band.rows.size, kernels.N_ROW_PIECE_COLUMNS), np.int64)
            n = kernels.find_row_pieces(band.rows, band.lengths, band.first, places, lengths, table)
            tables.append(table[:n].copy())
        of_row, firsts, counts, within = np.ascontiguousarray(np.concatenate(tables).T)
        return Extents(lengths=lengths, firsts=firsts, counts=counts, rows=of_row, within=within)

    def _read(self, fragment: int, number: int) -> "_Band":
        """Find the runs of a band of rows."""
        first_tile, stop_tile = self._fragments.first_tiles[fragment : fragment + 2]
        bands = self._fragments.tile_rows[first_tile:stop_tile] // self._band_rows
        first = int(first_tile + np.searchsorted(bands[:, 1], number, side="left"))
        stop = int(first_tile + np.searchsorted(bands[:, 0], number, side="right"))
        first_element, found = first * self._tiles.capacity, list[tuple[NDArray[np.uint16], ...]]()
        for begin in range(first, stop, _DECODED_AT_ONCE):
            end = min(begin + _DECODED_AT_ONCE, stop)
            rows = self._decoded(begin, end) - number * self._band_rows
            skipped = int(np.argmax(rows >= 0)) if rows.size and rows.max() >= 0 else rows.size
            others = np.flatnonzero((rows[skipped:] < 0) | (rows[skipped:] >= self._band_rows))
            done = skipped + int(others[0]) if others.size else rows.size
            is_next = done == rows.size or rows[done] >= 0
            if (skipped and begin > first) or (done < rows.size and end < stop) or not is_next:
                array = self._chunks.array
                where = array.files.location_of(int(self._tiles.files[begin]))
                msg = f"{where}: `{array.name}`: rows are not in order"
                raise FormatError(f"{msg}; the file is damaged, copy it again")
            first_element += skipped
            own = rows[skipped:done]
            begins = np.diff(own, prepend=-1) != 0
            begins[-skipped % self._tiles.capacity :: self._tiles.capacity] = True  # in each tile
            begins[::MOST_BAND_ROWS] = True  # so that 16 bits suffice for lengths
            firsts = np.flatnonzero(begins)
            n_elements = np.diff(firsts, append=own.size)
            found.append((own[firsts].astype(np.uint16), n_elements.astype(np.uint16)))
        own_rows, lengths = zip(*found, strict=True) if found else ([_NONE], [_NONE])
        return _Band(first_element, np.concatenate(own_rows), np.concatenate(lengths))

    def _decoded(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the row of each element of the given tiles."""
        elements = np.arange(first, stop) * self._tiles.capacity
        counts = self._tiles.n_elements[first:stop]
        rows = np.empty(int(counts.sum()), np.int64)
        offsets = (np.cumsum(counts) - counts) * rows.itemsize
        starts = self._chunks.starts(elements)
        reads = self._chunks.array.reads_of_ranges(starts, counts, offsets, rows.dtype)
        reads.run(np.array([rows.ctypes.data], np.int64))
        return rows


_NONE = np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """Runs of a band.

    Parameters
    ----------
    first
        Number of the first element of the first run, as if every tile were full.
    rows, lengths
        The row of each run, relative to the first row of the band, and its number of elements.
    """

    first: int
    rows: NDArray[np.uint16]
    lengths: NDArray[np.uint16]
