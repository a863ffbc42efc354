"""Base classes of sources, and the registry of storages."""

from cellfeed._sources._base._arrow import import_arrow, to_frame
from cellfeed._sources._base._chunked import (
    ChunkedCsr,
    ChunkedDense,
    ChunkedRagged,
    read_ragged,
    why_not_cast,
)
from cellfeed._sources._base._direct import DirectCsr
from cellfeed._sources._base._flat import FileNames, FlatCsr
from cellfeed._sources._base._libraries import library
from cellfeed._sources._base._source import Layout, Source, StoredElement
from cellfeed._sources._base._storages import (
    Storage,
    StorageFacts,
    built_in,
    find_storage,
    open_location,
    other_format,
    register,
    select_elements,
    storage_of,
    suffixes,
)

__all__ = [
    "ChunkedCsr",
    "ChunkedDense",
    "ChunkedRagged",
    "DirectCsr",
    "FileNames",
    "FlatCsr",
    "Layout",
    "Source",
    "Storage",
    "StorageFacts",
    "StoredElement",
    "built_in",
    "find_storage",
    "import_arrow",
    "library",
    "open_location",
    "other_format",
    "read_ragged",
    "register",
    "select_elements",
    "storage_of",
    "suffixes",
    "to_frame",
    "why_not_cast",
]
