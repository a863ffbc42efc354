"""Cells in objects of other libraries: in memory, or where these objects locate them."""

from cellfeed._sources._in_memory._objects import locations_or_sources
from cellfeed._sources._in_memory._source import AnnDataObjectSource

__all__ = ["AnnDataObjectSource", "locations_or_sources"]
