"""Data other than a `Collection` that can be indexed by rows."""

from cellfeed._indexables._multi_indexable import MultiIndexable
from cellfeed._indexables._rows import count_rows, in_memory
from cellfeed._indexables._transforms import adata_to_mindex, hf_tahoe_to_tensor

__all__ = [
    "MultiIndexable",
    "adata_to_mindex",
    "count_rows",
    "hf_tahoe_to_tensor",
    "in_memory",
]
