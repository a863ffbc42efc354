"""Spending a time budget: on what the planner asks for, on the rest, and on the choice afresh."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._recall import Comparison, Earlier, Recollection, compare
from cellfeed_tuner._measuring._measure import FEWEST_ROUNDS, LEAST_ROUNDS, Measurement
from cellfeed_tuner._planning._cost_model import Geometry, Observation
from cellfeed_tuner._planning._planner import Planner
from cellfeed_tuner._planning._recommend import Choice
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

# Shares of the budget until which something is measured for the first time, raced, and filled in,
# without and with a training step to measure the choice with; the rest is for the choice.
_PROBE_UNTIL, _RACE_UNTIL, _FILL_UNTIL, _FILL_UNTIL_WITH_STEP = 0.45, 0.65, 0.8, 0.65
# The first two where there are proposals and no step: nothing is filled in, and there is more to
# look at.
_PROPOSE_UNTIL, _PROPOSED_RACE_UNTIL = 0.6, 0.8
# Where an earlier run is confirmed, until then for its anchors and all else but the choice afresh;
# and rounds of an anchor in each of two laps.
_SHORT_UNTIL, _ANCHOR_ROUNDS = 0.45, FEWEST_ROUNDS // 2
_MOST_CONFIRM_SECONDS = 5.0
# Beyond what should suffice for a loop with a training step, before it is stopped.
_SLACK_SECONDS = 5.0
# How often to look for what meets the constraints where nothing known does.
_MOST_TRIES = 5
# First looks before anything is proposed, and then from one proposal to the next.
_LOOKS_BEFORE, _LOOKS_BETWEEN = 4, 3
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
    _planner: Planner | None = field(default=None, init=False)
    # How many configurations are to be timed before more are proposed.
    _propose_at: int = field(default=_LOOKS_BEFORE, init=False)

    def run(self, grid: Iterable[Configuration]) -> None:
        """Measure what may be chosen, as the planner says, until the best is clear."""
        self.on_race(self._standings)
        requirements = self.requirements
        self._not_timed = {each: requirements.obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        self._durations = Durations(runnable, self.geometry, self.measurements)
        if not candidates and self.proposals is not None:
            candidates = self._feasible(self.proposals)
            self._not_timed |= dict.fromkeys(candidates, _OUT_OF_BUDGET)
            self._durations.add(candidates)
        if not candidates:
            return
        believed = self._confirmed(candidates)
        planner = self._planner = Planner(
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
        while (configuration := self._next(planner)) is not None:
            self._look(configuration, self.measurements.least_rounds(configuration))
            self._tell(planner, configuration)
        for each in candidates:
            if each in self._not_timed and self.affords(each):
                self._not_timed[each] = "too slow", "as its like were"

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

    def affords(self, configuration: Configuration) -> bool:
        """Return whether there is time for a first look at a configuration, or for another."""
        look_until, race_until = self._until()
        until = race_until if configuration in self.measurements else look_until
        if self.is_short:
            until = _SHORT_UNTIL
        return self.cost(configuration) <= min(
            self._budget.left_until(until), self._budget.limit_seconds
        )

    def cost(self, configuration: Configuration) -> float:
        """Return about how many seconds the next look takes."""
        return self._durations.of(configuration, self.measurements.least_rounds(configuration))

    def fill(self) -> None:
        """Spend what is left on the rest of the grid, so that it can be seen.

        What mixes well enough comes first, and then what costs least. A space too large to list
        cannot be seen, so there it only looks for what comes nearest to being feasible.
        """
        measurements, mixes = self.measurements, self.requirements.mixes
        if self.proposals is not None and measurements.with_throughput():
            return
        step = self.requirements.constraints.step_seconds
        until = _FILL_UNTIL if step is None else _FILL_UNTIL_WITH_STEP
        rest = [
            configuration
            for configuration, (status, _) in self._not_timed.items()
            if status in {"too slow", "below entropy floor", "out of budget"}
        ]
        rest += [each for each in measurements if measurements[each].status != "measured"]
        for configuration in sorted(
            rest, key=lambda each: (not mixes(each), self._durations.of(each))
        ):
            if self._is_time_for(configuration, until=until):
                self._look(configuration, LEAST_ROUNDS)

    def confirm(self, choice: Choice) -> Measurement | None:
        """Measure the choice afresh; None if no time is left for it, or it does not suffice."""
        configuration = choice.result.configuration
        if not self._is_time_for(configuration, until=1.0):
            return None
        seconds = min(_MOST_CONFIRM_SECONDS, self._budget.left / 2)
        fresh = self.measurements.timed(configuration, seconds=seconds)
        return fresh if fresh.status == "measured" else None

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
        """Return how everything that was measured stands in the race by now."""
        return [self._standing(each, self.measurements[each]) for each in self.measurements]

    def _standing(self, configuration: Configuration, found: Measurement) -> Standing:
        racing = self._planner is not None and self._planner.is_racing(configuration)
        state: RaceState = "left" if self.requirements.mixes(configuration) else "below floor"
        return Standing(
            configuration=configuration,
            state="racing" if racing else state,
            n_rounds=len(found.round_seconds),
            cells_per_second=found.cells_per_second,
            rough_cells_per_second=found.rough_cells_per_second,
        )

    def _confirmed(
        self, candidates: Sequence[Configuration]
    ) -> Mapping[Configuration, Observation]:
        """Measure anchors of an earlier run again; return its costs if they hold.

        There are two laps, the second in reverse, so that what changes meanwhile meets all alike.
        """
        held = self.recollection.held
        if held is None:
            return {}
        possible = set(candidates)
        old = {each.configuration: each.seconds_per_cell.value for each in held.trials}
        # Until something is measured, old costs say how long that takes.
        self._durations.believe(
            roughly({each: cost for each, cost in old.items() if each in possible})
        )
        anchors = self._affordable_anchors(candidates)
        for each in [*anchors, *reversed(anchors)]:
            if self._is_time_for(each, until=_RACE_UNTIL, n_rounds=_ANCHOR_ROUNDS):
                self._look(each, _ANCHOR_ROUNDS)
        found = {each: self.measurements[each] for each in anchors if each in self.measurements}
        self._comparison = compare(held, found)
        believed = {
            each: cost for each, cost in self._comparison.believed.items() if each in possible
        }
        self._durations.believe(believed)
        return believed

    def _affordable_anchors(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Return anchors for whose laps there is time, the most telling ones first."""
        anchors, seconds = list[Configuration](), 0.0
        for each in self.recollection.anchors(candidates):
            laps = 2 * self._durations.of(each, _ANCHOR_ROUNDS)
            if seconds + laps <= _SHORT_UNTIL * self._budget.seconds:
                anchors.append(each)
                seconds += laps
        return anchors

    def _feasible(self, proposals: "Proposals") -> list[Configuration]:
        """Return what meets the constraints where nothing known does; empty if none is found."""
        for _ in range(_MOST_TRIES):
            proposed = proposals.propose(_all_alike, self._shortfall, self._durations.of_first_look)
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
                self._durations.of_first_look,
            )
            self._add(proposed, planner)
        return planner.ask(self)

    def _is_time_to_propose(self) -> bool:
        """Return whether enough was learned since the last proposals, and there is time to look."""
        n_timed = len(self.measurements)
        look_until, _ = self._until()
        in_time = self._budget.left_until(look_until) > 0
        if self.is_short or not in_time or n_timed < self._propose_at:
            return False
        self._propose_at = n_timed + _LOOKS_BETWEEN
        return True

    def _add(self, proposed: Iterable[Configuration], planner: Planner) -> None:
        known = {*self._not_timed, *self.measurements}
        new = [each for each in proposed if each not in known and self.requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(new, _OUT_OF_BUDGET)
        self._durations.add(new)
        planner.add(new, self.requirements.goal)

    def _until(self) -> tuple[float, float]:
        """Return until which shares of the budget there are first looks, and others."""
        if self.proposals is None or self.requirements.constraints.step_seconds is not None:
            return _PROBE_UNTIL, _RACE_UNTIL
        return _PROPOSE_UNTIL, _PROPOSED_RACE_UNTIL

    def _shortfall(self, configuration: Configuration) -> float:
        """Return by how much a configuration misses what it must meet, 0 if it may meet all."""
        known = configuration in self.measurements
        return self.requirements.shortfall(
            configuration, self.measurements[configuration] if known else None
        )

    def _tell(self, planner: Planner, configuration: Configuration) -> None:
        found = self.measurements[configuration]
        planner.tell(configuration, self.measurements.looks(configuration))
        memory_bytes = self.requirements.constraints.memory_bytes
        if found.failure or found.peak_memory_bytes > memory_bytes:
            planner.withdraw(configuration)

    def _is_time_for(
        self, configuration: Configuration, *, until: float, n_rounds: int = LEAST_ROUNDS
    ) -> bool:
        return self._durations.of(configuration, n_rounds) <= self._budget.left_until(until)

    def _look(self, configuration: Configuration, least_rounds: int) -> None:
        self.measurements.look(configuration, least_rounds)
        self._not_timed.pop(configuration, None)

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
            cells_per_second=measurement.cells_per_second,
            n_rounds=len(measurement.round_seconds),
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
