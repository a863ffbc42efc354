"""The plan of an epoch. Neither time nor memory may grow with the number of rows."""

import numpy as np

from cellfeed import BlockShuffling, EpochPlan

BATCH_SIZE, FETCH_FACTOR = 64, 16


def open_epoch(n_rows, block_size):
    return EpochPlan(
        strategy=BlockShuffling(block_size=block_size),
        n_rows=n_rows,
        batch_size=BATCH_SIZE,
        fetch_factor=FETCH_FACTOR,
        seed=0,
    )


class OpenEpoch:
    """Open an epoch and take one fetch from the middle of it."""

    params = ([1_000_000, 1_000_000_000], [1, 16, 256])
    param_names = ("n_rows", "block_size")

    def time_fetch(self, n_rows, block_size):
        plan = open_epoch(n_rows, block_size)
        plan.fetch(plan.n_fetches // 2)

    def peakmem_fetch(self, n_rows, block_size):
        self.time_fetch(n_rows, block_size)

    def track_row_runs(self, n_rows, block_size):
        plan = open_epoch(n_rows, block_size)
        rows = plan.fetch(plan.n_fetches // 2).rows
        return 1 + int(np.count_nonzero(np.diff(rows) != 1))

    track_row_runs.unit = "row runs per fetch"
