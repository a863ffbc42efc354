"""Decoding compressed chunks into rows in memory, without the GIL.

A `ChunkedArray` describes the locations and the encoding of the chunks of one stored array. From
ranges of elements and their destination addresses, it makes `ChunkReads`, which several threads
process together: they read, decompress, and copy each element once, to its destination.
"""

from cellfeed.decode import _kernels as kernels
from cellfeed.decode._array import (
    CHUNK_ELEMENTS,
    ChunkedArray,
    ChunkTable,
    Extents,
    FileExtents,
    Located,
    Pieces,
    RowRanges,
    check_grid,
    chunk_codec,
    chunk_grid,
    pieced_array,
)
from cellfeed.decode._decoder import Counter, Counters, Decoder, SlowRead, Verify
from cellfeed.decode._files import (
    FolderFiles,
    OpenFile,
    ZarrFiles,
    files_below,
    identity_of_files,
)
from cellfeed.decode._hdf5 import (
    hdf5_array,
    hdf5_codec,
    hdf5_has_checksums,
    hdf5_in_memory,
    hdf5_slow_read,
    hdf5_tables,
    longest_text,
)
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import (
    PARQUET_CODECS,
    STORED,
    can_cast,
    can_decode,
    function_addresses,
)
from cellfeed.decode._placing import (
    RowGroup,
    SelectedElements,
    ValueSteps,
    place_elements,
    place_selected,
    select_columns,
)
from cellfeed.decode._reads import ChunkReads, divide_reads, rows_of_coordinates
from cellfeed.decode._zarr import (
    ZarrLayout,
    expect_numcodecs,
    zarr_array,
    zarr_codec,
    zarr_has_checksums,
    zarr_layout,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "PARQUET_CODECS",
    "STORED",
    "ChunkReads",
    "ChunkTable",
    "ChunkedArray",
    "Counter",
    "Counters",
    "Decoder",
    "Extents",
    "FileExtents",
    "FolderFiles",
    "Located",
    "OpenFile",
    "Pieces",
    "RowGroup",
    "RowRanges",
    "SelectedElements",
    "SlowRead",
    "ValueSteps",
    "Verify",
    "ZarrFiles",
    "ZarrLayout",
    "can_cast",
    "can_decode",
    "check_grid",
    "chunk_codec",
    "chunk_grid",
    "divide_reads",
    "expect_numcodecs",
    "fields",
    "files_below",
    "function_addresses",
    "hdf5_array",
    "hdf5_codec",
    "hdf5_has_checksums",
    "hdf5_in_memory",
    "hdf5_slow_read",
    "hdf5_tables",
    "identity_of_files",
    "kernels",
    "longest_text",
    "pieced_array",
    "place_elements",
    "place_selected",
    "rows_of_coordinates",
    "select_columns",
    "zarr_array",
    "zarr_codec",
    "zarr_has_checksums",
    "zarr_layout",
]
