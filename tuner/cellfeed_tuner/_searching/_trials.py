"""The Optuna study of one run: a configuration is a trial, each look at it an intermediate value.

Only what searches imports this, and with it Optuna.
"""

from collections.abc import Mapping, Sequence
from math import hypot, log
from typing import cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState
from scipy.special import stdtrit

from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._interval import Spread
from cellfeed_tuner._planning._constants import CHANCE_OF_PRUNING
from cellfeed_tuner._planning._posterior import Posterior
from cellfeed_tuner._planning._space import are_sizes
from cellfeed_tuner._quiet_optuna import quiet
from cellfeed_tuner._searching._samplers import params_of, sampler_of

__all__ = ["RacePruner", "Trials", "distributions"]


def distributions(configurations: Sequence[Configuration]) -> dict[str, BaseDistribution]:
    """Return what each setting of some configurations may be: of sizes, all between their ends."""
    return {
        name: _distribution([each[name] for each in configurations]) for name in configurations[0]
    }


def _distribution(values: Sequence[Setting]) -> BaseDistribution:
    if not are_sizes(values):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    sizes = cast("Sequence[int]", values)
    return IntDistribution(min(sizes), max(sizes), log=min(sizes) > 0)


class RacePruner(BasePruner):
    """Prunes a trial that is slower than another beyond chance.

    Intermediate values are seconds per cell, one for each look, taken in turns with others. All
    trials have the same relative spread, so that few looks suffice; a single look decides
    nothing, since something else may have slowed it down.

    Examples
    --------
    >>> study = optuna.create_study(pruner=RacePruner())
    >>> fast, slow = study.ask(), study.ask()
    >>> for look, (one, other) in enumerate([(1.0, 2.0), (1.1, 2.1), (0.9, 1.9)]):
    ...     fast.report(one, look)
    ...     slow.report(other, look)
    >>> fast.should_prune(), slow.should_prune()
    (False, True)
    """

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial is out of the race."""
        states = (TrialState.RUNNING, TrialState.COMPLETE)
        raced = study.get_trials(deepcopy=False, states=states)
        looks = {each.number: list(each.intermediate_values.values()) for each in raced}
        own = list(trial.intermediate_values.values())
        spread = Spread.of([*looks.values(), own])
        others = [each for number, each in looks.items() if number != trial.number]
        return any(_is_slower(own, each, spread) for each in others)


def _is_slower(own: Sequence[float], other: Sequence[float], spread: Spread) -> bool:
    if min(len(own), len(other)) <= 1:
        return False
    ratio = log(sum(own) / len(own)) - log(sum(other) / len(other))
    error = hypot(spread.error(len(own)), spread.error(len(other)))
    return bool(ratio > stdtrit(spread.freedom, 1 - CHANCE_OF_PRUNING) * error)


class Trials:
    """The trials of one run; their values are seconds per cell, to be minimised.

    They are kept in memory: nothing is written to a disk while it is measured. A trial that has
    failed is FAIL, one that dropped out of the race PRUNED, and the others are COMPLETE when the
    run is over. Where the fastest is looked for (``is_race``), a slower one drops out.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        *,
        sampler: str | BaseSampler,
        posterior: Posterior,
        n_first: int,
        is_race: bool,
        seed: int,
    ) -> None:
        space = distributions(configurations)
        self._sampler = sampler_of(
            sampler, space=space, posterior=posterior, n_first=n_first, seed=seed
        )
        self._trials: dict[Configuration, Trial] = {}
        self._n_looks = 0
        self._left: set[Configuration] = set()
        with quiet():
            pruner = RacePruner() if is_race else NopPruner()
            self.study = optuna.create_study(sampler=self._sampler, pruner=pruner)

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._trials

    def propose(self, candidates: Sequence[Configuration]) -> Configuration:
        """Return which of some candidates to try next, all of which are new: a trial begins."""
        self._sampler.candidates = candidates
        with quiet():
            trial = self.study.ask(self._sampler.space)
        configuration = Configuration(**trial.params)
        self._trials[configuration] = trial
        return configuration

    def report(self, configuration: Configuration, seconds_per_cell: Sequence[float]) -> bool:
        """Take note of new looks, none if it failed; return whether it is still in the race."""
        with quiet():
            trial = self._begun(configuration)
            for value in seconds_per_cell:
                trial.report(value, self._n_looks)
                self._n_looks += 1
            if not seconds_per_cell or trial.should_prune():
                self._left.add(configuration)
        return configuration not in self._left

    def close(
        self,
        configuration: Configuration,
        replicates: Sequence[float],
        *,
        is_racing: bool,
        excesses: Mapping[str, float],
        **facts: float,
    ) -> None:
        """End a trial, with seconds per cell of each look, none if it failed.

        ``excesses`` are by how much it misses each constraint, at most 0 where it meets it, and
        ``facts`` become its user attributes.
        """
        with quiet():
            trial = self._begun(configuration)
            for name, fact in {**facts, "replicates": [*replicates]}.items():
                trial.set_user_attr(name, fact)
            if hasattr(trial, "set_constraint"):  # since Optuna 5
                for name, excess in excesses.items():
                    trial.set_constraint(name, excess)
            if not replicates:
                self.study.tell(trial, state=TrialState.FAIL)
            elif is_racing and configuration not in self._left:
                self.study.tell(trial, float(np.mean(replicates)))
            else:
                self.study.tell(trial, state=TrialState.PRUNED)

    def ended(self) -> optuna.Study:
        """Return the study when all has ended; what was never looked at has failed."""
        left = (TrialState.RUNNING, TrialState.WAITING)
        with quiet():
            for trial in self.study.get_trials(deepcopy=False, states=left):
                self.study.tell(trial.number, state=TrialState.FAIL)
        return self.study

    def _begun(self, configuration: Configuration) -> Trial:
        """Return the trial of a configuration, which begins if it has none."""
        if configuration not in self._trials:
            space = self._sampler.space
            self.study.enqueue_trial(params_of(configuration, [*space]))
            self._trials[configuration] = self.study.ask(space)
        return self._trials[configuration]
