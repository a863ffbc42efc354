"""Where rows come from: one protocol, one file per storage."""

from cellfeed._sources._base import Layout, Source
from cellfeed._sources._open import open_sources
from cellfeed._sources._zarr_groups import is_zarr

__all__ = ["Layout", "Source", "is_zarr", "open_sources"]
