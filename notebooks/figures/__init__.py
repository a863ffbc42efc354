"""The figures of the notebooks, in one visual style, and the measurements they compare with.

Block sizes keep their colour in all figures, from dark (small) to light (large), in a colour map
that colour-blind readers can follow; strategies keep theirs too. Intervals are drawn wherever
there are any, and the caption names the machine.
"""

from ._annloader import measure_annloader
from ._decoded import decoded_bytes_per_cell
from ._entropy_worth import entropy_worth_figure
from ._epoch_course import EpochCourse, entropy_over_epoch
from ._epoch_figure import epoch_figure
from ._expansions import expansions_figure
from ._figure4 import entropy_figure
from ._figure5 import macro_f1_figure
from ._loaders import loaders_figure
from ._published import published_grid, published_macro_f1, published_workers
from ._storage_throughputs import storage_throughputs
from ._streaming import streaming_figure
from ._throughput import storage_figure, throughput_figure
from ._workers import workers_figure

__all__ = [
    "EpochCourse",
    "decoded_bytes_per_cell",
    "entropy_figure",
    "entropy_over_epoch",
    "entropy_worth_figure",
    "epoch_figure",
    "expansions_figure",
    "loaders_figure",
    "macro_f1_figure",
    "measure_annloader",
    "published_grid",
    "published_macro_f1",
    "published_workers",
    "storage_figure",
    "storage_throughputs",
    "streaming_figure",
    "throughput_figure",
    "workers_figure",
]
