"""Whether what an earlier run found still holds: a few anchors, measured again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._earlier_run import EarlierRun
from cellfeed_tuner._history._recall import Comparison, compare
from cellfeed_tuner._measuring._measure import FEWEST_ROUNDS
from cellfeed_tuner._planning._posterior import Posterior
from cellfeed_tuner._searching._durations import Durations, roughly
from cellfeed_tuner._searching._time_budget import TimeBudget

__all__ = ["Confirmation"]

# Share of the budget for anchors, and rounds of an anchor each of the two times.
_UNTIL, _ROUNDS = 0.45, FEWEST_ROUNDS // 2


@dataclass(slots=True)
class Confirmation:
    """Measures anchors of an earlier run again, and compares.

    Each comes twice, the second time in reverse, so that what changes meanwhile meets all alike.

    Parameters
    ----------
    held
        The earlier run.
    anchors
        What to measure again, the most telling ones first.
    posterior
        What is told what to believe of other configurations.
    durations
        Which expects how long they take.
    """

    held: EarlierRun
    anchors: Sequence[Configuration]
    posterior: Posterior
    durations: Durations
    comparison: Comparison = field(init=False)

    def run(
        self,
        budget: TimeBudget,
        take_turn: Callable[[Sequence[Configuration], int], object],
        replicates: Callable[[], Mapping[Configuration, Sequence[float]]],
    ) -> None:
        """Measure anchors, and believe the earlier run's costs if they hold.

        Parameters
        ----------
        budget
            The time there is.
        take_turn
            Measures some, one after the other, each for so many rounds.
        replicates
            Returns seconds per cell of each look by now.
        """
        # Until something is measured, old costs say how long that takes.
        old = self.held.seconds_per_cell()
        self.posterior.believe(roughly(old))
        anchors = self._affordable(budget)
        for turn in (anchors, anchors[::-1]):
            affordable, seconds = list[Configuration](), 0.0
            for each in turn:
                seconds += self.durations.of(each, _ROUNDS)
                if seconds <= budget.left_until(_UNTIL):
                    affordable.append(each)
            take_turn(affordable, _ROUNDS)
        found = replicates()
        again = {each: found[each] for each in anchors if each in found}
        self.comparison = compare(self.held, again)
        self.posterior.believe(self.comparison.believed)

    def _affordable(self, budget: TimeBudget) -> list[Configuration]:
        """Return those that there is time to measure twice; without the choice, none tells much."""
        anchors, seconds = list[Configuration](), 0.0
        for each in self.anchors:
            twice = 2 * self.durations.of(each, _ROUNDS)
            if seconds + twice <= _UNTIL * budget.seconds:
                anchors.append(each)
                seconds += twice
            elif not anchors:
                break
        return anchors
