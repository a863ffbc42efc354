"""TileDB-SOMA experiments: sparse arrays are decoded here, tiledbsoma reads everything else."""

from cellfeed.storages.soma._source import SOMA, SomaSource

__all__ = ["SOMA", "SomaSource"]
