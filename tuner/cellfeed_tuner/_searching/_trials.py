"""The search as an Optuna study: a configuration is a trial, a replicate an intermediate value."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._planning._posterior import Posterior
from cellfeed_tuner._planning._recommend import MeasuredOrdering
from cellfeed_tuner._planning._space import are_sizes
from cellfeed_tuner._quiet_optuna import quiet
from cellfeed_tuner._searching._samplers import sampler_of

__all__ = ["RacePruner", "Trials"]


class RacePruner(BasePruner):
    """Prunes a configuration that was clearly slower than the fastest candidate in turns."""

    def __init__(self, ordering: MeasuredOrdering) -> None:
        self._ordering = ordering

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial has lost the race."""
        del study
        return self._ordering.has_lost(Configuration(**trial.params))


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
    posterior, ordering
        What the cost model's sampler and the pruner go by.
    """

    def __init__(
        self,
        known: Sequence[Configuration],
        *,
        sampler: str | BaseSampler,
        posterior: Posterior,
        ordering: MeasuredOrdering,
        seed: int,
    ) -> None:
        with quiet():
            self._sampler = sampler_of(sampler, _distributions(known), posterior, seed)
            self._study = optuna.create_study(sampler=self._sampler, pruner=RacePruner(ordering))
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
