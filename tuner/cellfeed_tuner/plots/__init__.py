"""Every picture of the project, in one visual language.

Block sizes keep their colour in all pictures, from dark (small) to light (large), in a map that
colour-blind readers can follow; strategies keep theirs too. Intervals are drawn wherever there
are any, and the caption names the machine.
"""

from cellfeed_tuner.plots._autotune import autotune_figure
from cellfeed_tuner.plots._bounds import bounds_figure
from cellfeed_tuner.plots._entropy_worth import entropy_worth_figure
from cellfeed_tuner.plots._epoch import epoch_figure
from cellfeed_tuner.plots._expansions import expansions_figure
from cellfeed_tuner.plots._figure4 import entropy_figure
from cellfeed_tuner.plots._figure5 import macro_f1_figure
from cellfeed_tuner.plots._heat_maps import heat_map_figure
from cellfeed_tuner.plots._loaders import loaders_figure
from cellfeed_tuner.plots._stages import stages_figure
from cellfeed_tuner.plots._streaming import streaming_figure
from cellfeed_tuner.plots._throughput import storage_figure, throughput_figure
from cellfeed_tuner.plots._trade_off import trade_off_figure
from cellfeed_tuner.plots._workers import workers_figure

__all__ = [
    "autotune_figure",
    "bounds_figure",
    "entropy_figure",
    "entropy_worth_figure",
    "epoch_figure",
    "expansions_figure",
    "heat_map_figure",
    "loaders_figure",
    "macro_f1_figure",
    "stages_figure",
    "storage_figure",
    "streaming_figure",
    "throughput_figure",
    "trade_off_figure",
    "workers_figure",
]
