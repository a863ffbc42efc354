"""Spending a time budget: on what the planner asks for, then on what may be the best, in turns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._recall import Comparison, Earlier, Recollection, compare
from cellfeed_tuner._measuring._measure import FEWEST_ROUNDS, LEAST_ROUNDS, Measurement
from cellfeed_tuner._measuring._timing import SLICE_SECONDS
from cellfeed_tuner._planning._cost_model import Geometry, Observation
from cellfeed_tuner._planning._planner import LEAST_CHANCE, Planner
from cellfeed_tuner._planning._recommend import Choice
from cellfeed_tuner._planning._turns import LEAST_TURNS, Turns
from cellfeed_tuner._progress import RaceState, RaceWatcher, Standing, unwatched
from cellfeed_tuner._results._configuration_result import (
    ConfigurationResult,
    EntropyBits,
    LabelResult,
    Status,
)
from cellfeed_tuner._searching._durations import Durations, roughly
from cellfeed_tuner._searching._measurements import Measurements
from cellfeed_tuner._searching._requirements import Requirements
from cellfeed_tuner._searching._time_budget import TimeBudget

if TYPE_CHECKING:  # it loads Optuna
    from cellfeed_tuner._planning._proposals import Proposals

__all__ = ["Search"]

# Shares of the budget until which something is measured for the first time, without proposals and
# with, and until which there are turns, with a training step to measure the choice with afterwards.
_EXPLORE_UNTIL, _PROPOSE_UNTIL, _TURNS_UNTIL_WITH_STEP = 0.45, 0.6, 0.75
# And until which what is in doubt is measured a second time.
_DOUBT_UNTIL = 0.6
# What promises to be faster than the best by this share may be explored later than that.
_LARGE_GAIN = 0.1
# Where an earlier run is confirmed, until then for its anchors and all else but the turns; and
# rounds of an anchor each of the two times.
_SHORT_UNTIL, _ANCHOR_ROUNDS = 0.45, FEWEST_ROUNDS // 2
# What one replicate takes in a turn, unless two rounds take longer: four turns make a throughput.
_TURN_SECONDS, _TURN_ROUNDS = 1.0, LEAST_ROUNDS // LEAST_TURNS
# How many are in the first turns, one after the other, and in those that follow; and what is the
# best with less than `LEAST_CHANCE` is in none if two others are.
_MOST_IN_TURN = (6, 4, 3)
# Beyond what should suffice for a loop with a training step, before it is stopped.
_SLACK_SECONDS = 5.0
# How often to propose where nothing known meets the constraints.
_MOST_TRIES = 5
# And until when what comes nearest is measured.
_SURVEY_UNTIL = 0.8
# Configurations that are measured before anything is proposed, and from one proposal to the next.
_MEASURED_BEFORE, _MEASURED_BETWEEN = 4, 3
_OUT_OF_BUDGET: tuple[Status, str] = ("out of budget", "")
_BELOW_FLOOR: tuple[Status, str] = ("below entropy floor", "")


@dataclass(slots=True, kw_only=True)
class Search:
    """One search, from the first measurement to the last.

    Parameters
    ----------
    measurements
        What takes measurements, and keeps them.
    requirements
        What a choice must meet.
    geometry
        How the collection lies in storage.
    on_race
        Handed what says how the race stands, before it begins.
    recollection
        Which earlier runs bear on it.
    proposals
        What proposes more than is given; None where that is all there is.
    """

    measurements: Measurements
    requirements: Requirements
    geometry: Geometry
    on_race: RaceWatcher = unwatched
    recollection: Recollection = field(default_factory=Recollection)
    proposals: "Proposals | None" = None
    _not_timed: dict[Configuration, tuple[Status, str]] = field(default_factory=dict, init=False)
    _comparison: Comparison | None = field(default=None, init=False)
    _durations: Durations = field(init=False)
    turns: Turns = field(default_factory=Turns, init=False)
    _chances: Mapping[Configuration, float] = field(default_factory=dict, init=False)
    _rng: np.random.Generator = field(init=False)
    # How many configurations are to be timed before more are proposed.
    _propose_at: int = field(default=_MEASURED_BEFORE, init=False)

    def run(self, grid: Iterable[Configuration]) -> None:
        """Measure what may be chosen, as the planner says, until the best is clear."""
        self.on_race(self._standings)
        requirements = self.requirements
        self._not_timed = {each: requirements.obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        self._rng = np.random.default_rng(self.measurements.seed)
        self._durations = Durations(runnable, self.geometry, self.measurements)
        if not candidates and self.proposals is not None:
            candidates = self._feasible(self.proposals)
            self._not_timed |= dict.fromkeys(candidates, _OUT_OF_BUDGET)
            self._durations.add(candidates)
        if not candidates:
            return
        believed = self._confirmed(candidates)
        planner = Planner(
            candidates,
            batch_size=self.measurements.batch_size,
            geometry=self.geometry,
            goal=requirements.goal(candidates),
            seed=self.measurements.seed,
            believed=believed,
            first=self.recollection.first_probes(candidates),
        )
        for anchor in self.measurements:
            self._tell(planner, anchor)
        self._explore(planner)
        for each in candidates:
            if each in self._not_timed and self.affords(each):
                self._not_timed[each] = "too slow", "as its like were"
        while self._take_turns(planner):
            self._explore(planner)
        self._settle(planner, candidates)

    def _explore(self, planner: Planner) -> None:
        """Measure what may be better than all that was measured."""
        while (configuration := self._next(planner)) is not None:
            self._measure(configuration)
            self._tell(planner, configuration)
        while (doubted := planner.doubted()) is not None:
            if not self._is_time_for(doubted, until=_DOUBT_UNTIL, n_rounds=1):
                return
            self._measure(doubted)
            planner.take_back(doubted)
            self._tell(planner, doubted)

    def _take_turns(self, planner: Planner) -> bool:
        """Measure what may be the best in turns; return whether another turn is wanted."""
        chances = self._chances = planner.chances()
        if self._is_decided(chances):
            return False
        places = min(len(self.turns), len(_MOST_IN_TURN) - 1)
        likely = [each for each, chance in chances.items() if chance >= LEAST_CHANCE]
        turn = (likely if len(likely) > 1 else list(chances)[:2])[: _MOST_IN_TURN[places]]
        # Rather a few that are compared well than many.
        missing = max(1, LEAST_TURNS - len(self.turns))
        while len(turn) > 2 and missing * self._seconds_of_turn(turn) > self._left_for_turns:  # noqa: PLR2004
            turn.pop()
        rest = self._rest_of_throughput(_TURN_ROUNDS)  # the likeliest is in every turn
        if self._seconds_of_turn(turn) + rest > self._left_for_turns:
            return False
        self._rng.shuffle(turn)
        speeds = dict[Configuration, float]()
        for each in turn:
            found = self._measure(each, _TURN_ROUNDS, seconds=_TURN_SECONDS, in_turn=True)
            self._tell(planner, each)
            if found.round_seconds:
                speeds[each] = found.rough_cells_per_second
        self.turns.note(speeds)
        return True

    def _is_decided(self, chances: Mapping[Configuration, float]) -> bool:
        """Return whether more turns would change nothing."""
        if not chances:
            return True
        finalists = self.turns.finalists()
        if len(finalists) <= 1:
            return len(chances) == 1 and self.turns.count(next(iter(chances))) >= LEAST_TURNS
        best, others = finalists[0], finalists[1:]
        if self.turns.count(best) < LEAST_TURNS or best != next(iter(chances)):
            return False
        rivals = [self.turns.rival(best, each) for each in others]
        return all(each is not None and not each.is_undecided for each in rivals)

    def _settle(self, planner: Planner, candidates: Sequence[Configuration]) -> None:
        """Give the likeliest that there is time for a throughput, if there were too few turns.

        Where there is time for none, the cheapest gets one all the same: a recommendation that
        rests on little is better than none.
        """
        likely = list(planner.chances())
        for each in likely:
            missing = self._missing_rounds(each)
            if missing and self._durations.of(each, missing) <= self._budget.left:
                self._measure(each, missing)
                self._tell(planner, each)
            if not self._missing_rounds(each):
                return
        cheapest = min(likely or candidates, key=self._durations.of)
        if not self.measurements.has_failed(cheapest):
            self._measure(cheapest, self._missing_rounds(cheapest))

    def _rest_of_throughput(self, coming: int = 0) -> float:
        """Return the seconds that the likeliest's throughput takes after so many coming rounds."""
        if not self._chances:
            return 0.0
        likeliest = next(iter(self._chances))
        missing = self._missing_rounds(likeliest) - coming
        return self._durations.of(likeliest, missing) if missing > 0 else 0.0

    def _missing_rounds(self, configuration: Configuration) -> int:
        """Return how many rounds a throughput still lacks."""
        if configuration not in self.measurements:
            return FEWEST_ROUNDS
        found = len(self.measurements[configuration].round_seconds)
        return max(0, FEWEST_ROUNDS - found)

    @property
    def _left_for_turns(self) -> float:
        """Seconds that are left before the choice is measured with a training step, if it is."""
        step = self.requirements.constraints.step_seconds
        return self._budget.left_until(1.0 if step is None else _TURNS_UNTIL_WITH_STEP)

    def _seconds_of_turn(self, turn: Sequence[Configuration]) -> float:
        return sum(max(_TURN_SECONDS, self._durations.of(each, _TURN_ROUNDS)) for each in turn)

    @property
    def timed(self) -> list[Configuration]:
        """What was measured, if only for too short a time, in the order of its settings."""
        return sorted(self.measurements)

    @property
    def earlier(self) -> Earlier:
        """What became of earlier runs' results."""
        return self.recollection.said if self._comparison is None else self._comparison.earlier

    @property
    def is_short(self) -> bool:
        """Whether an earlier run was confirmed, so that there was little to look for."""
        return self.earlier.use == "confirmed"

    @property
    def _budget(self) -> TimeBudget:
        return self.measurements.budget

    def affords(self, configuration: Configuration, gain: float = 0.0) -> bool:
        """Return whether there is time to measure a configuration for the first time.

        What promises far more than turns may decide may use all the time that is left, except what
        its throughput takes, or that of the likeliest.
        """
        first, limit = self.cost(configuration), self._budget.limit_seconds
        until = _EXPLORE_UNTIL if self.proposals is None else _PROPOSE_UNTIL
        if self.is_short:
            until = _SHORT_UNTIL
        if first <= min(self._budget.left_until(until), limit):
            return True
        # With a need, gains are of how well it mixes.
        has_need = self.requirements.constraints.need_cells_per_second is not None
        if gain < _LARGE_GAIN or self.is_short or has_need:
            return False
        own = self._durations.of(configuration, FEWEST_ROUNDS - 1)
        reserve = max(own, self._rest_of_throughput())
        return first <= min(limit, self._left_for_turns - reserve)

    def cost(self, configuration: Configuration) -> float:
        """Return about how many seconds the first replicate takes."""
        return self._durations.of(configuration, 1)

    def survey(self) -> None:
        """Where nothing is feasible, measure what comes nearest to it and costs least.

        A space too large to list cannot be surveyed: there, proposals have looked for it.
        """
        if self.measurements.with_throughput():
            return
        rest = [
            configuration
            for configuration, (status, _) in self._not_timed.items()
            if status in {"too slow", "below entropy floor", "out of budget"}
        ]
        rest += [each for each in self.measurements if not self.measurements[each].failure]
        mixes = self.requirements.mixes
        for configuration in sorted(
            rest, key=lambda each: (not mixes(each), self._durations.of(each))
        ):
            is_first = len(self.measurements) == 0  # however little time there is
            if is_first or self._is_time_for(configuration, until=_SURVEY_UNTIL):
                self._measure(configuration, LEAST_ROUNDS)

    def with_step(self, choice: Choice) -> Measurement | None:
        """Measure the choice with the training step between minibatches; None without the time.

        So that there is a figure, it may rest on fewer rounds than a throughput does.
        """
        configuration = choice.result.configuration
        step, left = self.requirements.constraints.step_seconds, self._budget.left
        batch_size = self.measurements.batch_size
        seconds_per_minibatch = max(step or 0.0, batch_size / choice.speed.value)
        rounds = left / (seconds_per_minibatch * configuration.minibatches_per_round)
        least_rounds = min(LEAST_ROUNDS, int(rounds) - 1)
        if step is None or least_rounds < 1:
            return None
        found = self.measurements.timed(
            configuration,
            least_rounds=least_rounds,
            step_seconds=step,
            limit_seconds=2 * left + _SLACK_SECONDS,
        )
        return found if found.round_seconds else None

    def results(self, grid: Iterable[Configuration]) -> list[ConfigurationResult]:
        """Return what is known of each configuration."""
        return [self._result(configuration) for configuration in grid]

    def _standings(self) -> list[Standing]:
        """Return how everything that was measured stands by now."""
        return [self._standing(each, self.measurements.fair(each)) for each in self.measurements]

    def _standing(self, configuration: Configuration, found: Measurement) -> Standing:
        racing = self._chances.get(configuration, 1.0) >= LEAST_CHANCE
        state: RaceState = "racing" if racing else "left"
        if not self.requirements.mixes(configuration):
            state = "below floor"
        return Standing(
            configuration=configuration,
            state=state,
            n_rounds=len(found.round_seconds),
            cells_per_second=self.measurements.cells_per_second(configuration),
            rough_cells_per_second=found.rough_cells_per_second,
        )

    def _confirmed(
        self, candidates: Sequence[Configuration]
    ) -> Mapping[Configuration, Observation]:
        """Measure anchors of an earlier run again; return its costs if they hold.

        Each comes twice, the second time in reverse, so that what changes meanwhile meets all
        alike.
        """
        held = self.recollection.held
        if held is None:
            return {}
        possible = set(candidates)
        old = {each.configuration: each.seconds_per_cell for each in held.trials}
        # Until something is measured, old costs say how long that takes.
        self._durations.believe(
            roughly({each: cost for each, cost in old.items() if each in possible})
        )
        anchors = self._affordable_anchors(candidates)
        for each in [*anchors, *reversed(anchors)]:
            if self._is_time_for(each, until=_EXPLORE_UNTIL, n_rounds=_ANCHOR_ROUNDS):
                self._measure(each, _ANCHOR_ROUNDS)
        found = {
            each: self.measurements.replicates(each)
            for each in anchors
            if each in self.measurements
        }
        self._comparison = compare(held, found)
        believed = {
            each: cost for each, cost in self._comparison.believed.items() if each in possible
        }
        self._durations.believe(believed)
        return believed

    def _affordable_anchors(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Return anchors that there is time to measure twice, the most telling ones first."""
        anchors, seconds = list[Configuration](), 0.0
        for each in self.recollection.anchors(candidates):
            twice = 2 * self._durations.of(each, _ANCHOR_ROUNDS)
            if seconds + twice <= _SHORT_UNTIL * self._budget.seconds:
                anchors.append(each)
                seconds += twice
        return anchors

    def _feasible(self, proposals: "Proposals") -> list[Configuration]:
        """Return what meets the constraints where nothing known does; empty if none is found."""
        for _ in range(_MOST_TRIES):
            proposed = proposals.propose(
                _all_alike, self._shortfall, self._durations.of_first_replicate
            )
            found = [each for each in proposed if self.requirements.obstacle(each) is None]
            feasible = [each for each in found if self.requirements.mixes(each)]
            if feasible:
                return feasible
        return []

    def _next(self, planner: Planner) -> Configuration | None:
        """Return what to measure next, of what is known or proposed by now."""
        if self.proposals is not None and self._is_time_to_propose():
            proposed = self.proposals.propose(
                lambda configurations: planner.gains(configurations, self.requirements.goal),
                self._shortfall,
                self._durations.of_first_replicate,
            )
            self._add(proposed, planner)
        return planner.ask(self)

    def _is_time_to_propose(self) -> bool:
        """Return whether enough was learned since the last proposals, and there is time."""
        n_timed = len(self.measurements)
        in_time = self._budget.left_until(_PROPOSE_UNTIL) > 0
        if self.is_short or not in_time or n_timed < self._propose_at:
            return False
        self._propose_at = n_timed + _MEASURED_BETWEEN
        return True

    def _add(self, proposed: Iterable[Configuration], planner: Planner) -> None:
        known = {*self._not_timed, *self.measurements}
        new = [each for each in proposed if each not in known and self.requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(new, _OUT_OF_BUDGET)
        self._durations.add(new)
        planner.add(new, self.requirements.goal)

    def _shortfall(self, configuration: Configuration) -> float:
        """Return by how much a configuration misses what it must meet, 0 if it may meet all."""
        known = configuration in self.measurements
        return self.requirements.shortfall(
            configuration, self.measurements[configuration] if known else None
        )

    def _tell(self, planner: Planner, configuration: Configuration) -> None:
        found = self.measurements[configuration]
        planner.tell(configuration, self.measurements.replicates(configuration))
        memory_bytes = self.requirements.constraints.memory_bytes
        if found.failure or found.peak_memory_bytes > memory_bytes:
            planner.withdraw(configuration)
        if self.requirements.learn(found):
            planner.withdraw_unless(self.requirements.mixes)

    def _is_time_for(
        self, configuration: Configuration, *, until: float, n_rounds: int = LEAST_ROUNDS
    ) -> bool:
        return self._durations.of(configuration, n_rounds) <= self._budget.left_until(until)

    def _measure(
        self,
        configuration: Configuration,
        least_rounds: int = 1,
        *,
        seconds: float = SLICE_SECONDS,
        in_turn: bool = False,
    ) -> Measurement:
        found = self.measurements.take(
            configuration, least_rounds, seconds=seconds, in_turn=in_turn
        )
        self._not_timed.pop(configuration, None)
        return found

    def _result(self, configuration: Configuration) -> ConfigurationResult:
        entropies = self.requirements.entropies_of(configuration)
        if configuration in self._not_timed:
            status, note = self._not_timed[configuration]
            first, further = _by_label(entropies)
            return ConfigurationResult(
                configuration=configuration,
                status=status,
                note=note,
                entropy_bits=first,
                further_labels=further,
            )
        measurement = self.measurements[configuration]
        measured = measurement.entropy_bits
        first, further = _by_label(
            {name: replace(each, measured=measured.get(name)) for name, each in entropies.items()}
        )
        return ConfigurationResult(
            configuration=configuration,
            status=measurement.status,
            note=measurement.note,
            cells_per_second=self.measurements.cells_per_second(configuration),
            n_rounds=len(self.measurements.fair(configuration).round_seconds),
            entropy_bits=first,
            further_labels=further,
            peak_memory_bytes=measurement.peak_memory_bytes,
            bytes_read_per_cell=measurement.bytes_read_per_cell,
            worker_start_seconds=measurement.worker_start_seconds,
            first_minibatch_seconds=measurement.first_minibatch_seconds,
        )


def _by_label(
    entropies: Mapping[str, EntropyBits],
) -> tuple[EntropyBits, dict[str, LabelResult]]:
    """Return the first label's entropy, and the others' by name."""
    first, *others = entropies
    return entropies[first], {name: LabelResult(entropy_bits=entropies[name]) for name in others}


def _all_alike(configurations: Sequence[Configuration]) -> NDArray[np.float64]:
    """Expect the same gain of all, so that only constraints matter."""
    return np.ones(len(configurations))
