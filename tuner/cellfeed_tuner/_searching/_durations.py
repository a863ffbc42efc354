"""How long measuring something would take, and what there is time for."""

from collections.abc import Mapping, Sequence

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._measure import FEWEST_ROUNDS, LEAST_ROUNDS
from cellfeed_tuner._measuring._timing import SLICE_SECONDS
from cellfeed_tuner._planning._cost_model import Observation
from cellfeed_tuner._planning._posterior import Posterior
from cellfeed_tuner._planning._turns import LEAST_TURNS
from cellfeed_tuner._searching._measurements import Measurements

__all__ = ["TURN_ROUNDS", "TURN_SECONDS", "Durations", "roughly"]

TURN_SECONDS, TURN_ROUNDS = 1.0, LEAST_ROUNDS // LEAST_TURNS
"""What one look takes in a turn, unless the rounds take longer: four turns make a throughput."""

# Shares of the budget until which something is looked at for the first time, since the rest is for
# pairs; until which there are turns, with a training step to measure the choice with afterwards;
# and after which a first look is stopped as long as it is not known how slow a disk is.
_PROPOSE_UNTIL, _TURNS_UNTIL_WITH_STEP, _FIRST_LIMIT = 0.6, 0.75, 0.125
# What a first look has at least, of which its process takes a part to start.
_LEAST_FIRST_LIMIT_SECONDS = 3 * TURN_SECONDS

# What a slow disk gives to large fetches: as long as nothing is known, none is begun with that
# would take too long there.
_UNKNOWN_CELLS_PER_SECOND = 5000.0
# How far a throughput may be mistaken in reckoning what else costs.
_ROUGH_ERROR = 0.1


def roughly(seconds_per_cell: Mapping[Configuration, float]) -> dict[Configuration, Observation]:
    """Return costs that are only good enough to reckon time with."""
    return {each: Observation(cost, _ROUGH_ERROR) for each, cost in seconds_per_cell.items()}


class Durations:
    """Expects how long configurations take, and so what the budget suffices for.

    Parameters
    ----------
    posterior
        What they cost, as far as that is known.
    measurements
        What was measured by now.
    is_stepped
        Whether the choice is measured with a training step afterwards.
    """

    def __init__(
        self, posterior: Posterior, measurements: Measurements, *, is_stepped: bool = False
    ) -> None:
        self._posterior, self._measurements = posterior, measurements
        self._turns_until = _TURNS_UNTIL_WITH_STEP if is_stepped else 1.0

    def of(self, configuration: Configuration, n_rounds: int = LEAST_ROUNDS) -> float:
        """Return about how many seconds a look of so many rounds takes, start and all."""
        per_rank = configuration.minibatches_per_round * self._measurements.batch_size
        cells = (n_rounds + 1) * per_rank * self._measurements.ranks.n_local
        cost = self._posterior.seconds_per_cell().get(configuration)
        if cost is None:
            return cells / _UNKNOWN_CELLS_PER_SECOND
        return self._measurements.overhead_seconds + max(SLICE_SECONDS, cells * cost)

    @property
    def left(self) -> float:
        """Seconds that are left for turns."""
        return self._measurements.budget.left_until(self._turns_until)

    @property
    def is_time_to_propose(self) -> bool:
        """Whether something may be looked at for the first time that need not be."""
        return self._measurements.budget.left_until(_PROPOSE_UNTIL) > 0

    @property
    def first_limit(self) -> float:
        """After how many seconds a first look is stopped: early, until one has come so far."""
        budget = self._measurements.budget
        is_known = any(self.has_rounds(each) for each in self._measurements)
        limit = max(_FIRST_LIMIT * budget.seconds, _LEAST_FIRST_LIMIT_SECONDS)
        return budget.limit_seconds if is_known else min(limit, budget.limit_seconds)

    def affords_first(self, configuration: Configuration) -> bool:
        """Return whether there is time to look at a configuration for the first time."""
        budget = self._measurements.budget
        until = min(budget.limit_seconds, budget.left_until(_PROPOSE_UNTIL))
        return configuration not in self._measurements and self.of(configuration, 1) <= until

    def affords(self, configuration: Configuration) -> bool:
        """Return whether there is time for a turn, and what a throughput then lacks."""
        if configuration in self._measurements and not self.has_rounds(configuration):
            return False  # it was stopped before, or has failed
        rounds = max(TURN_ROUNDS, self.missing_rounds(configuration))
        return self.of(configuration, rounds) <= self.left

    def is_time_for(self, turn: Sequence[Configuration]) -> bool:
        """Return whether there is time for a turn, and for the rest of its first's throughput."""
        seconds = sum(max(TURN_SECONDS, self.of(each, TURN_ROUNDS)) for each in turn)
        missing = self.missing_rounds(turn[0], LEAST_ROUNDS) - TURN_ROUNDS if turn else 0
        seconds += self.of(turn[0], missing) if missing > 0 else 0.0
        return seconds <= self.left

    def has_rounds(self, configuration: Configuration) -> bool:
        """Return whether a configuration was measured, and came so far as to deliver anything."""
        if configuration not in self._measurements:
            return False
        return self._measurements[configuration].first_round_seconds is not None

    def missing_rounds(self, configuration: Configuration, enough: int = FEWEST_ROUNDS) -> int:
        """Return how many rounds a throughput still lacks."""
        if configuration not in self._measurements:
            return enough
        return max(0, enough - len(self._measurements[configuration].round_seconds))
