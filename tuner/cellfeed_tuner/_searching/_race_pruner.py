"""Dropping out of the race, as an Optuna pruner."""

from collections.abc import Sequence
from math import hypot, log

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState
from scipy.special import stdtrit

from cellfeed_tuner._interval import Spread

__all__ = ["RacePruner"]


class RacePruner(BasePruner):
    """Prunes a trial that is slower than another beyond chance.

    Intermediate values are seconds per cell, one for each look, taken in turns with others. All
    trials have the same relative spread, so that few looks suffice; a single look decides
    nothing, since something else may have slowed it down.

    Parameters
    ----------
    chance
        How likely a trial that is as fast as the fastest is pruned when it is compared with it.

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

    def __init__(self, chance: float = 0.025) -> None:
        self._chance = chance

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether the trial is out of the race."""
        states = (TrialState.RUNNING, TrialState.COMPLETE)
        raced = study.get_trials(deepcopy=False, states=states)
        looks = {each.number: list(each.intermediate_values.values()) for each in raced}
        own = list(trial.intermediate_values.values())
        spread = Spread.of([*looks.values(), own])
        others = [each for number, each in looks.items() if number != trial.number]
        return any(self._is_slower(own, each, spread) for each in others)

    def _is_slower(self, own: Sequence[float], other: Sequence[float], spread: Spread) -> bool:
        if min(len(own), len(other)) <= 1:
            return False
        ratio = log(sum(own) / len(own)) - log(sum(other) / len(other))
        error = hypot(spread.error(len(own)), spread.error(len(other)))
        return bool(ratio > stdtrit(spread.freedom, 1 - self._chance) * error)
