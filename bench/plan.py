"""The plan of an epoch. Neither time nor memory may grow with the number of rows."""

import numpy as np

from bench._profile import _Measured, parameters
from cellfeed import BlockShuffling, EpochPlan, Streaming

BATCH_SIZE, FETCH_FACTOR = 64, 16
STRATEGIES = {
    "streaming": Streaming(shuffle=True),
    "blocks of 1": BlockShuffling(block_size=1),
    "blocks of 16": BlockShuffling(block_size=16),
    "blocks of 256": BlockShuffling(block_size=256),
}


class OpenEpoch(_Measured):
    """Open an epoch and compute one fetch from the middle of it."""

    params = (
        parameters(quick=[1_000_000, 1_000_000_000], full=[30_000_000]),
        parameters(quick=["blocks of 1", "blocks of 16"], full=["streaming", "blocks of 256"]),
    )
    param_names = ("n_rows", "strategy")

    def track_row_runs(self, n_rows, strategy):
        rows = self.run(n_rows, strategy).rows
        return 1 + int(np.count_nonzero(np.diff(rows) != 1))

    track_row_runs.unit = "row runs per fetch"

    def run(self, n_rows, strategy):
        plan = EpochPlan(
            strategy=STRATEGIES[strategy],
            n_rows=n_rows,
            batch_size=BATCH_SIZE,
            fetch_factor=FETCH_FACTOR,
            seed=0,
        )
        return plan.fetch(plan.n_fetches // 2)
