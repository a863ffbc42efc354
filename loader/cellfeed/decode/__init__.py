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
    chunk_codec,
    pieced_array,
)
from cellfeed.decode._decoder import Counter, Counters, Decoder, SlowRead, Verify
from cellfeed.decode._kernels._codecs import (
    STORED,
    can_cast,
    can_decode,
    function_addresses,
)
from cellfeed.decode._placing import ValueSteps
from cellfeed.decode._reads import ChunkReads
from cellfeed.decode._zarr import expect_numcodecs

__all__ = [
    "CHUNK_ELEMENTS",
    "STORED",
    "ChunkReads",
    "ChunkTable",
    "ChunkedArray",
    "Counter",
    "Counters",
    "Decoder",
    "Extents",
    "FileExtents",
    "Located",
    "Pieces",
    "RowRanges",
    "SlowRead",
    "ValueSteps",
    "Verify",
    "can_cast",
    "can_decode",
    "chunk_codec",
    "expect_numcodecs",
    "function_addresses",
    "kernels",
    "pieced_array",
]
