"""CSR matrices in uncompressed files, as BioNeMo SCDL and SciPy write them."""

from cellfeed._sources._memory_maps._source import MemoryMapSource
from cellfeed._sources._memory_maps._storage import MEMORY_MAPS, SCDL

__all__ = ["MEMORY_MAPS", "SCDL", "MemoryMapSource"]
