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
    racing, rng = _alone(candidates), np.random.default_rng(seed)
    racing.sort(key=lambda each: (each.fetch_factor * each.block_size, each.fetch_factor))
    racing = racing[-_N_LARGEST:]
    while measurements.budget.left > 0:
        rng.shuffle(racing)
        _measure(measurements, racing)
    return _fastest(measurements)


def halving(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure half as many as there are measurements, at random; then the faster half, again."""
    rng = np.random.default_rng(seed)
    # The time of a measurement is unknown before the first.
    racing = [candidates[place] for place in rng.permutation(len(candidates)).tolist()]
    measurements.take(racing[0])
    n_looks = round(measurements.budget.seconds / measurements.budget.spent)
    racing = racing[: max(2, n_looks // 2)]
    _measure(measurements, racing[1:])
    while measurements.budget.left > 0:
        costs = _costs(measurements)
        racing = sorted((each for each in racing if each in costs), key=costs.__getitem__)
        racing = racing[: (len(racing) + 1) // 2]
        _measure(measurements, racing)
    return _fastest(measurements, [each for each in racing if each in measurements] or None)


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
    "halving": halving,
    "random": at_random,
    "six known": oracle,
}
"""All, by name."""


def _alone(candidates: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations without workers, or all if there are none."""
    return [each for each in candidates if each.num_workers == 0] or list(candidates)


def _measure(measurements: Measurements, configurations: Sequence[Configuration]) -> None:
    for each in configurations:
        if measurements.budget.left > 0:
            measurements.take(each)


def _fastest(
    measurements: Measurements, among: Sequence[Configuration] | None = None
) -> Configuration:
    costs = _costs(measurements)
    return min(costs if among is None else among, key=costs.__getitem__)


def _costs(measurements: Measurements) -> dict[Configuration, float]:
    """Return mean seconds per cell of each configuration that did not fail."""
    return {
        each: float(np.mean([one.seconds_per_cell for one in found]))
        for each in measurements
        if (found := measurements.replicates(each))
    }
