"""Where rows come from: one protocol, one file per storage."""

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
from cellfeed._sources._postgres import POSTGRES, PostgresSource
from cellfeed._sources._soma import SOMA, SomaSource
from cellfeed._sources._tokens import TOKENS, Span, TokenStream, TokenStreamWriter

__all__ = [
    "ChunkedCsr",
    "ChunkedDense",
    "ChunkedRagged",
    "DirectCsr",
    "Layout",
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
register(CELLSTREAM)
register(TOKENS)
