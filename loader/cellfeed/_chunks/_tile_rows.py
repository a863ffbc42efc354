"""Locating rows in tiles of TileDB, whose elements are stored with their row numbers.

Elements are ordered by blocks of rows, in each of these by blocks of columns, and only then by
row, so a row is in as many pieces as there are blocks of columns. These are located when a row of
their band is first requested, from the row numbers of all elements of the band.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._array import ChunkedArray
from cellfeed._chunks._tiles import TileChunks, Tiles
from cellfeed._errors import FormatError

__all__ = ["MOST_BAND_ROWS", "Fragments", "RowsInTiles", "TileRows"]

MOST_BAND_ROWS = kernels.MOST_ROWS
_BAND_ROWS = 2048  # blocks with fewer rows are taken together
_MOST_BYTES = 256 << 20  # of runs that are kept: 4 bytes for each row and block of columns
_TILES_AT_ONCE = 8  # whose rows are decoded together


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


@dataclass(frozen=True, slots=True, eq=False)
class RowsInTiles:
    """Locations of rows; arrays are int64, with shape (n_pieces,) for pieces.

    Parameters
    ----------
    lengths
        Number of elements in each row, shape (n_rows,).
    rows
        Index of each piece's row.
    elements
        Number of its first element, as if every tile were full, ascending.
    counts
        Number of its elements, all in one tile.
    before
        Number of elements of its row before it.
    """

    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    elements: NDArray[np.int64]
    counts: NDArray[np.int64]
    before: NDArray[np.int64]


class TileRows:
    """Finds rows in tiles.

    Up to 256 MiB of runs are cached; beyond that, the least recently used ones are dropped.

    Parameters
    ----------
    array, chunks
        Array with the row number of each element, int64, and its chunks.
    tiles
        Locations of the tiles.
    fragments
        The fragments of the tiles.
    """

    def __init__(
        self, array: ChunkedArray, chunks: TileChunks, tiles: Tiles, fragments: Fragments
    ) -> None:
        self._array, self._chunks, self._tiles = array, chunks, tiles
        self._fragments = fragments
        blocks = max(1, _BAND_ROWS // fragments.block_rows)
        self._band_rows = blocks * fragments.block_rows
        self._kept = OrderedDict[tuple[int, int], _Band]()
        self._n_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_n_bytes": 0}

    def __call__(self, rows: NDArray[np.int64]) -> RowsInTiles:
        """Return the locations of rows.

        Parameters
        ----------
        rows
            Ascending, distinct rows, int64, shape (n_rows,).

        Raises
        ------
        FormatError
            A tile is damaged.
        """
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
        pieces = np.ascontiguousarray(np.concatenate(tables).T)
        return RowsInTiles(lengths, *pieces)

    def _band(self, fragment: int, number: int) -> "_Band":
        """Return the runs of a band of rows."""
        key = fragment, number
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        band = self._kept[key] = self._read(fragment, number)
        self._n_bytes += band.n_bytes
        while self._n_bytes > _MOST_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._n_bytes -= dropped.n_bytes
        return band

    def _read(self, fragment: int, number: int) -> "_Band":
        """Find the runs of a band of rows."""
        first_tile, stop_tile = self._fragments.first_tiles[fragment : fragment + 2]
        bands = self._fragments.tile_rows[first_tile:stop_tile] // self._band_rows
        first = int(first_tile + np.searchsorted(bands[:, 1], number, side="left"))
        stop = int(first_tile + np.searchsorted(bands[:, 0], number, side="right"))
        first_element, found = first * self._tiles.capacity, list[tuple[NDArray[np.uint16], ...]]()
        for begin in range(first, stop, _TILES_AT_ONCE):
            end = min(begin + _TILES_AT_ONCE, stop)
            rows = self._decoded(begin, end)
            runs = np.empty((2, rows.size), np.uint16)
            first_row = number * self._band_rows
            skipped, done, n = kernels.find_runs(
                rows, self._tiles.capacity, first_row, self._band_rows, runs[0], runs[1]
            )
            is_next = done == rows.size or rows[done] >= first_row + self._band_rows
            if (skipped and begin > first) or (done < rows.size and end < stop) or not is_next:
                where = self._array.files.location_of(int(self._tiles.files[begin]))
                msg = f"{where}: `{self._array.name}`: rows are not in order"
                raise FormatError(f"{msg}; the file is damaged, copy it again")
            first_element += skipped
            found.append((runs[0, :n].copy(), runs[1, :n].copy()))
        own_rows, lengths = zip(*found, strict=True) if found else ([_NONE], [_NONE])
        return _Band(first_element, np.concatenate(own_rows), np.concatenate(lengths))

    def _decoded(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the row of each element of the given tiles."""
        elements = np.arange(first, stop) * self._tiles.capacity
        counts = self._tiles.n_elements[first:stop]
        rows = np.empty(int(counts.sum()), np.int64)
        offsets = (np.cumsum(counts) - counts) * rows.itemsize
        starts = self._chunks.starts(elements)
        reads = self._array.reads_of_ranges(starts, counts, offsets, rows.dtype)
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

    @property
    def n_bytes(self) -> int:
        """Its memory in bytes."""
        return self.rows.nbytes + self.lengths.nbytes
