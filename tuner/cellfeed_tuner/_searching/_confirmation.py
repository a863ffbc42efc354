"""Whether what an earlier run found still holds: a few anchors, measured again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._earlier_run import EarlierRun
from cellfeed_tuner._history._recall import Comparison, compare
from cellfeed_tuner._planning._constants import ANCHOR_ROUNDS, ANCHORS_UNTIL, ROUGH_ERROR
from cellfeed_tuner._planning._cost_model import Observation
from cellfeed_tuner._planning._posterior import Posterior
from cellfeed_tuner._searching._durations import Durations
from cellfeed_tuner._searching._time_budget import TimeBudget

__all__ = ["Confirmation"]


@dataclass(slots=True)
class Confirmation:
    """Measures anchors of an earlier run again, the most telling ones first, and compares.

    Each comes twice, the second time in reverse, so that what changes meanwhile meets all alike.
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

        ``take_turn`` measures some, each for so many rounds; ``replicates`` returns seconds per
        cell of each look by now.
        """
        # Until something is measured, old costs say how long that takes.
        old = self.held.seconds_per_cell()
        self.posterior.believe({each: Observation(cost, ROUGH_ERROR) for each, cost in old.items()})
        anchors = self._affordable(budget)
        for turn in (anchors, anchors[::-1]):
            affordable, seconds = list[Configuration](), 0.0
            for each in turn:
                seconds += self.durations.of(each, ANCHOR_ROUNDS)
                if seconds <= budget.left_until(ANCHORS_UNTIL):
                    affordable.append(each)
            take_turn(affordable, ANCHOR_ROUNDS)
        found = replicates()
        again = {each: found[each] for each in anchors if each in found}
        self.comparison = compare(self.held, again)
        self.posterior.believe(self.comparison.believed)

    def _affordable(self, budget: TimeBudget) -> list[Configuration]:
        """Return those that there is time to measure twice; without the choice, none tells much."""
        anchors, seconds = list[Configuration](), 0.0
        for each in self.anchors:
            twice = 2 * self.durations.of(each, ANCHOR_ROUNDS)
            if seconds + twice <= ANCHORS_UNTIL * budget.seconds:
                anchors.append(each)
                seconds += twice
            elif not anchors:
                break
        return anchors
