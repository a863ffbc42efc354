"""The search of ``autotune``, replayed on recorded grids."""

from pathlib import Path

import numpy as np

from bench._profile import _Measured, parameters
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import replay

GRIDS = Path(__file__).parent / "grids"
PUBLISHED = Path(__file__).parents[1] / "notebooks" / "figures" / "data"
FLOOR, N_SEEDS = 0.99, 10


def grid_path(name):
    """Return the path of a grid: the published ones are beside the notebooks."""
    folder = PUBLISHED if name.startswith("published_") else GRIDS
    return folder / f"{name}.csv"


class Replay(_Measured):
    """Search a grid with ten seeds."""

    params = parameters(
        quick=["gzip-28k", "zarr-200k"],
        full=["dense-28k", "gzip-200k", "lzf-28k-warm", "published_tahoe_workers", "scgen"],
    )
    param_names = ("grid",)

    def setup_cache(self):
        return {grid: self.run(None, grid) for grid in self.params}

    def track_regret(self, found, grid):
        return float(np.mean(found[grid].regrets))

    track_regret.unit = "share of the best throughput"

    def track_share_measured(self, found, grid):
        return float(np.mean(found[grid].shares_measured))

    track_share_measured.unit = "share of the grid"

    def run(self, _found, grid):
        (found,) = replay(read_grid(grid_path(grid)), floors=[FLOOR], n_seeds=N_SEEDS)
        return found
