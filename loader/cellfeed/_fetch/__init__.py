"""Reading fetches: planning, reading ahead, laying out rows in memory."""

from cellfeed._fetch._direct_rows import load_tables
from cellfeed._fetch._parts import Part, Transforms, as_stored
from cellfeed._fetch._prefetch import ByteBudget, Pools, Stage, ahead, in_stages
from cellfeed._fetch._reader import PlannedRead, Reader
