"""Decoding compressed chunks into rows in memory, without the GIL.

A `ChunkedArray` describes the locations and the encoding of the chunks of one stored array. From
ranges of elements and their destination addresses, it makes `ChunkReads`, which several threads
process together: they read, decompress, and copy each element once, to its destination.
"""

from cellfeed._decode import _kernels as kernels
from cellfeed._decode._array import (
    CHUNK_ELEMENTS,
    ChunkedArray,
    ChunkTable,
    Extents,
    FileExtents,
    Pieces,
    RowRanges,
    check_grid,
    chunk_codec,
    chunk_grid,
    pieced_array,
)
from cellfeed._decode._decoder import Counter, Counters, Decoder, SlowRead, Verify, check_verify
from cellfeed._decode._files import (
    FolderFiles,
    OpenFile,
    ZarrFiles,
    identity_of_files,
    share_of_descriptors,
)
from cellfeed._decode._footers import ColumnChunks
from cellfeed._decode._hdf5 import (
    hdf5_array,
    hdf5_codec,
    hdf5_has_checksums,
    hdf5_in_memory,
    hdf5_slow_read,
    hdf5_tables,
)
from cellfeed._decode._kernels._codecs import can_cast
from cellfeed._decode._lists import LIST_NUMBERS, Lists, list_numbers
from cellfeed._decode._placing import (
    RowGroup,
    SelectedElements,
    ValueSteps,
    place_elements,
    place_selected,
    select_columns,
)
from cellfeed._decode._reads import ChunkReads, divide_reads, rows_of_coordinates
from cellfeed._decode._tiles import (
    MOST_BAND_ROWS,
    Fragments,
    TileChunks,
    TileFilters,
    TileRows,
    Tiles,
    parts_of_chunk,
    tiled_array,
)
from cellfeed._decode._zarr import (
    ZarrLayout,
    expect_numcodecs,
    zarr_array,
    zarr_codec,
    zarr_has_checksums,
    zarr_layout,
)
