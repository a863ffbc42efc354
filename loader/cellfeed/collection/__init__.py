"""One collection of cells from many sources."""

from cellfeed.collection._collection import Collection, row_numbers
from cellfeed.collection._join_elements import Genes, JoinVars, require_named, side_by_side
from cellfeed.collection._join_obs import exact_numbers, join_column
from cellfeed.collection._open_collection import located, open_collection, require_elements

__all__ = [
    "Collection",
    "Genes",
    "JoinVars",
    "exact_numbers",
    "join_column",
    "located",
    "open_collection",
    "require_elements",
    "require_named",
    "row_numbers",
    "side_by_side",
]
