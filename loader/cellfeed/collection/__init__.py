"""One collection of cells from many sources."""

from cellfeed.collection._collection import Collection, row_numbers
from cellfeed.collection._indexables import (
    count_indexable_rows,
    count_rows,
    in_memory,
    require_indexable,
)
from cellfeed.collection._join_elements import Genes, JoinVars, require_named
from cellfeed.collection._join_obs import exact_numbers, join_column
from cellfeed.collection._open_collection import located, open_collection, require_elements

__all__ = [
    "Collection",
    "Genes",
    "JoinVars",
    "count_indexable_rows",
    "count_rows",
    "exact_numbers",
    "in_memory",
    "join_column",
    "located",
    "open_collection",
    "require_elements",
    "require_indexable",
    "require_named",
    "row_numbers",
]
