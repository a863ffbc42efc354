"""What a source is, and which storages there are."""

from cellfeed._sources._base._chunked import ChunkedCsr, ChunkedDense
from cellfeed._sources._base._direct import DirectCsr
from cellfeed._sources._base._libraries import library
from cellfeed._sources._base._source import Layout, Source, StoredElement
from cellfeed._sources._base._storages import (
    Storage,
    StorageFacts,
    built_in,
    find_storage,
    open_location,
    register,
    select_elements,
    storage_of,
    suffixes,
)

__all__ = [
    "ChunkedCsr",
    "ChunkedDense",
    "DirectCsr",
    "Layout",
    "Source",
    "Storage",
    "StorageFacts",
    "StoredElement",
    "built_in",
    "find_storage",
    "library",
    "open_location",
    "register",
    "select_elements",
    "storage_of",
    "suffixes",
]
