"""Archives of cellstream, decoded by its own library into minibatches of ours."""

from cellfeed._sources._cellstream._storage import CELLSTREAM

__all__ = ["CELLSTREAM"]
