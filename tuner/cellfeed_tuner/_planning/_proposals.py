"""Configurations of a space too large to list, proposed by an Optuna study.

Only what needs proposals imports this, and with it Optuna.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.trial import create_trial

from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._planning._planner import NOT_WORTH
from cellfeed_tuner._planning._space import Space, are_sizes
from cellfeed_tuner._quiet_optuna import quiet

__all__ = ["Cost", "Gains", "Proposals", "Shortfall"]

Gains = Callable[[Sequence[Configuration]], NDArray[np.float64]]
"""Which gain over the best so far may be expected of each configuration."""

Shortfall = Callable[[Configuration], float]
"""By how much a configuration is known to miss the constraints; 0 if it meets them."""

Cost = Callable[[Configuration], float]
"""What it costs to measure a configuration for the first time, in any unit."""

# Trials that are asked for together, how often, and how many of their configurations are returned.
_AT_ONCE, _LAPS, _MOST = 12, 3, 6
# Of all that was proposed before, so many trials of the most promising begin the next study.
_MOST_KNOWN = 64


class Proposals:
    """Proposes what promises the largest gain, as far as that can be said without measuring.

    An Optuna study maximises the gain that the cost model expects, for what measuring costs. A
    trial needs no reading: what cannot win by the model is told 0; what could is held against
    the constraints, and is told by how much it misses them if it does. That is negative, so
    that infeasible trials rank below all others: Optuna's own way to say so has changed between
    its versions 4 and 5, and its sampler goes by ranks alone.

    As measurements change what the model expects, each call begins a study of its own with the
    most promising of all that was proposed or known before, at their present value.

    Parameters
    ----------
    space
        What may be proposed.
    known
        What the first study begins with.
    seed
        Fixes all that is left to chance.
    """

    def __init__(self, space: Space, *, known: Iterable[Configuration], seed: int) -> None:
        self._space = space
        self._known = dict.fromkeys(known)
        self._rng = np.random.default_rng(seed)
        self._distributions: dict[str, BaseDistribution] = {
            name: _distribution(values) for name, values in space.domains.items()
        }

    @property
    def n_considered(self) -> int:
        """How many configurations were proposed or known."""
        return len(self._known)

    def propose(self, gains: Gains, shortfall: Shortfall, cost: Cost) -> list[Configuration]:
        """Return configurations that are worth a measurement, the most promising first.

        Parameters
        ----------
        gains
            What the cost model expects.
        shortfall
            What is known of the constraints; asked only about what is worth a measurement.
        cost
            What measuring costs, which gains are weighed against.
        """
        known = list(self._known)
        values = _values(known, gains, shortfall, cost)
        best = sorted(known, key=values.__getitem__, reverse=True)[:_MOST_KNOWN]
        with quiet():
            sampler = TPESampler(multivariate=True, seed=int(self._rng.integers(1 << 31)))
            study = optuna.create_study(direction="maximize", sampler=sampler)
            study.add_trials(
                create_trial(
                    params=dict(each),
                    distributions=self._distributions,
                    value=values[each],
                )
                for each in best
            )
            for _ in range(_LAPS):
                trials = [study.ask(self._distributions) for _ in range(_AT_ONCE)]
                asked = [self._space.nearest(**_rounded(trial.params)) for trial in trials]
                new = [each for each in dict.fromkeys(asked) if each not in values]
                values |= _values(new, gains, shortfall, cost)
                for trial, configuration in zip(trials, asked, strict=True):
                    study.tell(trial, values[configuration])
        self._known |= dict.fromkeys(values)
        worth = [each for each, value in values.items() if value > 0]
        return sorted(worth, key=values.__getitem__, reverse=True)[:_MOST]


def _values(
    configurations: Sequence[Configuration], gains: Gains, shortfall: Shortfall, cost: Cost
) -> dict[Configuration, float]:
    """Return the gain for its cost, 0 if it is not worth it, negative if it is not feasible."""
    if not configurations:
        return {}
    return {
        each: _value(float(gain), each, shortfall, cost)
        for each, gain in zip(configurations, gains(configurations), strict=True)
    }


def _value(gain: float, configuration: Configuration, shortfall: Shortfall, cost: Cost) -> float:
    if gain < NOT_WORTH:
        return 0.0
    return -shortfall(configuration) or gain / cost(configuration)


def _distribution(values: Sequence[Setting]) -> BaseDistribution:
    if not are_sizes(values):
        return CategoricalDistribution(values)
    sizes = cast("Sequence[int]", values)
    return FloatDistribution(sizes[0], sizes[-1], log=sizes[0] > 0)


def _rounded(params: Mapping[str, Setting]) -> dict[str, Setting]:
    return {n: round(value) if isinstance(value, float) else value for n, value in params.items()}
