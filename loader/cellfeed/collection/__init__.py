"""One collection of cells from many sources."""

from cellfeed.collection._collection import Collection, row_numbers
from cellfeed.collection._join_elements import Genes, JoinVars, require_named
from cellfeed.collection._join_obs import exact_numbers, join_column
from cellfeed.collection._open_collection import located, open_collection, require_elements
from cellfeed.collection._splits import (
    Labels,
    Rows,
    count_divided,
    count_indexable_rows,
    count_rows,
    in_memory,
    labels_of,
    require_indexable,
)

__all__ = [
    "Collection",
    "Genes",
    "JoinVars",
    "Labels",
    "Rows",
    "count_divided",
    "count_indexable_rows",
    "count_rows",
    "exact_numbers",
    "in_memory",
    "join_column",
    "labels_of",
    "located",
    "open_collection",
    "require_elements",
    "require_indexable",
    "require_named",
    "row_numbers",
]
