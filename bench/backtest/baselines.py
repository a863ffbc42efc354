"""Simpler searches, with as much time, to hold the search of ``autotune`` against."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._measure import LEAST_ROUNDS
from cellfeed_tuner._searching._measurements import Measurements

if TYPE_CHECKING:
    import optuna

__all__ = ["BASELINES", "Baseline"]

_N_LARGEST = 6
# What mixes too little costs no time, so that it might be proposed without end.
_MOST_PROPOSED = 200
_ROUNDS, _SECONDS = LEAST_ROUNDS // 4, 1.0

Baseline = Callable[[Measurements, Sequence[Configuration], int], Configuration]
"""Measures some of the candidates until the budget is spent, and returns its choice."""


def largest_in_turns(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure the six with the largest fetches and blocks in turns, those without workers."""
    alone = [each for each in candidates if each.num_workers == 0] or list(candidates)
    alone.sort(key=lambda each: (each.fetch_factor, each.block_size), reverse=True)
    racing, rng = alone[:_N_LARGEST], np.random.default_rng(seed)
    while measurements.budget.left > 0:
        rng.shuffle(racing)
        for each in racing:
            if measurements.budget.left > 0:
                measurements.take(each, _ROUNDS, seconds=_SECONDS)
    return _fastest(measurements)


def tpe(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure what Optuna's tree-structured Parzen estimator proposes."""
    # Not above, since who imports this need not wait for Optuna, which only this needs.
    import optuna  # noqa: PLC0415

    from cellfeed_tuner._quiet_optuna import quiet  # noqa: PLC0415

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
            found = measurements.take(proposed, _ROUNDS, seconds=_SECONDS)
            study.tell(trial, found.rough_cells_per_second)
    if not len(measurements):
        measurements.take(candidates[0], _ROUNDS)
    return _fastest(measurements)


BASELINES: dict[str, Baseline] = {"six largest": largest_in_turns, "TPE": tpe}


def _proposed(trial: "optuna.Trial", name: str, values: Sequence[int]) -> int:
    return values[trial.suggest_int(name, 0, len(values) - 1)]


def _fastest(measurements: Measurements) -> Configuration:
    costs = measurements.seconds_per_cell()
    return min(costs, key=costs.__getitem__)
