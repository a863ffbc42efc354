"""The pictures of a result, in one visual language.

Block sizes keep their colour in all pictures, from dark (small) to light (large), in a map that
colour-blind readers can follow; strategies keep theirs too. Intervals are drawn wherever there
are any, and the caption names the machine.
"""

from cellfeed_tuner.plots._autotune import autotune_figure, trade_off_figure
from cellfeed_tuner.plots._bounds import bounds_figure
from cellfeed_tuner.plots._heat_maps import heat_map_figure

__all__ = ["autotune_figure", "bounds_figure", "heat_map_figure", "trade_off_figure"]
