"""How TileDB stores sparse arrays, as far as they are decoded here; the rest is left to it."""

from cellfeed._sources._soma._tiledb._array import tiled_csr
from cellfeed._sources._soma._tiledb._generic import UnknownLayoutError

__all__ = ["UnknownLayoutError", "tiled_csr"]
