"""In a process that imports this, what is cached is looked at after each fetch."""

import math

from cellfeed import CellDataset
from cellfeed_tuner._measuring._page_cache import Dropping


class LookedAt(CellDataset):
    """A dataset whose class the measuring process has to import from here."""


_defaults = Dropping.__init__.__kwdefaults__
assert _defaults is not None
_defaults["looking_share"] = math.inf
