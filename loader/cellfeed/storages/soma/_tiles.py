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
from cellfeed.rows import SparseChunks

Ints = NDArray[np.int64]

_N_CHUNKS = struct.Struct("<Q")
_HEAD = struct.Struct("<III")  # bytes before and after filters, and of metadata
_PAIR = struct.Struct("<II")
_CHUNK_BYTES = 1 << 16  # largest size of a chunk before its filters, always the default
_TILES_AT_ONCE = 16  # whose heads are read together


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The tiles of an array, of all fragments; no row is in two fragments.

    Parameters
    ----------
    fragment_rows
        First and last row of each fragment, ascending, int64, shape (n_fragments, 2).
    first_tiles
        First tile of each fragment, and the total number of tiles, int64, shape (n_fragments + 1,).
    rows
        Smallest and largest row of each tile, int64, shape (n_tiles, 2).
    n_elements
        Number of its elements, at most ``capacity``, int64, shape (n_tiles,).
    bounds
        In the files of rows, of columns and of values, the first byte of each tile and the one
        after its last, int64, shape (3, n_tiles, 2).
    capacity
        Number of elements in a full tile.
    block_rows
        Number of rows in a block, at most `MOST_BAND_ROWS`.
    """

    fragment_rows: Ints
    first_tiles: Ints
    rows: Ints
    n_elements: Ints
    bounds: Ints
    capacity: int
    block_rows: int


class TileChunks:
    """An array in tiles, and the locations of its chunks.

    Those of a tile are read the first time that they are asked for.

    Elements are numbered as if every tile were full, and its last chunk as well: the first
    element of a tile is ``padded`` after that of the tile before.

    Parameters
    ----------
    name
        Name of the array in messages.
    tiles, number
        The tiles, and the number of the array in their ``bounds``.
    dtype
        Native dtype of the elements.
    codec, shuffled
        Compression, the last filter; see `chunk_codec`. And whether bytes are shuffled before.
    files
        The files of all arrays, each with one for each fragment.

    Attributes
    ----------
    tiles
        The tiles.
    chunk_elements
        Number of elements in a whole chunk.
    padded
        Number of element numbers per tile.
    array
        The array, whose elements have padded numbers.
    """

    def __init__(
        self,
        name: str,
        tiles: Tiles,
        number: int,
        dtype: np.dtype[Any],
        *,
        codec: int,
        shuffled: bool,
        files: ByteStore,
    ) -> None:
        self.chunk_elements = _CHUNK_BYTES // dtype.itemsize
        self._per_tile = -(-tiles.capacity // self.chunk_elements)
        self.padded = self._per_tile * self.chunk_elements
        n_fragments, n_tiles = len(tiles.fragment_rows), len(tiles.rows)
        of_fragments = np.arange(n_fragments) + number * n_fragments
        self.file_of_tile = np.repeat(of_fragments, np.diff(tiles.first_tiles))
        self.tiles, self._bounds = tiles, tiles.bounds[number]
        self._is_compressed, self._files = codec != STORED, files
        self._is_listed = np.zeros(n_tiles, np.bool_)
        self._offsets = np.zeros(n_tiles * self._per_tile, np.int64)
        self._sizes = np.zeros(n_tiles * self._per_tile, np.int32)
        self.array = ChunkedArray(
            name=name,
            shape=(self.padded * n_tiles,),
            dtype=dtype,
            chunk_shape=(self.chunk_elements,),
            codec=codec,
            shuffled=shuffled,
            locations=self,
            files=files,
        )

    def starts(self, elements: Ints) -> Ints:
        """Return the padded numbers of elements that are numbered as if every tile were full."""
        return elements + elements // self.tiles.capacity * (self.padded - self.tiles.capacity)

    def locate(self, chunks: Ints) -> Located:
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
            files=self.file_of_tile[tiles],
            offsets=self._offsets[chunks],
            sizes=self._sizes[chunks].astype(np.int64),
            flags=np.zeros(len(chunks), np.int64),
            decoded_bytes=n_elements * self.array.dtype.itemsize,
        )

    def _list(self, tiles: Ints) -> None:
        """Read the positions of the chunks of tiles."""
        name = self.array.name
        for first in range(0, tiles.size, _TILES_AT_ONCE):
            some = tiles[first : first + _TILES_AT_ONCE]
            files, bounds = self.file_of_tile[some], self._bounds[some]
            try:
                read = self._files.read_ranges(files, bounds[:, 0].copy(), np.diff(bounds)[:, 0])
            except OSError as error:
                where = self._files.location_of(int(files[0]))
                msg = f"{where}: `{name}` cannot be read ({error.strerror or error})"
                raise FormatError(f"{msg}; check the disk and its permissions") from error
            for tile, content in zip(some.tolist(), read, strict=True):
                try:
                    self._list_chunks(tile, b"" if content is None else bytes(content))
                except (ValueError, struct.error) as error:
                    where = self._files.location_of(int(self.file_of_tile[tile]))
                    msg = f"{where}: `{name}`, tile at byte {self._bounds[tile, 0]}: {error}"
                    raise FormatError(f"{msg}; the file is damaged, copy it again") from error
            self._is_listed[some] = True

    def _list_chunks(self, tile: int, content: bytes) -> None:
        itemsize = self.array.dtype.itemsize
        n_bytes, most = int(self.tiles.n_elements[tile]) * itemsize, self.chunk_elements * itemsize
        chunks = np.array([*chunks_of(content, 0, is_compressed=self._is_compressed)]).reshape(
            -1, 4
        )
        sizes = [min(most, left) for left in range(n_bytes, 0, -most)]
        if chunks[:, 0].tolist() != sizes:
            raise ValueError(
                f"it has {len(chunks)} chunks, but {len(sizes)} of other sizes expected"
            )
        if chunks[-1, 3] != len(content):
            raise ValueError(f"it has {len(content) - chunks[-1, 3]} bytes after its chunks")
        own = slice(tile * self._per_tile, tile * self._per_tile + len(sizes))
        self._offsets[own] = self._bounds[tile, 0] + chunks[:, 1]
        self._sizes[own] = chunks[:, 2]


def chunks_of(
    content: bytes, position: int, *, is_compressed: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the chunks of a tile: decoded size, position and size of the elements, and the end.

    Parameters
    ----------
    content, position
        Bytes with the tile, and its position there.
    is_compressed
        Whether the last filter is a compression, which has elements in parts, here always one.

    Raises
    ------
    ValueError, struct.error
        The tile is damaged.
    """
    (n_chunks,) = _N_CHUNKS.unpack_from(content, position)
    position += _N_CHUNKS.size
    for _ in range(n_chunks):
        decoded, size, n_metadata = _HEAD.unpack_from(content, position)
        metadata = position + _HEAD.size
        first, n_bytes = metadata + n_metadata, size
        position = first + size
        if is_compressed:
            n_others, n_parts = _PAIR.unpack_from(content, metadata)
            if n_parts != 1:
                raise ValueError(f"it has a chunk of {n_parts} parts, but 1 expected")
            for k in range(n_others):  # metadata of other filters
                first += _PAIR.unpack_from(content, metadata + _PAIR.size * (k + 1))[1]
            n_bytes, size = _PAIR.unpack_from(content, metadata + _PAIR.size * (n_others + 1))
        if n_bytes != decoded:
            raise ValueError(f"it has {n_bytes} bytes in a chunk of {decoded}")
        if first + size > position or position > len(content):
            raise ValueError("a chunk exceeds its end")
        yield decoded, first, size, position


