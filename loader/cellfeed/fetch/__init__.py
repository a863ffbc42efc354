"""Reading fetches: planning, prefetching, laying out rows in memory."""

from cellfeed.fetch._parts import (
    Part,
    ReplaceRows,
    RowTransform,
    Transforms,
    split_steps,
)
from cellfeed.fetch._prefetch import Pools, Stage, in_stages, load_tables, prefetched
from cellfeed.fetch._reader import PlannedRead, Readable, Reader, fetches_of

__all__ = [
    "Part",
    "PlannedRead",
    "Pools",
    "Readable",
    "Reader",
    "ReplaceRows",
    "RowTransform",
    "Stage",
    "Transforms",
    "fetches_of",
    "in_stages",
    "load_tables",
    "prefetched",
    "split_steps",
]
