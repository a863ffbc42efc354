"""How long measurements would take, and what there is time for."""

from collections.abc import Sequence

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    FEWEST_ROUNDS,
    LEAST_SUSTAINED_SECONDS,
    REPLICATE_SECONDS,
    TURN_ROUNDS,
)
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS
from cellfeed_tuner._measuring._timing import CountedRounds
from cellfeed_tuner._searching._posterior import Posterior
from cellfeed_tuner._searching._replicates import Measurements

# Shares of the budget until which new configurations are measured, and until which turns run if a
# training step is measured afterwards. Chosen.
PROPOSE_UNTIL, TURNS_UNTIL_WITH_STEP = 0.6, 0.75
# Share of the budget for measuring the choice without a break. Chosen: as LEAST_SUSTAINED_SECONDS.
SUSTAINED_SHARE = 0.08
# Time is reserved for that if the search has this many times as much; it is measured with the
# second share of it at least. Chosen.
LONG_BUDGETS, SUSTAINED_LEFT = 4.0, 0.6
# The same for first replicates until one has succeeded. Chosen: the speed of the disk is unknown
# then, and starting the process takes part of the time.
FIRST_LIMIT_SHARE, LEAST_FIRST_LIMIT_SECONDS = 0.125, 3.0
# Expected throughput of a configuration before anything is measured. Chosen: what a slow disk
# gives with large fetches, so that no replicate starts that would take too long there.
UNKNOWN_CELLS_PER_SECOND = 5000.0


class Durations:
    """Predicts how long measurements take, and so what the budget allows."""

    def __init__(
        self,
        posterior: Posterior,
        measurements: Measurements,
        *,
        n_cells: int,
        is_stepped: bool = False,
    ) -> None:
        self._posterior, self._measurements, self._n_cells = posterior, measurements, n_cells
        self._turns_until = TURNS_UNTIL_WITH_STEP if is_stepped else 1.0

    def of(self, configuration: Configuration, n_rounds: int = LEAST_ROUNDS) -> float:
        """Return about how many seconds a replicate of so many counted rounds takes, in all."""
        per_rank = configuration.minibatches_per_round * self._measurements.batch_size
        n_new = self.n_new(configuration)
        cells = per_rank * self._measurements.ranks.n_local
        cost = self._posterior.seconds_per_cell().get(configuration)
        if cost is None:
            return (n_new + n_rounds) * cells / UNKNOWN_CELLS_PER_SECOND
        cost *= self._measurements.slowdown  # by the clock
        counted = max(REPLICATE_SECONDS, n_rounds * cells * cost)
        return self._measurements.overhead_seconds + n_new * cells * cost + counted

    def n_new(self, configuration: Configuration) -> int:
        """Return how many first rounds of a replicate do not count."""
        per_round = configuration.minibatches_per_round * self._measurements.batch_size
        has_workers = configuration.num_workers > 0
        return CountedRounds.n_new(self._n_cells // per_round, has_workers=has_workers)

    @property
    def sustained_seconds(self) -> float:
        """How long the choice is measured without a break at the end."""
        return max(LEAST_SUSTAINED_SECONDS, SUSTAINED_SHARE * self._measurements.budget.seconds)

    @property
    def left(self) -> float:
        """Seconds left for turns, before the choice is measured for longer."""
        budget, last = self._measurements.budget, self._measurements.overhead_seconds
        last += self.sustained_seconds
        is_long = budget.seconds >= LONG_BUDGETS * last
        return budget.left_until(self._turns_until) - (last if is_long else 0.0)

    @property
    def is_time_to_propose(self) -> bool:
        """Whether there is time for new configurations beyond the first ones."""
        return self._measurements.budget.left_until(PROPOSE_UNTIL) > 0

    @property
    def first_limit(self) -> float:
        """After how many seconds a first replicate is stopped: early, until one has delivered."""
        budget = self._measurements.budget
        is_known = any(self.has_rounds(each) for each in self._measurements)
        limit = max(FIRST_LIMIT_SHARE * budget.seconds, LEAST_FIRST_LIMIT_SECONDS)
        return budget.limit_seconds if is_known else min(limit, budget.limit_seconds)

    def affords_first(self, configuration: Configuration) -> bool:
        """Return whether there is time to measure a configuration for the first time."""
        budget = self._measurements.budget
        until = min(budget.limit_seconds, budget.left_until(PROPOSE_UNTIL))
        return configuration not in self._measurements and self.of(configuration, 1) <= until

    def affords(self, configuration: Configuration) -> bool:
        """Return whether there is time for a turn, and for the rest of a throughput."""
        if configuration in self._measurements and not self.has_rounds(configuration):
            return False  # it was stopped, or has failed
        rounds = max(TURN_ROUNDS, self.missing_rounds(configuration))
        return self.of(configuration, rounds) <= self.left

    def is_time_for(self, turn: Sequence[Configuration]) -> bool:
        """Return whether there is time for a turn, and for the rest of the leader's throughput."""
        seconds = sum(self.of(each, TURN_ROUNDS) for each in turn)
        missing = self.missing_rounds(turn[0], LEAST_ROUNDS) - TURN_ROUNDS if turn else 0
        seconds += self.of(turn[0], missing) if missing > 0 else 0.0
        return seconds <= self.left

    def has_rounds(self, configuration: Configuration) -> bool:
        """Return whether a configuration was measured, and delivered anything."""
        if configuration not in self._measurements:
            return False
        return self._measurements[configuration].first_round_seconds is not None

    def missing_rounds(self, configuration: Configuration, enough: int = FEWEST_ROUNDS) -> int:
        """Return how many rounds are missing for a throughput."""
        if configuration not in self._measurements:
            return enough
        return max(0, enough - len(self._measurements[configuration].round_seconds))
