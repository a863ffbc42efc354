"""Where rows come from: one protocol, one file per storage."""

from cellfeed._sources._anndata import ANNDATA, open_sources
from cellfeed._sources._base import (
    ChunkedCsr,
    ChunkedDense,
    Layout,
    Source,
    Storage,
    StoredElement,
    find_storage,
    open_location,
    register,
    storage_of,
    suffixes,
)

__all__ = [
    "ChunkedCsr",
    "ChunkedDense",
    "Layout",
    "Source",
    "Storage",
    "StoredElement",
    "find_storage",
    "open_location",
    "open_sources",
    "register",
    "storage_of",
    "suffixes",
]

register(ANNDATA)
