"""TileDB-SOMA experiments: sparse arrays decoded here, all else read by tiledbsoma."""

from cellfeed._sources._soma._source import SomaSource
from cellfeed._sources._soma._storage import SOMA

__all__ = ["SOMA", "SomaSource"]
