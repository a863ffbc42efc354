"""Decoding compressed chunks into rows in memory, without the GIL.

A `ChunkedArray` describes the locations and the encoding of the chunks of one stored array. From
ranges of elements and their destination addresses, it makes `ChunkReads`, which several threads
process together: they read, decompress, and copy each element once, to its destination.
"""

from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._array import ChunkedArray, ChunkTable, ContiguousChunks, chunk_codec
from cellfeed._chunks._coordinates import rows_of_coordinates
from cellfeed._chunks._counters import Counter, Counters
from cellfeed._chunks._decoder import Decoder, Verify, check_verify
from cellfeed._chunks._dividing import divide_reads
from cellfeed._chunks._folder_files import FolderFiles, identity_of_files
from cellfeed._chunks._grid import check_grid, chunk_grid
from cellfeed._chunks._hdf5 import hdf5_array, hdf5_codec, hdf5_slow_read
from cellfeed._chunks._kept import KeptElements, kept_of
from cellfeed._chunks._kernels import can_cast
from cellfeed._chunks._numcodecs import expect_numcodecs
from cellfeed._chunks._pieces import CHUNK_ELEMENTS, Pieces, pieced_array
from cellfeed._chunks._placing import place_elements, place_kept
from cellfeed._chunks._reads import ChunkReads
from cellfeed._chunks._row_ranges import RowExtents, RowRanges
from cellfeed._chunks._slow_read import SlowRead
from cellfeed._chunks._tile_rows import MOST_BAND_ROWS, Fragments, RowsInTiles, TileRows
from cellfeed._chunks._tiles import (
    TileChunks,
    TileFilters,
    Tiles,
    parts_of_chunk,
    tiled_array,
)
from cellfeed._chunks._transforming import RowGroup, ValueSteps
from cellfeed._chunks._zarr import zarr_array
from cellfeed._chunks._zarr_files import ZarrFiles
from cellfeed._chunks._zarr_layout import ZarrLayout, zarr_codec, zarr_layout

__all__ = [
    "CHUNK_ELEMENTS",
    "MOST_BAND_ROWS",
    "ChunkReads",
    "ChunkTable",
    "ChunkedArray",
    "ContiguousChunks",
    "Counter",
    "Counters",
    "Decoder",
    "FolderFiles",
    "Fragments",
    "KeptElements",
    "Pieces",
    "RowExtents",
    "RowGroup",
    "RowRanges",
    "RowsInTiles",
    "SlowRead",
    "TileChunks",
    "TileFilters",
    "TileRows",
    "Tiles",
    "ValueSteps",
    "Verify",
    "ZarrFiles",
    "ZarrLayout",
    "can_cast",
    "check_grid",
    "check_verify",
    "chunk_codec",
    "chunk_grid",
    "divide_reads",
    "expect_numcodecs",
    "hdf5_array",
    "hdf5_codec",
    "hdf5_slow_read",
    "identity_of_files",
    "kept_of",
    "kernels",
    "parts_of_chunk",
    "pieced_array",
    "place_elements",
    "place_kept",
    "rows_of_coordinates",
    "tiled_array",
    "zarr_array",
    "zarr_codec",
    "zarr_layout",
]
