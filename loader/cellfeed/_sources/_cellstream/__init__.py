"""Archives of cellstream, decoded by cellstream's own library into cellfeed's minibatches."""

from cellfeed._sources._cellstream._storage import CELLSTREAM

__all__ = ["CELLSTREAM"]
