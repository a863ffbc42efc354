"""Reading a fetch: planned, read ahead, laid out."""

from cellfeed._reading._load_tables import load_tables
from cellfeed._reading._parts import Part
from cellfeed._reading._prefetch import ahead, one_ahead
from cellfeed._reading._reader import PlannedRead, Reader
from cellfeed._reading._transforms import Transforms, as_stored

__all__ = [
    "Part",
    "PlannedRead",
    "Reader",
    "Transforms",
    "ahead",
    "as_stored",
    "load_tables",
    "one_ahead",
]
