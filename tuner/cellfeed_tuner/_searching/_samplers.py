"""Which configuration to try next, as Optuna samplers.

Only what searches imports this, and with it Optuna.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import hypot, log2
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, create_trial

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import DEFAULT_SAMPLER
from cellfeed_tuner._planning._constants import RANDOM_TRIALS
from cellfeed_tuner._planning._posterior import Posterior

__all__ = ["CandidateSampler", "CostModelSampler", "NearestSampler", "params_of", "sampler_of"]

_INNER: Mapping[str, Callable[[int], BaseSampler]] = {
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
}


def params_of(configuration: Configuration, names: Sequence[str]) -> dict[str, Any]:
    """Return a configuration as parameters of a trial."""
    return {name: configuration[name] for name in names}


class CandidateSampler(BaseSampler):
    """Asks for nothing but `candidates`, at least one, all of which are known to be feasible."""

    def __init__(self, space: Mapping[str, BaseDistribution]) -> None:
        self.space = dict(space)
        self.candidates: Sequence[Configuration] = ()

    @abstractmethod
    def choose(self, study: optuna.Study) -> Configuration:
        """Return the one to try next."""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all settings: they are chosen together."""
        del study, trial
        return self.space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the settings of the candidate that is chosen."""
        del trial
        return params_of(self.choose(study), list(search_space))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse what is no setting of a candidate."""
        del study, trial, param_distribution
        msg = f"{param_name!r} is not one of the settings: {', '.join(self.space)}"
        raise ParameterError(msg)


class CostModelSampler(CandidateSampler):
    """Asks for what may be the best by the cost model and all that was measured.

    First, ``n_first`` times, for what is expected to be fast on any machine; then, for what may
    surpass the leader by most.
    """

    def __init__(
        self, space: Mapping[str, BaseDistribution], posterior: Posterior, *, n_first: int
    ) -> None:
        super().__init__(space)
        self._posterior, self._n_first = posterior, n_first

    def choose(self, study: optuna.Study) -> Configuration:
        """Return the one to try next."""
        chosen = None
        if len(study.get_trials(deepcopy=False)) > self._n_first:
            leader = self._posterior.leader(self._posterior.candidates)
            chosen = leader and self._posterior.challenger(leader, self.candidates)
        chosen = chosen or self._posterior.most_promising(self.candidates)
        return chosen or self.candidates[0]


class NearestSampler(CandidateSampler):
    """Asks for the candidate that is next to what another sampler asks for.

    That one is shown trials that are still raced as if they had come to their end, since it would
    learn nothing of them otherwise.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], inner: BaseSampler) -> None:
        super().__init__(space)
        self._inner = inner

    def choose(self, study: optuna.Study) -> Configuration:
        """Return the one to try next."""
        shown = optuna.create_study(direction=study.direction, sampler=self._inner)
        for each in study.get_trials(deepcopy=False):
            if each.intermediate_values:
                value = float(np.mean(list(each.intermediate_values.values())))
                shown.add_trial(
                    create_trial(params=each.params, distributions=self.space, value=value)
                )
        wanted = shown.ask(self.space).params
        return min(self.candidates, key=lambda each: self._distance(each, wanted))

    def _distance(self, configuration: Configuration, wanted: Mapping[str, Any]) -> float:
        """Return how many doublings two settings are apart; workers are counted from 1.

        What is no size is one apart where it differs.
        """
        own = params_of(configuration, [*self.space])
        return hypot(
            *(
                log2((1 + own[name]) / (1 + wanted[name]))
                if isinstance(each, IntDistribution) and each.low >= 0
                else float(own[name] != wanted[name])
                for name, each in self.space.items()
            )
        )


def sampler_of(
    sampler: str | BaseSampler,
    *,
    space: Mapping[str, BaseDistribution],
    posterior: Posterior,
    n_first: int,
    seed: int,
) -> CandidateSampler:
    """Return the sampler of that name, or one that goes by another."""
    if sampler == DEFAULT_SAMPLER:
        return CostModelSampler(space, posterior, n_first=n_first)
    if isinstance(sampler, BaseSampler):
        return NearestSampler(space, sampler)
    return NearestSampler(space, _INNER[sampler](seed))
