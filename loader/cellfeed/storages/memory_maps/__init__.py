"""CSR matrices in memory-mapped files: of BioNeMo SCDL, or as ``.npy``."""

from cellfeed.storages.memory_maps._source import MEMORY_MAPS, SCDL, MemoryMapSource

__all__ = ["MEMORY_MAPS", "SCDL", "MemoryMapSource"]
