"""Other searches with as much time, to compare with the search of ``autotune``."""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from bench.backtest.recorded_grid import RecordedProcess

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._searching._replicates import Measurements

GOOD_REGRET = 0.05
"""A choice that is slower than the best by at most this share is a good one."""

_N_BEST = 6
_N_LARGEST = 6
# Cells per second of one of which no round ended in time.
_TOO_SLOW = 1.0

Baseline = Callable[[Measurements, Sequence[Configuration], int], Configuration]
"""Measures some of the candidates until the budget is spent, and returns its choice."""


def six_largest(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure the six with the largest fetches and blocks in turns, without workers."""
    alone = [each for each in candidates if each.num_workers == 0]
    racing, rng = alone or list(candidates), np.random.default_rng(seed)
    racing.sort(key=lambda each: (each.fetch_factor * each.block_size, each.fetch_factor))
    racing = racing[-_N_LARGEST:]
    while measurements.budget.left > 0:
        rng.shuffle(racing)
        _measure(measurements, racing)
    return _fastest(measurements)


def at_random(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure random configurations until the budget is spent."""
    rng = np.random.default_rng(seed)
    while measurements.budget.left > 0:
        _measure(measurements, [candidates[int(rng.integers(len(candidates)))]])
    return _fastest(measurements)


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
        speed = measurements.take(best[place]).rough_cells_per_second or _TOO_SLOW
        n_looks[place] += 1
        errors = (-np.log(speed) - logs[orders[:, place]]) / max(process.spread, 1e-3)
        log_likelihood = log_likelihood - errors**2 / 2


BASELINES: dict[str, Baseline] = {
    "six largest": six_largest,
    "random": at_random,
    "six known": oracle,
}
"""All, by name."""


def _measure(measurements: Measurements, configurations: Sequence[Configuration]) -> None:
    for each in configurations:
        if measurements.budget.left > 0:
            measurements.take(each)


def _fastest(measurements: Measurements) -> Configuration:
    """Return the configuration with the least mean seconds per cell, of those that did not fail."""
    costs = {
        each: float(np.mean([one.seconds_per_cell for one in found]))
        for each in measurements
        if (found := measurements.replicates(each))
    }
    return min(costs, key=costs.__getitem__)
