"""The search as an Optuna study: a configuration is a trial, a replicate an intermediate value."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import hypot, log2
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from cellfeed import ParameterError
from cellfeed_tuner._choose import Ordering
from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._constants import FIRST_TRIALS
from cellfeed_tuner._history import quiet
from cellfeed_tuner._searching._cost_model import are_sizes
from cellfeed_tuner._searching._posterior import Posterior, TurnsOf

# Random trials of samplers other than the cost model before they use measurements. Chosen.
RANDOM_TRIALS = 4

# Which configuration to try next, as Optuna samplers that propose nothing but candidates.

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


class RacePruner(BasePruner):
    """Prunes a configuration that was clearly slower than the fastest candidate in turns."""

    def __init__(self, posterior: Posterior, turns: TurnsOf[Configuration]) -> None:
        self._posterior, self._turns = posterior, turns

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial has lost the race."""
        del study
        configuration, candidates = Configuration(**trial.params), set(self._posterior.candidates)
        finalists = [each for each in self._turns.finalists() if each in candidates]
        costs = self._posterior.seconds_per_cell()
        best = min(finalists, key=costs.__getitem__, default=configuration)
        ordering = Ordering(self._posterior.ratio, self._turns.count_together)
        rival = None if best == configuration else ordering.rival(configuration, best)
        return rival is not None and rival.ratio.high < 1


class Trials:
    """The study of one run, in memory: nothing is written to a disk while it is being measured.

    Values are seconds per cell, to be minimized. A trial ends as FAIL if its configuration failed,
    as PRUNED if it lost the race or was infeasible, and as COMPLETE otherwise.

    Parameters
    ----------
    known
        Configurations whose settings span the search space.
    sampler
        A name in `SAMPLERS`, or a sampler of Optuna.
    posterior, turns
        What the cost model's sampler and the pruner go by.
    """

    def __init__(
        self,
        known: Sequence[Configuration],
        *,
        sampler: str | BaseSampler,
        posterior: Posterior,
        turns: TurnsOf[Configuration],
        seed: int,
    ) -> None:
        with quiet():
            self._sampler = sampler_of(sampler, _distributions(known), posterior, seed)
            self._study = optuna.create_study(
                sampler=self._sampler, pruner=RacePruner(posterior, turns)
            )
        self._trials: dict[Configuration, Trial] = {}
        self._n_reported: dict[Configuration, int] = {}
        self._n_replicates = 0

    def propose(self, candidates: Sequence[Configuration]) -> Configuration:
        """Begin a trial, and return its configuration: one of at least one new candidate."""
        self._sampler.candidates = candidates
        with quiet():
            trial = self._study.ask(self._sampler.space)
        configuration = Configuration(**trial.params)
        self._trials[configuration] = trial
        return configuration

    def report(self, configuration: Configuration, seconds_per_cell: Sequence[float]) -> None:
        """Report the replicates of a configuration, of which the last may be new.

        A new trial begins if the configuration has none.
        """
        if configuration not in self._trials:
            self.propose([configuration])
        n_known = self._n_reported.get(configuration, 0)
        self._n_reported[configuration] = len(seconds_per_cell)
        for value in seconds_per_cell[n_known:]:
            self._trials[configuration].report(value, self._n_replicates)
            self._n_replicates += 1

    def racing(self, among: Iterable[Configuration]) -> list[Configuration]:
        """Return those that the pruner keeps in the race; those without a trial are in it."""
        with quiet():
            return [
                each
                for each in among
                if each not in self._trials or not self._trials[each].should_prune()
            ]

    def end(
        self, values: Mapping[Configuration, float], facts: "_Numbers", excesses: "_Numbers"
    ) -> list[FrozenTrial]:
        """End all trials of measured configurations and return them.

        ``facts`` become user attributes. ``excesses`` are constraints by name: by how much a
        configuration misses each, at most 0 if it is met. What has no value has failed.
        """
        measured = {each: trial for each, trial in self._trials.items() if each in self._n_reported}
        with quiet():
            for each, trial in measured.items():
                if each in values and not self._n_reported[each]:  # stopped before a round counted
                    trial.report(values[each], self._n_replicates)
                for name, fact in facts.get(each, {}).items():
                    trial.set_user_attr(name, fact)
                missed = excesses.get(each, {})
                if hasattr(trial, "set_constraint"):  # since Optuna 5
                    for name, excess in missed.items():
                        trial.set_constraint(name, excess)
                if each not in values:
                    self._study.tell(trial, state=TrialState.FAIL)
                elif trial.should_prune() or any(excess > 0 for excess in missed.values()):
                    self._study.tell(trial, state=TrialState.PRUNED)
                else:
                    self._study.tell(trial, values[each])
            trials = self._study.get_trials(deepcopy=False)
        return [trials[trial.number] for trial in measured.values()]


_Numbers = Mapping[Configuration, Mapping[str, float]]


def _distributions(known: Sequence[Configuration]) -> dict[str, BaseDistribution]:
    """Return what each setting may be: a size anything between its ends, other settings a value."""
    return {name: _distribution([each[name] for each in known]) for name in known[0]}


def _distribution(values: Sequence[Setting]) -> BaseDistribution:
    if not are_sizes(values):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    sizes = cast("Sequence[int]", values)
    return IntDistribution(min(sizes), max(sizes), log=min(sizes) > 0)
