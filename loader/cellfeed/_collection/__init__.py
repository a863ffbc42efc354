"""Many sources as one collection of cells."""

from cellfeed._collection._collection import Collection, open_collection
from cellfeed._collection._join_obs import exact_numbers, join_column

__all__ = ["Collection", "exact_numbers", "join_column", "open_collection"]
