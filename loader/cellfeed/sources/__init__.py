"""Base classes for sources, which read cells from a storage of your own.

A `Source` is a set of stored cells with their obs. Each of its arrays is a `StoredElement`. Either
it returns rows itself (`read_rows`), or cellfeed decodes its compressed chunks (`ChunkedCsr`,
`ChunkedDense`, `ChunkedRagged`), whose bytes a `ByteStore` reads. A `Storage`, passed to `register`
or declared as an entry point, lets `cellfeed.open_collection` open it.
"""

from cellfeed._runs import Runs, count_rows, expand, merge_consecutive, split_at
from cellfeed.bytes import Arrival, ByteStore, Location
from cellfeed.decode import ChunkedArray, ChunkTable, chunk_codec
from cellfeed.rows import CsrRows, RaggedRows
from cellfeed.sources._registry import (
    Storage,
    failures_named,
    first_line,
    library,
    open_location,
    register,
    select_elements,
    suffixes,
)
from cellfeed.sources._source import (
    ChunkedCsr,
    ChunkedDense,
    ChunkedElement,
    ChunkedRagged,
    FlatCsr,
    FoundCsr,
    Layout,
    ListedGenes,
    OpenedPerProcess,
    Source,
    StoredElement,
    WatchedFiles,
    as_names,
    as_text,
    files_in,
    fill,
    gene_names,
    read_ragged,
    threads_of_process,
    why_not_cast,
)

__all__ = [
    "Arrival",
    "ByteStore",
    "ChunkTable",
    "ChunkedArray",
    "ChunkedCsr",
    "ChunkedDense",
    "ChunkedElement",
    "ChunkedRagged",
    "CsrRows",
    "FlatCsr",
    "FoundCsr",
    "Layout",
    "ListedGenes",
    "Location",
    "OpenedPerProcess",
    "RaggedRows",
    "Runs",
    "Source",
    "Storage",
    "StoredElement",
    "WatchedFiles",
    "as_names",
    "as_text",
    "chunk_codec",
    "count_rows",
    "expand",
    "failures_named",
    "files_in",
    "fill",
    "first_line",
    "gene_names",
    "library",
    "merge_consecutive",
    "open_location",
    "read_ragged",
    "register",
    "select_elements",
    "split_at",
    "suffixes",
    "threads_of_process",
    "why_not_cast",
]
