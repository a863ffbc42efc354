"""Which configuration to try next, as Optuna samplers that propose nothing but candidates."""

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
from cellfeed_tuner._planning._constants import FIRST_TRIALS, RANDOM_TRIALS
from cellfeed_tuner._planning._posterior import Posterior

__all__ = ["CandidateSampler", "CostModelSampler", "NearestSampler", "sampler_of"]

_OF_OPTUNA: Mapping[str, Callable[[int], BaseSampler]] = {
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
}


class CandidateSampler(BaseSampler):
    """Proposes one of `candidates`, which are set before each trial and all feasible.

    Parameters
    ----------
    space
        The distribution of each setting.
    """

    def __init__(self, space: Mapping[str, BaseDistribution]) -> None:
        self.space = dict(space)
        self.candidates: Sequence[Configuration] = ()

    @abstractmethod
    def choose(self, study: optuna.Study) -> Configuration:
        """Return the candidate to try next."""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all settings: they are chosen together."""
        del study, trial
        return self.space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the settings of the chosen candidate."""
        del trial, search_space
        return dict(self.candidates[0] if len(self.candidates) == 1 else self.choose(study))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse what is not a setting of the candidates."""
        del study, trial, param_distribution
        msg = f"{param_name!r} is not one of the settings {', '.join(self.space)}"
        raise ParameterError(msg)


class CostModelSampler(CandidateSampler):
    """Proposes by the cost model and all measurements.

    The first trials are those that the model expects to be the fastest on any machine. Later ones
    are those that may surpass the leader by most.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], posterior: Posterior) -> None:
        super().__init__(space)
        self._posterior = posterior

    def choose(self, study: optuna.Study) -> Configuration:
        """Return the candidate to try next."""
        posterior = self._posterior
        chosen = None
        if len(study.get_trials(deepcopy=False)) > FIRST_TRIALS:
            leader = posterior.leader(posterior.candidates)
            chosen = leader and posterior.challenger(leader, self.candidates)
        chosen = chosen or posterior.most_promising(self.candidates)
        return chosen or self.candidates[0]


class NearestSampler(CandidateSampler):
    """Proposes the candidate that is closest to the proposal of another sampler.

    Optuna's samplers learn from finished trials only. So the other sampler sees a copy of the
    study in which each running trial is complete, with the mean of its replicates as its value.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], inner: BaseSampler) -> None:
        super().__init__(space)
        self._inner = inner

    def choose(self, study: optuna.Study) -> Configuration:
        """Return the candidate to try next."""
        copy = optuna.create_study(direction=study.direction, sampler=self._inner)
        for each in study.get_trials(deepcopy=False):
            if each.intermediate_values:
                mean = float(np.mean(list(each.intermediate_values.values())))
                copy.add_trial(
                    create_trial(params=each.params, distributions=self.space, value=mean)
                )
        proposed = copy.ask(self.space).params
        return min(self.candidates, key=lambda each: self._distance(each, proposed))

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
                for name, each in self.space.items()
            )
        )


def sampler_of(
    sampler: str | BaseSampler,
    space: Mapping[str, BaseDistribution],
    posterior: Posterior,
    seed: int,
) -> CandidateSampler:
    """Return the sampler of a name in `SAMPLERS`, or one that follows another sampler."""
    if isinstance(sampler, BaseSampler):
        return NearestSampler(space, sampler)
    if sampler in _OF_OPTUNA:
        return NearestSampler(space, _OF_OPTUNA[sampler](seed))
    return CostModelSampler(space, posterior)
