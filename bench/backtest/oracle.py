"""What looks can tell at most to one who knows the six best but not which is which."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from bench.backtest.recorded_process import RecordedProcess

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._searching._measurements import Measurements

__all__ = ["GOOD_REGRET", "oracle"]

GOOD_REGRET = 0.05
"""A choice that is slower than the best by at most this share is a good one."""

_N_BEST = 6


def oracle(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Tell the six fastest apart, whose throughputs and errors of looks are known.

    Only their order is not: all permutations are equally likely before the first look, and each
    look weighs them by its likelihood. The next look is at one of the two that are the likeliest
    to be a good choice, at that with fewer looks; the choice is the likeliest.
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
        # What is as likely as something else comes in random order.
        order: list[int] = np.lexsort((rng.random(len(best)), -(weights @ is_good))).tolist()
        if measurements.budget.left <= 0:
            return best[order[0]]
        place = min(order[:2], key=n_looks.__getitem__)
        speed = measurements.take(best[place]).rough_cells_per_second
        n_looks[place] += 1
        errors = (-np.log(speed) - logs[orders[:, place]]) / max(process.spread, 1e-3)
        log_likelihood = log_likelihood - errors**2 / 2
