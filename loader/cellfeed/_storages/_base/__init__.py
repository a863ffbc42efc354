"""Base classes of sources, and the registry of storages."""

from cellfeed._rows import Layout
from cellfeed._storages._base._source import (
    ChunkedCsr,
    ChunkedDense,
    ChunkedRagged,
    DirectCsr,
    FileNames,
    FlatCsr,
    Source,
    StoredElement,
    read_ragged,
    why_not_cast,
)
from cellfeed._storages._base._storages import (
    Storage,
    StorageFacts,
    built_in,
    find_storage,
    import_arrow,
    library,
    open_location,
    other_format,
    register,
    select_elements,
    storage_of,
    suffixes,
    to_frame,
)
