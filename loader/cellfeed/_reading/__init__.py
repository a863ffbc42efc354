"""Reading a fetch: planned, read ahead, laid out."""

from cellfeed._reading._load_tables import load_tables
from cellfeed._reading._parts import Part
from cellfeed._reading._prefetch import ahead, one_ahead
from cellfeed._reading._reader import PlannedRead, Reader

__all__ = [
    "Part",
    "PlannedRead",
    "Reader",
    "ahead",
    "load_tables",
    "one_ahead",
]
