"""Where rows come from: one protocol, one file per storage."""

from cellfeed._sources._anndata import ANNDATA, open_sources
from cellfeed._sources._base import (
    ChunkedCsr,
    ChunkedDense,
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

__all__ = [
    "ChunkedCsr",
    "ChunkedDense",
    "DirectCsr",
    "Layout",
    "PostgresSource",
    "SomaSource",
    "Source",
    "Storage",
    "StoredElement",
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
