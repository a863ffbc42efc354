"""Reading fetches: planning, prefetching, laying out rows in memory."""

from cellfeed.fetch._element_read import Part
from cellfeed.fetch._prefetch import Pools, Stage, in_stages, load_tables, prefetched
from cellfeed.fetch._reader import (
    PlannedRead,
    Readable,
    Reader,
    ReplaceRows,
    RowTransform,
    Transforms,
    fetches_of,
    split_steps,
)

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
