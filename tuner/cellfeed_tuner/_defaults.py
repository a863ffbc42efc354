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
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)

DEFAULT_BUDGET_SECONDS = 60.0
DEFAULT_LOOKS = tuple(range(10, 17))
"""How many looks at configurations a default `autotune` takes."""

DEFAULT_SAMPLER = "cost-model"
SAMPLERS = (DEFAULT_SAMPLER, "gp", "random", "tpe")
"""What may propose configurations."""

PREFETCHES = (1, 2, 4, 8, 16)
"""Depths of fetches read ahead that are measured of files on servers."""
REMOTE_PREFETCH = 8
"""What `cellfeed.CellDataset` reads ahead of these by itself."""

DEFAULT_ENTROPY_FLOOR = 0.99
"""At 0.95, linear classifiers kept as little as half of what they learn from random minibatches
(notebooks/worth_of_entropy.ipynb)."""
