"""One collection of cells from many sources."""

from cellfeed._collection._collection import Collection
from cellfeed._collection._join_elements import require_named
from cellfeed._collection._join_obs import exact_numbers, join_column
from cellfeed._collection._open_collection import open_collection
