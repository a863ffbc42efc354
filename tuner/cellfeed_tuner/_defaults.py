"""What is used where nothing is given; the commands' help shows it, and so it imports nothing."""

__all__ = [
    "DEFAULT_BLOCK_SIZES",
    "DEFAULT_BUDGET_SECONDS",
    "DEFAULT_ENTROPY_FLOOR",
    "DEFAULT_FETCH_FACTORS",
    "DEFAULT_LOOKS",
    "DEFAULT_SAMPLER",
    "PREFETCHES",
    "REMOTE_PREFETCH",
    "SAMPLERS",
]

DEFAULT_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
"""Block sizes that are searched. Source: those of the paper, from single cells up."""
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)
"""Fetch factors that are searched. Source: those of the paper, from single minibatches up."""

DEFAULT_BUDGET_SECONDS = 60.0
"""Seconds to spend. Chosen: what a user waits for before a training."""
DEFAULT_LOOKS = tuple(range(10, 17))
"""How many looks at configurations a default `autotune` takes. Measured: on two cores, cold."""

DEFAULT_SAMPLER = "cost-model"
"""What proposes configurations. Measured: the best in replays of recorded grids."""
SAMPLERS = (DEFAULT_SAMPLER, "gp", "random", "tpe")
"""What may propose configurations. Source: Optuna, beside our own."""

PREFETCHES = (1, 2, 4, 8, 16)
"""Depths of fetches read ahead that are measured of files on servers. Chosen."""
REMOTE_PREFETCH = 8
"""What is read ahead of these where nothing is chosen. Source: `cellfeed.CellDataset`."""

DEFAULT_ENTROPY_FLOOR = 0.99
"""Least entropy, as a share of random sampling's. Measured: at 0.95, linear classifiers kept as
little as half of what they learn from random minibatches (notebooks/worth_of_entropy.ipynb)."""
