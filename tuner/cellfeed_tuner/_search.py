"""Spending a time budget: on what the planner asks for, on the rest, and on the choice afresh."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._grid import buffer_bytes, obstacle
from cellfeed_tuner._history._recall import Comparison, Earlier, Recollection, compare
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._measure import (
    FEWEST_ROUNDS,
    LEAST_ROUNDS,
    Measurement,
    cells_needed,
    measure_with,
    pooled,
)
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._planning._goal import Goal, best_mixed, fastest
from cellfeed_tuner._planning._nearby_shares import NearbyShares
from cellfeed_tuner._planning._planner import Planner
from cellfeed_tuner._planning._recommend import Choice
from cellfeed_tuner._progress import Progress, RaceState, RaceWatcher, Standing, unwatched
from cellfeed_tuner._result import (
    ConfigurationResult,
    Constraints,
    EntropyBits,
    LabelResult,
    Status,
)

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
_SLICE_SECONDS = 0.5
_MOST_ROUNDS = 64
_MOST_CONFIRM_SECONDS = 5.0
# A child that takes longer than this is stopped: a share of the budget, and its least.
_LIMIT_SHARE, _LEAST_LIMIT_SECONDS = 0.25, 5.0
# What a slow disk gives: as long as nothing is known, so large fetches are not begun with.
_UNKNOWN_CELLS_PER_SECOND = 1000.0
# How far a throughput may be mistaken in reckoning what else costs; and draws to reckon from.
_ROUGH_ERROR, _N_DRAWS = 0.1, 32
# How often to look for what meets the constraints where nothing known does.
_MOST_TRIES = 5
# First looks before anything is proposed, and then from one proposal to the next.
_LOOKS_BEFORE, _LOOKS_BETWEEN = 4, 3
# Epochs that one measurement may go through, at most.
_EPOCHS_APART = 1000
# How far off something is that cannot be said as a ratio.
_FAR = 100.0
_OUT_OF_BUDGET: tuple[Status, str] = ("out of budget", "")
_BELOW_FLOOR: tuple[Status, str] = ("below entropy floor", "")


class Entropies(Protocol):
    """Entropy of each label, the first label first, for any (block size, fetch factor)."""

    def __getitem__(self, sizes: tuple[int, int], /) -> Mapping[str, EntropyBits]:
        """Return those of one pair."""
        ...


@dataclass(slots=True, kw_only=True)
class Search:
    """One search, from the first measurement to the last.

    Parameters
    ----------
    process
        Where configurations run.
    n_cells, row_bytes
        Rows of the collection, and the mean size of one in a fetch's buffer.
    geometry
        How it lies in storage.
    labels, batch_size, cache, seed
        What is measured; see `autotune`.
    budget
        Seconds to spend.
    constraints
        What a choice must meet.
    entropies
        For each (block size, fetch factor) the entropy of each label, the first label first.
    on_progress
        Told how much of the budget is spent.
    on_race
        Handed what says how the race stands, before it begins.
    recollection
        Which earlier runs bear on it.
    proposals
        What proposes more than is given; None where that is all there is.
    clock
        Tells the time, in seconds from anywhere.
    """

    process: MeasuringProcess
    n_cells: int
    row_bytes: float
    geometry: Geometry
    labels: Sequence[str]
    batch_size: int
    cache: CacheState
    seed: int
    budget: float
    constraints: Constraints
    entropies: Entropies
    on_progress: Progress
    on_race: RaceWatcher = unwatched
    recollection: Recollection = field(default_factory=Recollection)
    proposals: "Proposals | None" = None
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)
    _slices: dict[Configuration, list[Measurement]] = field(default_factory=dict)
    _not_timed: dict[Configuration, tuple[Status, str]] = field(default_factory=dict)
    _faults: dict[Configuration, str] = field(default_factory=dict)
    _comparison: Comparison | None = None
    _believed: dict[Configuration, Observation] = field(default_factory=dict)
    _n_slices: int = 0
    _costs: CostModel = field(init=False)
    _planner: Planner | None = field(default=None, init=False)
    # How many configurations are to be timed before more are proposed.
    _propose_at: int = _LOOKS_BEFORE
    # As far as they were replayed.
    _shares: NearbyShares = field(default_factory=NearbyShares)
    # Seconds per cell, as the cost model has them after what was measured last.
    _expected: dict[Configuration, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def run(self, grid: Iterable[Configuration]) -> None:
        """Measure what may be chosen, as the planner says, until the best is clear."""
        self.on_race(self._standings)
        self._not_timed = {each: self._obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if self._mixes(each)]
        if not candidates and self.proposals is not None:
            candidates = self._feasible(self.proposals)
            runnable += candidates
            self._not_timed |= dict.fromkeys(candidates, _OUT_OF_BUDGET)
        self._costs = CostModel(runnable, self.batch_size, self.geometry)
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        if not candidates:
            return
        believed = self._confirmed(candidates)
        planner = self._planner = Planner(
            candidates,
            batch_size=self.batch_size,
            geometry=self.geometry,
            goal=self._goal(candidates),
            seed=self.seed,
            believed=believed,
            first=self.recollection.first_probes(candidates),
        )
        for anchor in self._slices:
            self._tell(planner, anchor)
        while (configuration := self._next(planner)) is not None:
            self._measure(configuration, self._least_rounds(configuration))
            self._tell(planner, configuration)
        for each in candidates:
            if each in self._not_timed and self.affords(each):
                self._not_timed[each] = "too slow", "as its like were"

    @property
    def timed(self) -> list[Configuration]:
        """What was measured, if only for too short a time, in the order of its settings."""
        return sorted(self._slices)

    @property
    def earlier(self) -> Earlier:
        """What became of earlier runs' results."""
        return self.recollection.said if self._comparison is None else self._comparison.earlier

    @property
    def is_short(self) -> bool:
        """Whether an earlier run was confirmed, so that there was little to look for."""
        return self.earlier.use == "confirmed"

    @property
    def faults(self) -> Mapping[Configuration, str]:
        """Configurations whose minibatches were not those of the plan, and how they were not."""
        return self._faults

    def affords(self, configuration: Configuration) -> bool:
        """Return whether there is time for a first look at a configuration, or for another."""
        look_until, race_until = self._until()
        until = race_until if configuration in self._slices else look_until
        if self.is_short:
            until = _SHORT_UNTIL
        n_rounds = self._least_rounds(configuration)
        seconds = self._expected_seconds(configuration, n_rounds)
        return seconds <= min(until * self.budget - self._spent(), self._limit_seconds())

    def cost(self, configuration: Configuration) -> float:
        """Return about how many seconds a first look takes."""
        return self._expected_seconds(configuration, self._least_rounds(configuration))

    def fill(self) -> None:
        """Spend what is left on the rest of the grid, so that it can be seen.

        What mixes well enough comes first, and then what costs least. A space too large to list
        cannot be seen, so there it only looks for what comes nearest to being feasible.
        """
        if self.proposals is not None and self.measured():
            return
        until = _FILL_UNTIL if self.constraints.step_seconds is None else _FILL_UNTIL_WITH_STEP
        rest = [
            configuration
            for configuration, (status, _) in self._not_timed.items()
            if status in {"too slow", "below entropy floor", "out of budget"}
        ]
        rest += [
            each for each, slices in self._slices.items() if pooled(slices).status != "measured"
        ]
        for configuration in sorted(
            rest, key=lambda each: (not self._mixes(each), self._expected_seconds(each))
        ):
            if self._affords(configuration, until=until):
                self._measure(configuration)

    def confirm(self, choice: Choice) -> Measurement | None:
        """Measure the choice afresh; None if no time is left for it, or it does not suffice."""
        configuration = choice.result.configuration
        if not self._affords(configuration, until=1.0):
            return None
        seconds = min(_MOST_CONFIRM_SECONDS, (self.budget - self._spent()) / 2)
        fresh = self._timed(configuration, seconds=seconds)
        return fresh if fresh.status == "measured" else None

    def with_step(self, choice: Choice) -> Measurement | None:
        """Measure the choice with the training step between minibatches; None without the time.

        So that there is a figure, it may rest on fewer rounds than a throughput does.
        """
        configuration, step = choice.result.configuration, self.constraints.step_seconds
        left = self.budget - self._spent()
        seconds_per_minibatch = max(step or 0.0, self.batch_size / choice.speed.value)
        rounds = left / (seconds_per_minibatch * configuration.minibatches_per_round)
        least_rounds = min(LEAST_ROUNDS, int(rounds) - 1)
        if step is None or least_rounds < 1:
            return None
        found = self._timed(
            configuration,
            seconds=_SLICE_SECONDS,
            least_rounds=least_rounds,
            step_seconds=step,
            limit_seconds=2 * left + _LEAST_LIMIT_SECONDS,
        )
        return found if found.round_seconds else None

    def results(self, grid: Iterable[Configuration]) -> list[ConfigurationResult]:
        """Return what is known of each configuration."""
        return [self._result(configuration) for configuration in grid]

    def _standings(self) -> list[Standing]:
        """Return how everything that was measured stands in the race by now."""
        return [self._standing(each, pooled(slices)) for each, slices in self._slices.items()]

    def _standing(self, configuration: Configuration, found: Measurement) -> Standing:
        racing = self._planner is not None and self._planner.is_racing(configuration)
        state: RaceState = "left" if self._mixes(configuration) else "below floor"
        return Standing(
            configuration=configuration,
            state="racing" if racing else state,
            n_rounds=len(found.round_seconds),
            cells_per_second=found.cells_per_second,
            rough_cells_per_second=found.rough_cells_per_second,
        )

    def measured(self) -> dict[Configuration, Measurement]:
        """Return what was measured of each configuration that has a throughput."""
        found = {each: pooled(slices) for each, slices in self._slices.items()}
        return {each: one for each, one in found.items() if one.cells_per_second is not None}

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
        # Until something is measured, old costs say how long that takes.
        self._believed = {
            each.configuration: Observation(each.seconds_per_cell.value, _ROUGH_ERROR)
            for each in held.trials
            if each.configuration in possible
        }
        anchors = self._affordable_anchors(candidates)
        for each in [*anchors, *reversed(anchors)]:
            if self._affords(each, until=_RACE_UNTIL, n_rounds=_ANCHOR_ROUNDS):
                self._measure(each, _ANCHOR_ROUNDS)
        found = {each: pooled(self._slices[each]) for each in anchors if each in self._slices}
        self._comparison = compare(held, found)
        self._believed = {
            each: cost for each, cost in self._comparison.believed.items() if each in possible
        }
        self._expected.clear()
        return self._believed

    def _affordable_anchors(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Return anchors for whose laps there is time, the most telling ones first."""
        anchors, seconds = list[Configuration](), 0.0
        for each in self.recollection.anchors(candidates):
            laps = 2 * self._expected_seconds(each, _ANCHOR_ROUNDS)
            if seconds + laps <= _SHORT_UNTIL * self.budget:
                anchors.append(each)
                seconds += laps
        return anchors

    def _feasible(self, proposals: "Proposals") -> list[Configuration]:
        """Return what meets the constraints where nothing known does; empty if none is found."""
        for _ in range(_MOST_TRIES):
            proposed = proposals.propose(_all_alike, self._shortfall, self._rough_seconds)
            found = [each for each in proposed if self._obstacle(each) is None]
            feasible = [each for each in found if self._mixes(each)]
            if feasible:
                return feasible
        return []

    def _next(self, planner: Planner) -> Configuration | None:
        """Return what to measure next, of what is known or proposed by now."""
        if self.proposals is not None and self._is_time_to_propose():
            proposed = self.proposals.propose(
                lambda configurations: planner.gains(configurations, self._goal),
                self._shortfall,
                self._rough_seconds,
            )
            self._add(proposed, planner)
        return planner.ask(self)

    def _is_time_to_propose(self) -> bool:
        """Return whether enough was learned since the last proposals, and there is time to look."""
        n_timed = len(self._slices)
        look_until, _ = self._until()
        in_time = self._spent() < look_until * self.budget
        if self.is_short or not in_time or n_timed < self._propose_at:
            return False
        self._propose_at = n_timed + _LOOKS_BETWEEN
        return True

    def _add(self, proposed: Iterable[Configuration], planner: Planner) -> None:
        known = {*self._not_timed, *self._slices}
        new = [each for each in proposed if each not in known and self._mixes(each)]
        self._not_timed |= dict.fromkeys(new, _OUT_OF_BUDGET)
        self._costs = CostModel([*self._costs.configurations, *new], self.batch_size, self.geometry)
        self._expected.clear()
        planner.add(new, self._goal)

    def _until(self) -> tuple[float, float]:
        """Return until which shares of the budget there are first looks, and others."""
        if self.proposals is None or self.constraints.step_seconds is not None:
            return _PROBE_UNTIL, _RACE_UNTIL
        return _PROPOSE_UNTIL, _PROPOSED_RACE_UNTIL

    def _shortfall(self, configuration: Configuration) -> float:
        """Return by how much a configuration misses what it must meet, 0 if it may meet all.

        As the logarithm of a ratio.
        """
        if configuration in self._slices:
            found = pooled(self._slices[configuration])
            if found.failure:
                return _FAR
            return _excess(found.peak_memory_bytes, self.constraints.memory_bytes)
        cells = max(cells_needed(configuration, self.batch_size), configuration.block_size)
        missed = _excess(cells, self.n_cells)
        buffers = buffer_bytes(configuration, self.batch_size, self.row_bytes)
        missed += _excess(buffers, self.constraints.memory_bytes)
        if missed:
            return missed
        share = self._shares.estimate(configuration.block_size, configuration.fetch_factor)
        return _excess(self.constraints.entropy_floor, share)

    def _tell(self, planner: Planner, configuration: Configuration) -> None:
        found = pooled(self._slices[configuration])
        planner.tell(configuration, self._looks(configuration))
        if found.failure or found.peak_memory_bytes > self.constraints.memory_bytes:
            planner.withdraw(configuration)

    def _goal(self, candidates: Sequence[Configuration]) -> Goal:
        need = self.constraints.need_cells_per_second
        if need is None:
            return fastest
        # Of candidates it is exact, as they were replayed.
        shares = [self._shares.estimate(each.block_size, each.fetch_factor) for each in candidates]
        return best_mixed(need, shares)

    def _looks(self, configuration: Configuration) -> list[list[float]]:
        """Return seconds per cell, a few samples for each slice of time."""
        cells = configuration.minibatches_per_round * self.batch_size
        slices = [each.round_seconds for each in self._slices[configuration]]
        looks = [
            [
                float(group.mean()) / cells
                for group in np.array_split(rounds, min(len(rounds), FEWEST_ROUNDS))
            ]
            for rounds in slices
            if rounds
        ]
        if looks:
            return looks
        first = self._slices[configuration][0]
        if first.failure:
            return []
        # Where no round came in time, one takes at least as long as was waited for it.
        return [[(first.first_round_seconds or self._limit_seconds()) / cells]]

    def _least_rounds(self, configuration: Configuration) -> int:
        """Return one for a first look, then what a throughput needs, then what one relies on."""
        slices = self._slices.get(configuration, [])
        n_rounds = sum(len(each.round_seconds) for each in slices)
        missing = (number - n_rounds for number in (FEWEST_ROUNDS, LEAST_ROUNDS))
        return next((each for each in missing if each > 0), 1) if slices else 1

    def _spent(self) -> float:
        return self.clock() - self._start

    def _mixes(self, configuration: Configuration) -> bool:
        share = min(each.share_of_random for each in self._entropies(configuration).values())
        self._shares.note(configuration.block_size, configuration.fetch_factor, share)
        return share >= self.constraints.entropy_floor

    def _entropies(self, configuration: Configuration) -> Mapping[str, EntropyBits]:
        return self.entropies[configuration.block_size, configuration.fetch_factor]

    def _obstacle(self, configuration: Configuration) -> tuple[Status, str] | None:
        """Return why a configuration cannot run at all, if it cannot."""
        return obstacle(
            configuration,
            n_cells=self.n_cells,
            batch_size=self.batch_size,
            row_bytes=self.row_bytes,
            memory_bytes=self.constraints.memory_bytes,
        )

    def _affords(
        self, configuration: Configuration, *, until: float, n_rounds: int = LEAST_ROUNDS
    ) -> bool:
        needed = self._expected_seconds(configuration, n_rounds)
        return self._spent() + needed <= until * self.budget

    def _expected_seconds(
        self, configuration: Configuration, n_rounds: int = LEAST_ROUNDS
    ) -> float:
        """Return about how long rounds and the first take, by the cost model."""
        cells = (n_rounds + 1) * configuration.minibatches_per_round * self.batch_size
        if not self._expected:
            measured = {
                each: Observation(float(np.mean(np.concatenate(looks))), _ROUGH_ERROR)
                for each in self._slices
                if (looks := self._looks(each))
            }
            seen = self._believed | measured
            if not seen:
                return cells / _UNKNOWN_CELLS_PER_SECOND
            draws = self._costs.draw(seen, _N_DRAWS, np.random.default_rng(self.seed))
            self._expected = dict(
                zip(self._costs.configurations, np.exp(np.median(draws, axis=0)), strict=True)
            )
        return max(_SLICE_SECONDS, cells * float(self._expected[configuration]))

    def _rough_seconds(self, configuration: Configuration) -> float:
        """Return about how long a first look takes if cells take as long as at best so far."""
        speeds = [pooled(each).rough_cells_per_second for each in self._slices.values()]
        fastest = max(speeds, default=0.0) or _UNKNOWN_CELLS_PER_SECOND
        cells = 2 * configuration.minibatches_per_round * self.batch_size
        return max(_SLICE_SECONDS, cells / fastest)

    def _measure(
        self, configuration: Configuration, least_rounds: int = LEAST_ROUNDS
    ) -> Measurement:
        new = self._timed(configuration, seconds=_SLICE_SECONDS, least_rounds=least_rounds)
        slices = self._slices.setdefault(configuration, [])
        slices.append(new)
        self._not_timed.pop(configuration, None)
        self._expected.clear()
        self._n_slices += 1
        return pooled(slices)

    def _timed(
        self,
        configuration: Configuration,
        *,
        seconds: float,
        least_rounds: int = LEAST_ROUNDS,
        step_seconds: float = 0.0,
        limit_seconds: float | None = None,
    ) -> Measurement:
        self.on_progress("throughput", min(self._spent(), self.budget), self.budget)
        measurement = measure_with(
            self.process,
            TimingRequest(
                configuration=configuration,
                batch_size=self.batch_size,
                labels=self.labels,
                cache=self.cache,
                seconds=seconds,
                least_rounds=least_rounds,
                most_rounds=_MOST_ROUNDS,
                seed=self.seed,
                # Other rows each time, as over the epochs of a training.
                first_epoch=_EPOCHS_APART * self._n_slices,
                step_seconds=step_seconds,
            ),
            limit_seconds=limit_seconds or self._limit_seconds(),
        )
        if measurement.delivery_fault:
            self._faults.setdefault(configuration, measurement.delivery_fault)
        return measurement

    def _limit_seconds(self) -> float:
        return max(_LEAST_LIMIT_SECONDS, _LIMIT_SHARE * self.budget)

    def _result(self, configuration: Configuration) -> ConfigurationResult:
        entropies = self._entropies(configuration)
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
        measurement = pooled(self._slices[configuration])
        measured = measurement.entropy_bits
        first, further = _by_label(
            {name: replace(each, measured=measured.get(name)) for name, each in entropies.items()}
        )
        return ConfigurationResult(
            configuration=configuration,
            status=measurement.status,
            note=measurement.failure,
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


def _excess(found: float, allowed: float) -> float:
    """Return the logarithm of the ratio by which something exceeds what is allowed."""
    if found <= allowed:
        return 0.0
    return log(found / allowed) if allowed > 0 else _FAR
