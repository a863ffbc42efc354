"""Where rows come from: one protocol, one file per storage."""

from cellfeed._sources._base import Layout, Source
from cellfeed._sources._h5ad import open_h5ad

__all__ = ["Layout", "Source", "open_h5ad"]
