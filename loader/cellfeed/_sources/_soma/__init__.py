"""TileDB-SOMA experiments: sparse arrays are decoded here, tiledbsoma reads everything else."""

from cellfeed._sources._soma._source import SomaSource
from cellfeed._sources._soma._storage import SOMA

__all__ = ["SOMA", "SomaSource"]
