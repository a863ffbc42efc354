"""Other searches with as many measurements, to compare with the search of ``autotune``."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from bench.backtest.recorded_grid import RecordedProcess
from numpy.typing import NDArray

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._searching._cost_model import CostModel, Geometry
from cellfeed_tuner._searching._replicates import Measurements

if TYPE_CHECKING:
    import optuna

GOOD_REGRET = 0.05
"""A choice that is slower than the best by at most this share is a good one."""

_N_BEST = 6
_N_LARGEST = 6
# Standard deviation of the logarithm of a cost with each doubling of a setting.
_SLOPE, _N_WORLDS = 0.3, 2000
# Configurations that mix too little cost no time, and might be proposed without end.
_MOST_PROPOSED = 200

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


def tpe(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure what Optuna's tree-structured Parzen estimator proposes."""
    # Imported here, since only this function needs Optuna.
    import optuna  # noqa: PLC0415

    from cellfeed_tuner._history import quiet  # noqa: PLC0415

    place = {each: number for number, each in enumerate(candidates)}
    sizes = {
        name: sorted({getattr(each, name) for each in candidates})
        for name in ("block_size", "fetch_factor", "num_workers")
    }
    with quiet():
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for _ in range(_MOST_PROPOSED):
            if measurements.budget.left <= 0:
                break
            trial = study.ask()
            proposed = Configuration(
                **{name: _proposed(trial, name, values) for name, values in sizes.items()}
            )
            if proposed not in place:
                study.tell(trial, 0.0)
                continue
            study.tell(trial, measurements.take(proposed).rough_cells_per_second)
    if not len(measurements):
        measurements.take(candidates[0])
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
    return _fastest(measurements, racing)


def at_random(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure random configurations until the budget is spent."""
    rng = np.random.default_rng(seed)
    while measurements.budget.left > 0:
        _measure(measurements, [candidates[int(rng.integers(len(candidates)))]])
    return _fastest(measurements)


def largest(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure nothing: choose the largest fetch, then the largest block, without workers."""
    del measurements, seed
    return max(_alone(candidates), key=lambda each: (each.fetch_factor, each.block_size))


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


class WithoutTerms(CostModel):
    """A cost model that only knows how costs change with each doubling of a setting."""

    @staticmethod
    def samples(
        configurations: Sequence[Configuration], batch_size: int, geometry: Geometry
    ) -> NDArray[np.float64]:
        """Return the logarithms of costs for slopes drawn at random, shape (n_worlds, n)."""
        del batch_size, geometry
        settings = [
            (each.block_size, each.fetch_factor, 1 + each.num_workers) for each in configurations
        ]
        doublings = np.log2(np.array(settings, dtype=np.float64).reshape(-1, 3))
        slopes = _SLOPE * np.random.default_rng(0).standard_normal((_N_WORLDS, 3))
        worlds: NDArray[np.float64] = slopes @ doublings.T
        return worlds


SEARCHES: dict[str, dict[str, Any]] = {
    "without cost terms": {"model": WithoutTerms},
    "TPE proposes": {"sampler": "tpe"},
}
"""The search of ``autotune`` with something changed."""

SIMPLER: dict[str, Baseline] = {
    "six largest": six_largest,
    "largest": largest,
    "TPE": tpe,
    "halving": halving,
    "random": at_random,
    "six known": oracle,
}

BASELINES = (*SEARCHES, *SIMPLER)
"""Names of all."""


def _alone(candidates: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations without workers, or all if there are none."""
    return [each for each in candidates if each.num_workers == 0] or list(candidates)


def _measure(measurements: Measurements, configurations: Sequence[Configuration]) -> None:
    for each in configurations:
        if measurements.budget.left > 0:
            measurements.take(each)


def _proposed(trial: "optuna.Trial", name: str, values: Sequence[int]) -> int:
    return values[trial.suggest_int(name, 0, len(values) - 1)]


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
