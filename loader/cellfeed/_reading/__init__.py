"""Reading a fetch: planned, read ahead, laid out."""

from cellfeed._reading._load_tables import load_tables
from cellfeed._reading._prefetch import ahead, one_ahead
from cellfeed._reading._reader import PlannedRead, Reader
from cellfeed._reading._row_reads import OtherRead, RowReads

__all__ = [
    "OtherRead",
    "PlannedRead",
    "Reader",
    "RowReads",
    "ahead",
    "load_tables",
    "one_ahead",
]
