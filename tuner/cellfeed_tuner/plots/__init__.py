"""The pictures of a result.

Each block size has the same colour in all pictures, from dark (small) to light (large), on a
colour-blind-safe map. Intervals are drawn wherever there are any.
"""

from cellfeed_tuner.plots._autotune import autotune_figure, trade_off_figure
from cellfeed_tuner.plots._bounds import bounds_figure
from cellfeed_tuner.plots._heat_maps import heat_map_figure

__all__ = ["autotune_figure", "bounds_figure", "heat_map_figure", "trade_off_figure"]
