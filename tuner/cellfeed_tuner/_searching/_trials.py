"""What samplers of Optuna propose, and a search that has ended as the trials of a study.

A configuration is a trial. Each of its replicates is an intermediate value, and their mean is its
value: seconds per cell, to be minimized.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from math import hypot, log2
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history import quiet
from cellfeed_tuner._searching._cost_model import are_sizes
from cellfeed_tuner._searching._posterior import Replicate

# Random trials of samplers other than the cost model before they use measurements. Chosen.
RANDOM_TRIALS = 4

_OF_OPTUNA: Mapping[str, Callable[[int], BaseSampler]] = {
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
}
_Replicates = Mapping[Configuration, Sequence[Replicate]]
_Numbers = Mapping[Configuration, Mapping[str, float]]


class OptunaProposals:
    """Proposes the candidate that is closest to the proposal of a sampler of Optuna.

    Samplers learn from finished trials only, so that each configuration is one as soon as it was
    measured.

    Parameters
    ----------
    sampler
        The sampler, or its name.
    known
        Configurations whose settings span the search space.
    """

    def __init__(
        self, sampler: str | BaseSampler, known: Sequence[Configuration], *, seed: int
    ) -> None:
        self._sampler = _OF_OPTUNA[sampler](seed) if isinstance(sampler, str) else sampler
        self._space = _distributions(known)

    def propose(
        self, candidates: Sequence[Configuration], replicates: _Replicates
    ) -> Configuration:
        """Return one of at least one candidate, given what was measured."""
        with quiet():
            study = optuna.create_study(sampler=self._sampler)
            for each, found in replicates.items():
                if found:
                    mean = float(np.mean([one.seconds_per_cell for one in found]))
                    trial = create_trial(params=dict(each), distributions=self._space, value=mean)
                    study.add_trial(trial)
            proposed = study.ask(self._space).params
        return min(candidates, key=lambda each: self._distance(each, proposed))

    def _distance(self, configuration: Configuration, proposed: Mapping[str, Any]) -> float:
        """Return how many doublings two configurations are apart.

        Workers are counted from 1. A setting that is not a size adds 1 where it differs.
        """
        own: Mapping[str, Any] = configuration
        return hypot(
            *(
                log2((1 + own[name]) / (1 + proposed[name]))
                if isinstance(each, IntDistribution) and each.low >= 0
                else float(own[name] != proposed[name])
                for name, each in self._space.items()
            )
        )


def ended_trials(
    replicates: _Replicates,
    *,
    known: Sequence[Configuration],
    facts: _Numbers,
    excesses: _Numbers,
    lost: Container[Configuration],
) -> list[FrozenTrial]:
    """Return a trial for each configuration that was measured.

    It ended as FAIL if it has no replicates, as PRUNED if it lost the race or was infeasible, and
    as COMPLETE otherwise.

    Parameters
    ----------
    known
        Configurations whose settings span the search space.
    facts, excesses
        User attributes, and constraints by name: by how much a configuration misses each, at most 0
        if it is met.
    lost
        Configurations that lost the race.
    """
    space = _distributions([*known, *replicates])
    with quiet():
        study = optuna.create_study()
        for each, found in replicates.items():
            study.enqueue_trial(dict(each))
            trial = study.ask(space)
            for one in found:
                trial.report(one.seconds_per_cell, one.number)
            for name, fact in facts.get(each, {}).items():
                trial.set_user_attr(name, fact)
            missed = excesses.get(each, {})
            if hasattr(trial, "set_constraint"):  # since Optuna 5
                for name, excess in missed.items():
                    trial.set_constraint(name, excess)
            if not found:
                study.tell(trial, state=TrialState.FAIL)
            elif each in lost or any(excess > 0 for excess in missed.values()):
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, float(np.mean([one.seconds_per_cell for one in found])))
        return study.get_trials(deepcopy=False)


def _distributions(known: Sequence[Configuration]) -> dict[str, BaseDistribution]:
    """Return what each setting may be: a size anything between its ends, other settings a value."""
    found = dict[str, BaseDistribution]()
    for name in known[0]:
        values = [each[name] for each in known]
        if are_sizes(values):
            sizes = cast("Sequence[int]", values)
            found[name] = IntDistribution(min(sizes), max(sizes), log=min(sizes) > 0)
        else:
            found[name] = CategoricalDistribution(list(dict.fromkeys(values)))
    return found
