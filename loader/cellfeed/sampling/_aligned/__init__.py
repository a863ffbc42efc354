"""Compiled: blocks that begin where chunks do, in random order.

Every function that is compiled is in this folder, which takes nothing that is compiled from
elsewhere.
"""

from cellfeed.sampling._aligned._bounds import (
    CHUNK,
    FIRST_ROW,
    N_COLUMNS,
    POINTER,
    ROW,
    moments,
)
from cellfeed.sampling._aligned._order import group_sizes, rows_at

__all__ = [
    "CHUNK",
    "FIRST_ROW",
    "N_COLUMNS",
    "POINTER",
    "ROW",
    "group_sizes",
    "moments",
    "rows_at",
]
