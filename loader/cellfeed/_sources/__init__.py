"""Sources of rows: one protocol, one folder per storage."""

from cellfeed._sources._anndata import ANNDATA, open_sources
from cellfeed._sources._base import (
    ChunkedCsr,
    ChunkedDense,
    ChunkedRagged,
    DirectCsr,
    Layout,
    Source,
    Storage,
    StoredElement,
    built_in,
    find_storage,
    open_location,
    register,
    select_elements,
    storage_of,
    suffixes,
)
from cellfeed._sources._cellstream import CELLSTREAM
from cellfeed._sources._huggingface import HUGGINGFACE, HuggingFaceSource
from cellfeed._sources._in_memory import AnnDataObjectSource, locations_or_sources
from cellfeed._sources._memory_maps import MEMORY_MAPS, SCDL, MemoryMapSource
from cellfeed._sources._postgres import POSTGRES, PostgresSource
from cellfeed._sources._soma import SOMA, SomaSource
from cellfeed._sources._tokens import TOKENS, Span, TokenStream, TokenStreamWriter

__all__ = [
    "AnnDataObjectSource",
    "ChunkedCsr",
    "ChunkedDense",
    "ChunkedRagged",
    "DirectCsr",
    "HuggingFaceSource",
    "Layout",
    "MemoryMapSource",
    "PostgresSource",
    "SomaSource",
    "Source",
    "Span",
    "Storage",
    "StoredElement",
    "TokenStream",
    "TokenStreamWriter",
    "built_in",
    "find_storage",
    "locations_or_sources",
    "open_location",
    "open_sources",
    "register",
    "select_elements",
    "storage_of",
    "suffixes",
]

register(ANNDATA)
register(SOMA)
register(POSTGRES)
register(HUGGINGFACE)
register(MEMORY_MAPS)
register(SCDL)
register(CELLSTREAM)
register(TOKENS)
