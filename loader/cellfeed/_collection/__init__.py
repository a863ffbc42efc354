"""One collection of cells from many sources."""

from cellfeed._collection._collection import Collection, row_numbers
from cellfeed._collection._join_elements import Genes, JoinVars, require_named, side_by_side
from cellfeed._collection._join_obs import exact_numbers, join_column
from cellfeed._collection._open_collection import located, open_collection, require_elements
