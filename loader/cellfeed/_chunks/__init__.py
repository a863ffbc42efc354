"""From compressed chunks to rows in memory, without the GIL.

A `ChunkedArray` knows where the chunks of one stored array lie and how they are encoded. Asked
for ranges of elements and the addresses that they go to, it gives `ChunkReads`, which many
threads work off together: read, decompress, and copy each element once, to its place.
"""

from cellfeed._chunks._array import ChunkedArray, ChunkTable, ContiguousChunks
from cellfeed._chunks._casts import can_cast
from cellfeed._chunks._hdf5 import hdf5_array
from cellfeed._chunks._reads import ChunkReads

__all__ = [
    "ChunkReads",
    "ChunkTable",
    "ChunkedArray",
    "ContiguousChunks",
    "can_cast",
    "hdf5_array",
]
