"""Reading fetches: planning, reading ahead, laying out rows in memory."""

from cellfeed._reading._byte_budget import ByteBudget
from cellfeed._reading._load_tables import load_tables
from cellfeed._reading._parts import Part
from cellfeed._reading._planned_read import PlannedRead
from cellfeed._reading._pools import Pools
from cellfeed._reading._prefetch import Stage, ahead, in_stages
from cellfeed._reading._reader import Reader
from cellfeed._reading._transforms import Transforms, as_stored

__all__ = [
    "ByteBudget",
    "Part",
    "PlannedRead",
    "Pools",
    "Reader",
    "Stage",
    "Transforms",
    "ahead",
    "as_stored",
    "in_stages",
    "load_tables",
]
