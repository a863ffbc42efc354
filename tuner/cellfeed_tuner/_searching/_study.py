"""The search as an Optuna study: a configuration is a trial, a turn is a step of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import WilcoxonPruner
from optuna.trial import FrozenTrial, TrialState, create_trial

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history import quiet
from cellfeed_tuner._interval import SAME_SPEED_SHARE
from cellfeed_tuner._searching._space import are_sizes

# One-sided p-value of Wilcoxon's signed rank test below which a configuration leaves the race.
# Chosen: it takes four turns, all of which it loses.
PRUNED_BELOW = 0.1
# How often a user's sampler is asked for a configuration that can be timed.
MOST_ASKED = 32


class Study:
    """Trials of configurations, which a study's sampler may propose and its pruner drops.

    Values are seconds per cell, to be minimized.

    Parameters
    ----------
    own
        A user's study. If None, or the URL of a storage, nothing is proposed, and Wilcoxon's test
        drops what is clearly slower than the fastest in the same turns.
    known
        Configurations whose settings span the search space.
    has_ranges
        Whether any size between those of them may be proposed.
    """

    def __init__(
        self,
        own: str | optuna.Study | None,
        known: Sequence[Configuration],
        *,
        has_ranges: bool = False,
    ) -> None:
        self._proposes = isinstance(own, optuna.Study)
        with quiet():
            self._study = (
                own
                if isinstance(own, optuna.Study)
                else optuna.create_study(
                    storage=own, pruner=WilcoxonPruner(p_threshold=PRUNED_BELOW)
                )
            )
        self._space = _distributions(known, has_ranges=has_ranges)
        self._trials: dict[Configuration, optuna.Trial] = {}
        self._seconds: dict[Configuration, dict[int, float]] = {}
        self._dropped: set[Configuration] = set()

    def propose(self, accepts: Callable[[Configuration], bool]) -> Configuration | None:
        """Return what the sampler of a user's study proposes; None if nothing is accepted."""
        for _ in range(MOST_ASKED if self._proposes else 0):
            with quiet():
                trial = self._study.ask(self._space)
                proposed = Configuration(**trial.params)
                if proposed not in self._trials and accepts(proposed):
                    self._trials[proposed] = trial
                    return proposed
                self._study.tell(trial, state=TrialState.PRUNED)
        return None

    def report(
        self, configuration: Configuration, seconds_per_cell: float | None, turn: int
    ) -> None:
        """Report what a configuration took in a turn; None if it failed."""
        with quiet():
            if configuration not in self._trials:
                self._study.enqueue_trial(dict(configuration))
                self._trials[configuration] = self._study.ask(self._space_of(configuration))
            if seconds_per_cell is not None:
                self._seconds.setdefault(configuration, {})[turn] = seconds_per_cell
                self._trials[configuration].report(seconds_per_cell, turn)

    def prune(self, racing: Collection[Configuration]) -> set[Configuration]:
        """Return those that the pruner drops, as if all others had ended by now.

        None of these is the fastest, or at most 2 % slower: that counts as equal.
        """
        found = sorted((each for each in racing if each in self._seconds), key=self._mean)
        dropped = set[Configuration]()
        alike = (1 + SAME_SPEED_SHARE) * self._mean(found[0]) if found else 0.0
        with quiet():
            ended = {each: self._as_ended(each) for each in found}
            for each in [each for each in found if self._mean(each) > alike]:
                others = optuna.create_study()
                others.add_trials([trial for other, trial in ended.items() if other != each])
                if self._study.pruner.prune(others, ended[each]):
                    dropped.add(each)
        self._dropped |= dropped
        return dropped

    def end(
        self,
        facts: Mapping[str, Mapping[Configuration, float]],
        excesses: Mapping[Configuration, Mapping[str, float]],
    ) -> list[FrozenTrial]:
        """End all trials: FAIL without a value, PRUNED if dropped or infeasible, else COMPLETE.

        Parameters
        ----------
        facts, excesses
            User attributes by name; and by how much a configuration misses each constraint,
            at most 0 if it meets it.
        """
        with quiet():
            for each, trial in self._trials.items():
                for name, fact in facts.items():
                    trial.set_user_attr(name, fact.get(each))
                missed = excesses.get(each, {})
                if hasattr(trial, "set_constraint"):  # since Optuna 5
                    for name, excess in missed.items():
                        trial.set_constraint(name, excess)
                if each not in self._seconds:
                    self._study.tell(trial, state=TrialState.FAIL)
                elif each in self._dropped or any(excess > 0 for excess in missed.values()):
                    self._study.tell(trial, state=TrialState.PRUNED)
                else:
                    self._study.tell(trial, self._mean(each))
        numbers = {trial.number for trial in self._trials.values()}
        found = self._study.get_trials(deepcopy=False)
        return [each for each in found if each.number in numbers]

    def _as_ended(self, configuration: Configuration) -> FrozenTrial:
        return create_trial(
            params=dict(configuration),
            distributions=self._space_of(configuration),
            value=self._mean(configuration),
            intermediate_values=self._seconds[configuration],
        )

    def _space_of(self, configuration: Configuration) -> dict[str, BaseDistribution]:
        """Return what its settings may be; some exist only with workers."""
        return {name: self._space[name] for name in configuration}

    def _mean(self, configuration: Configuration) -> float:
        return float(np.mean(list(self._seconds[configuration].values())))


def _distributions(
    known: Sequence[Configuration], *, has_ranges: bool
) -> dict[str, BaseDistribution]:
    """Return what each setting may be: one of its values or, of ranges, a size between them."""
    found = dict[str, BaseDistribution]()
    for name in dict.fromkeys(name for each in known for name in each):
        values = list(dict.fromkeys(each[name] for each in known if name in each))
        if has_ranges and are_sizes(values):
            sizes = cast("Sequence[int]", values)
            found[name] = IntDistribution(min(sizes), max(sizes), log=min(sizes) > 0)
        else:
            found[name] = CategoricalDistribution(cast("Any", values))
    return found
