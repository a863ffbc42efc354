"""How TileDB stores sparse arrays: the part that is decoded here; TileDB reads the rest."""

from cellfeed._sources._soma._tiledb._array import tiled_csr
from cellfeed._sources._soma._tiledb._generic import UnknownLayoutError

__all__ = ["UnknownLayoutError", "tiled_csr"]
