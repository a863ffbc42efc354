"""Base classes for sources, which read cells from a storage of your own.

A `Source` is a set of stored cells with their obs. Each of its arrays is a `StoredElement`. Either
it returns rows itself (`read_rows`), or cellfeed decodes its compressed chunks (`ChunkedCsr`,
`ChunkedDense`, `ChunkedRagged`), whose bytes a `ByteStore` reads. A `Storage`, passed to `register`
or declared as an entry point, lets `cellfeed.open_collection` open it.
"""

from cellfeed._runs import Runs, expand
from cellfeed.bytes import Arrival, ByteStore, Location
from cellfeed.decode import ChunkedArray, ChunkTable, chunk_codec
from cellfeed.rows import CsrRows, RaggedRows
from cellfeed.sources._registry import Storage, register
from cellfeed.sources._source import (
    ChunkedCsr,
    ChunkedDense,
    ChunkedRagged,
    Layout,
    Source,
    StoredElement,
)

__all__ = [
    "Arrival",
    "ByteStore",
    "ChunkTable",
    "ChunkedArray",
    "ChunkedCsr",
    "ChunkedDense",
    "ChunkedRagged",
    "CsrRows",
    "Layout",
    "Location",
    "RaggedRows",
    "Runs",
    "Source",
    "Storage",
    "StoredElement",
    "chunk_codec",
    "expand",
    "register",
]
