"""The best that measurements can do if the six fastest are known, but not which is which."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from bench.backtest.recorded_process import RecordedProcess

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._searching._replicates import Measurements

__all__ = ["GOOD_REGRET", "oracle"]

GOOD_REGRET = 0.05
"""A choice that is slower than the best by at most this share is a good one."""

_N_BEST = 6


def oracle(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Tell the six fastest apart, given their throughputs and the noise of measurements.

    Only their order is unknown: all permutations are equally likely at first, and each measurement
    reweights them by its likelihood. Measure next whichever of the two likeliest good choices has
    fewer measurements; choose the likeliest in the end.
    """
    process, rng = measurements.process, np.random.default_rng(seed)
    assert isinstance(process, RecordedProcess)
    costs = process.seconds_per_cell()
    best = sorted(candidates, key=costs.__getitem__)[:_N_BEST]
    logs = np.log([costs[each] for each in best])
    orders = np.array(list(permutations(range(len(best)))))
    is_good = (logs <= logs[0] - np.log(1 - GOOD_REGRET))[orders]
    log_likelihood, n_looks = np.zeros(len(orders)), np.zeros(len(best))
    rng.shuffle(best)
    while True:
        weights = np.exp(log_likelihood - log_likelihood.max())
        # Ties come in random order.
        order: list[int] = np.lexsort((rng.random(len(best)), -(weights @ is_good))).tolist()
        if measurements.budget.left <= 0:
            return best[order[0]]
        place = min(order[:2], key=n_looks.__getitem__)
        speed = measurements.take(best[place]).rough_cells_per_second
        n_looks[place] += 1
        errors = (-np.log(speed) - logs[orders[:, place]]) / max(process.spread, 1e-3)
        log_likelihood = log_likelihood - errors**2 / 2
