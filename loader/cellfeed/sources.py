"""Where cells are stored: what a source of another storage is written with.

A `Source` is cells in storage with their obs. Each of its arrays is a `StoredElement`, which
returns rows (`read_rows`) or lies in compressed chunks that are decoded here (`ChunkedCsr`,
`ChunkedDense`), whose bytes a `ByteStore` reads. A `Storage`, given to `register` or offered as an
entry point, lets `cellfeed.open_collection` open it.
"""

from cellfeed._bytes import Arrival, ByteStore, Location
from cellfeed._cells import CsrRows
from cellfeed._chunks import ChunkedArray, ChunkTable, chunk_codec
from cellfeed._runs import Runs, expand
from cellfeed._sources import (
    ChunkedCsr,
    ChunkedDense,
    Layout,
    Source,
    Storage,
    StoredElement,
    register,
)

__all__ = [
    "Arrival",
    "ByteStore",
    "ChunkTable",
    "ChunkedArray",
    "ChunkedCsr",
    "ChunkedDense",
    "CsrRows",
    "Layout",
    "Location",
    "Runs",
    "Source",
    "Storage",
    "StoredElement",
    "chunk_codec",
    "expand",
    "register",
]
