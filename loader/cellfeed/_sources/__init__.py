"""Where rows come from: one protocol, one file per storage."""

from cellfeed._sources._anndata import is_zarr, open_sources
from cellfeed._sources._base import Layout, Source, StoredElement

__all__ = ["Layout", "Source", "StoredElement", "is_zarr", "open_sources"]