# Locating rows in tiles of TileDB, whose elements are stored with their row numbers.
#
# Elements are ordered by blocks of rows, in each of these by blocks of columns, and only then by
# row, so a row is in as many extents as there are blocks of columns. These are located when a row
# of their band is first requested, from the row numbers of all elements of the band.

MOST_BAND_ROWS = (1 << 16) - 1  # and elements of a run
_BAND_ROWS = 2048  # blocks with fewer rows are taken together
_MOST_BANDS = 1024  # that are cached: 4 bytes for each row and block of columns
_DECODED_AT_ONCE = 8  # tiles whose rows are decoded together
_NONE = np.empty(0, np.uint16)


class TiledCsr(SparseChunks):
    """Rows of a sparse array of TileDB.

    The bands that were used last are cached.

    Parameters
    ----------
    rows, columns, values
        Row numbers (int64), columns and values of its elements.
    joinids
        The row of the array for each row, ascending, int64; None if they are the same.
    n_columns
        Number of columns.
    """

    def __init__(
        self,
        rows: TileChunks,
        columns: TileChunks,
        values: TileChunks,
        joinids: Ints | None,
        n_columns: int,
    ) -> None:
        self._made_of = rows, columns, values, joinids, n_columns
        self._rows, self._columns, self._values, self._joinids, self.n_columns = self._made_of
        self.indices, self.data, self._tiles = columns.array, values.array, rows.tiles
        blocks = max(1, _BAND_ROWS // self._tiles.block_rows)
        self._band_rows = blocks * self._tiles.block_rows
        self._band = lru_cache(_MOST_BANDS)(self._read)

    def __reduce__(self) -> Any:
        return TiledCsr, self._made_of

    def extents(self, rows: Ints) -> Extents:
        """See `SparseChunks`."""
        from cellfeed.storages.soma import _kernels as kernels  # noqa: PLC0415 - it imports numba

        rows = rows if self._joinids is None else self._joinids[rows]
        fragment_rows = self._tiles.fragment_rows
        fragments = np.searchsorted(fragment_rows[:, 0], rows, side="right") - 1
        there = np.flatnonzero(fragments >= 0)
        there = there[rows[there] <= fragment_rows[fragments[there], 1]]
        keys = np.stack([fragments[there], rows[there] // self._band_rows], axis=1)
        changes = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
        lengths = np.zeros(rows.size, np.int64)
        tables = [np.empty((0, kernels.N_ROW_PIECE_COLUMNS), np.int64)]
        for own in np.split(there, changes) if there.size else ():
            number = int(rows[own[0]]) // self._band_rows
            band = self._band(int(fragments[own[0]]), number)
            places = np.full(self._band_rows, -1, np.int32)
            places[rows[own] - number * self._band_rows] = own
            table = np.empty((band[0].size, kernels.N_ROW_PIECE_COLUMNS), np.int64)
            n = kernels.find_row_pieces(*band, places, lengths, table)
            tables.append(table[:n].copy())
        of_row, firsts, counts, within = np.ascontiguousarray(np.concatenate(tables).T)
        return Extents(
            lengths=lengths,
            firsts=self._values.starts(firsts),
            index_firsts=self._columns.starts(firsts),
            counts=counts,
            rows=of_row,
            within=within,
        )

    def _read(
        self, fragment: int, number: int
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint16], int]:
        """Find the runs of a band of rows.

        Returns
        -------
        The row of each run, relative to the first row of the band; its number of elements; and the
        number of the first element of the first run, as if every tile were full.
        """
        tiles, low = self._tiles, number * self._band_rows
        first_tile, stop_tile = tiles.first_tiles[fragment : fragment + 2]
        bands = tiles.rows[first_tile:stop_tile] // self._band_rows
        first = int(first_tile + np.searchsorted(bands[:, 1], number, side="left"))
        stop = int(first_tile + np.searchsorted(bands[:, 0], number, side="right"))
        first_element, found = first * tiles.capacity, list[tuple[NDArray[np.uint16], ...]]()
        for begin in range(first, stop, _DECODED_AT_ONCE):
            end = min(begin + _DECODED_AT_ONCE, stop)
            counts = tiles.n_elements[begin:end]
            rows = np.empty(int(counts.sum()), np.int64)
            offsets = (np.cumsum(counts) - counts) * rows.itemsize
            starts = self._rows.starts(np.arange(begin, end) * tiles.capacity)
            reads = self._rows.array.reads_of_ranges(starts, counts, offsets, rows.dtype)
            reads.run(np.array([rows.ctypes.data], np.int64))
            rows -= low
            skipped = int(np.argmax(rows >= 0)) if rows.size and rows.max() >= 0 else rows.size
            others = np.flatnonzero((rows[skipped:] < 0) | (rows[skipped:] >= self._band_rows))
            done = skipped + int(others[0]) if others.size else rows.size
            is_next = done == rows.size or rows[done] >= 0
            if (skipped and begin > first) or (done < rows.size and end < stop) or not is_next:
                array = self._rows.array
                where = array.files.location_of(int(self._rows.file_of_tile[begin]))
                msg = f"{where}: `{array.name}`: rows are not in order"
                raise FormatError(f"{msg}; the file is damaged, copy it again")
            first_element += skipped
            own = rows[skipped:done]
            begins = np.diff(own, prepend=-1) != 0
            begins[-skipped % tiles.capacity :: tiles.capacity] = True  # in each tile
            begins[::MOST_BAND_ROWS] = True  # so that 16 bits suffice for lengths
            firsts = np.flatnonzero(begins)
            n_elements = np.diff(firsts, append=own.size)
            found.append((own[firsts].astype(np.uint16), n_elements.astype(np.uint16)))
        own_rows, lengths = zip(*found, strict=True) if found else ([_NONE], [_NONE])
        return np.concatenate(own_rows), np.concatenate(lengths), first_element
