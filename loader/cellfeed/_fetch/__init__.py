"""Reading fetches: planning, prefetching, laying out rows in memory."""

from cellfeed._fetch._parts import Part, Transforms, as_stored
from cellfeed._fetch._prefetch import Pools, Stage, in_stages, load_tables, prefetched
from cellfeed._fetch._reader import PlannedRead, Reader, fetches_of
from cellfeed._fetch._tokens import genes_of, row_bytes, split_steps
