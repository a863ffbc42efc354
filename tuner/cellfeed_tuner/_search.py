"""Spending a time budget on measuring: survey the grid, race the contenders, confirm the choice."""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measure import (
    LEAST_ROUNDS,
    Measurement,
    cells_needed,
    measure_with,
    pooled,
)
from cellfeed_tuner._measuring_process import MeasuringProcess
from cellfeed_tuner._page_cache import CacheState
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._recommend import Choice
from cellfeed_tuner._result import ConfigurationResult, Constraints, EntropyBits, Status
from cellfeed_tuner._timing import TimingRequest

__all__ = ["Search"]

# Shares of the budget at which each phase ends; the rest confirms the choice.
_SURVEY_UNTIL, _RACE_UNTIL, _FILL_UNTIL = 0.4, 0.65, 0.8
_SLICE_SECONDS = 0.5
_MOST_ROUNDS = 64
_MOST_CONFIRM_SECONDS = 5.0
# A child that takes longer than this is stopped: a share of the budget, and its least.
_LIMIT_SHARE, _LEAST_LIMIT_SECONDS = 0.25, 5.0
# What a single rough sample may be mistaken by: slower than this share of the best is out.
_ROUGH = 0.75
# An interval this narrow needs no further samples.
_PRECISE = 0.02
# Epochs that one measurement may go through, at most.
_EPOCHS_APART = 1000


@dataclass(slots=True, kw_only=True)
class Search:
    """One search, from the first measurement to the last.

    Parameters
    ----------
    process
        Where configurations run.
    n_cells, row_bytes
        Rows of the collection, and the mean size of one in a fetch's buffer.
    label, batch_size, cache, seed
        What is measured; see `autotune`.
    budget
        Seconds to spend.
    constraints
        What a choice must meet.
    entropies
        Label entropy for each (block size, fetch factor).
    on_progress
        Told how much of the budget is spent.
    """

    process: MeasuringProcess
    n_cells: int
    row_bytes: float
    label: str
    batch_size: int
    cache: CacheState
    seed: int
    budget: float
    constraints: Constraints
    entropies: Mapping[tuple[int, int], EntropyBits]
    on_progress: Progress
    _start: float = field(default_factory=time.monotonic)
    _measurements: dict[Configuration, Measurement] = field(default_factory=dict)
    _not_timed: dict[Configuration, tuple[Status, str]] = field(default_factory=dict)
    _n_slices: int = 0

    def survey(self, grid: Sequence[Configuration]) -> None:
        """Time roughly what may be chosen, large blocks and fetches first.

        Larger blocks touch fewer chunks, so they bound what smaller ones can reach: one that
        cannot come near the best is not timed.
        """
        for configuration in grid:
            self._not_timed[configuration] = self._obstacle(configuration) or ("out of budget", "")
        to_time = [each for each in grid if self._not_timed[each][0] == "out of budget"]
        for configuration in sorted(to_time, key=_size, reverse=True):
            if not self._mixes(configuration):
                self._not_timed[configuration] = "below entropy floor", ""
            elif self._bound(configuration) < _ROUGH * self._aim():
                self._not_timed[configuration] = "too slow", "as larger blocks are"
            elif self._affords(configuration, until=_SURVEY_UNTIL, n_rounds=0):
                self._measure(configuration, least_rounds=0)

    def race(self) -> None:
        """Time again, round by round in random order, what cannot be told from the fastest."""
        # The first round goes from cheap to dear, so that little time brings the most samples.
        rivals = sorted(self._open_rivals(), key=self._expected_seconds)
        order = random.Random(self.seed)  # noqa: S311 - no secret depends on it
        while rivals:
            for configuration in rivals:
                if self._affords(configuration, until=_RACE_UNTIL):
                    self._measure(configuration)
            rivals = self._open_rivals()
            order.shuffle(rivals)

    def fill(self) -> None:
        """Spend what is left on the rest of the grid, so that it can be seen.

        What mixes well enough comes first, and then what costs least.
        """
        rest = [
            configuration
            for configuration, (status, _) in self._not_timed.items()
            if status in {"too slow", "below entropy floor", "out of budget"}
        ]
        rest += [each for each, found in self._measurements.items() if found.status != "measured"]
        for configuration in sorted(
            rest, key=lambda each: (not self._mixes(each), self._expected_seconds(each))
        ):
            if self._affords(configuration, until=_FILL_UNTIL):
                self._measure(configuration)

    def confirm(self, choice: Choice) -> Measurement | None:
        """Measure the choice afresh; None if no time is left for it, or it does not suffice."""
        configuration = choice.result.configuration
        if not self._affords(configuration, until=1.0):
            return None
        seconds = min(_MOST_CONFIRM_SECONDS, (self.budget - self._spent()) / 2)
        fresh = self._timed(configuration, seconds=seconds)
        return fresh if fresh.status == "measured" else None

    def results(self, grid: Iterable[Configuration]) -> list[ConfigurationResult]:
        """Return what is known of each configuration."""
        return [self._result(configuration) for configuration in grid]

    def _open_rivals(self) -> list[Configuration]:
        """Return what may be the fastest, can still be timed, and is not known precisely."""
        feasible = [
            (configuration, found)
            for configuration, found in self._measurements.items()
            if self._mixes(configuration)
            and found.rough_cells_per_second
            and found.peak_memory_bytes <= self.constraints.memory_bytes
        ]
        best = max((found.rough_cells_per_second for _, found in feasible), default=0.0)
        aim = min(best, self._aim())
        rivals = [
            (configuration, found.cells_per_second)
            for configuration, found in feasible
            if _may_reach(found, aim)
        ]
        return [
            configuration
            for configuration, speed in rivals
            if (speed is None or (len(rivals) > 1 and not _is_precise(speed)))
            and self._affords(configuration, until=_RACE_UNTIL)
        ]

    def _aim(self) -> float:
        """Return the throughput to reach: the best so far, or the need if that is less."""
        best = max((each.rough_cells_per_second for each in self._measurements.values()), default=0)
        need = self.constraints.need_cells_per_second
        return best if need is None else min(best, need)

    def _bound(self, configuration: Configuration) -> float:
        """Return what a configuration can reach at most, from larger blocks."""
        larger = {
            each.block_size: found.rough_cells_per_second
            for each, found in self._measurements.items()
            if each.num_workers == configuration.num_workers
            and each.fetch_factor == configuration.fetch_factor
            and each.block_size > configuration.block_size
            and found.rough_cells_per_second
        }
        return larger[min(larger)] if larger else float("inf")

    def _spent(self) -> float:
        return time.monotonic() - self._start

    def _mixes(self, configuration: Configuration) -> bool:
        return self._entropy(configuration).share_of_random >= self.constraints.entropy_floor

    def _entropy(self, configuration: Configuration) -> EntropyBits:
        return self.entropies[configuration.block_size, configuration.fetch_factor]

    def _obstacle(self, configuration: Configuration) -> tuple[Status, str] | None:
        """Return why a configuration cannot run at all, if it cannot."""
        if configuration.block_size > self.n_cells:
            return "too few cells", f"a block has more than the {self.n_cells:,} cells there are"
        needed = cells_needed(configuration, self.batch_size)
        if needed > self.n_cells:
            return "too few cells", f"whole fetches need {needed:,} cells"
        cells_in_memory = configuration.minibatches_per_round * self.batch_size
        # While one fetch is dealt out, the next is read; workers have one more waiting.
        buffers = cells_in_memory * self.row_bytes * (3 if configuration.num_workers else 2)
        if buffers > self.constraints.memory_bytes:
            return "over memory", f"its buffers alone take {buffers / 1e6:,.0f} MB"
        return None

    def _affords(
        self, configuration: Configuration, *, until: float, n_rounds: int = LEAST_ROUNDS
    ) -> bool:
        needed = self._expected_seconds(configuration, n_rounds)
        return self._spent() + needed <= until * self.budget

    def _expected_seconds(
        self, configuration: Configuration, n_rounds: int = LEAST_ROUNDS
    ) -> float:
        """Return about how long rounds and the first take, judged by the nearest relative."""
        relatives = [
            (
                each.block_size >= configuration.block_size,
                -abs(log(each.block_size / configuration.block_size)),
                each.num_workers == configuration.num_workers,
                -abs(log(each.fetch_factor / configuration.fetch_factor)),
                found.rough_cells_per_second,
            )
            for each, found in self._measurements.items()
            if found.rough_cells_per_second
        ]
        if not relatives:
            return _SLICE_SECONDS
        cells = (n_rounds + 1) * configuration.minibatches_per_round * self.batch_size
        return max(_SLICE_SECONDS, cells / max(relatives)[-1])

    def _measure(self, configuration: Configuration, least_rounds: int = LEAST_ROUNDS) -> None:
        new = self._timed(configuration, seconds=_SLICE_SECONDS, least_rounds=least_rounds)
        known = self._measurements.get(configuration)
        self._measurements[configuration] = new if known is None else pooled([known, new])
        self._not_timed.pop(configuration, None)
        self._n_slices += 1

    def _timed(
        self, configuration: Configuration, *, seconds: float, least_rounds: int = LEAST_ROUNDS
    ) -> Measurement:
        self.on_progress("throughput", min(self._spent(), self.budget), self.budget)
        return measure_with(
            self.process,
            TimingRequest(
                configuration=configuration,
                batch_size=self.batch_size,
                label=self.label,
                cache=self.cache,
                seconds=seconds,
                least_rounds=least_rounds,
                most_rounds=_MOST_ROUNDS,
                seed=self.seed,
                # Other rows each time, as over the epochs of a training.
                first_epoch=_EPOCHS_APART * self._n_slices,
            ),
            limit_seconds=max(_LEAST_LIMIT_SECONDS, _LIMIT_SHARE * self.budget),
        )

    def _result(self, configuration: Configuration) -> ConfigurationResult:
        entropy = self._entropy(configuration)
        if configuration in self._not_timed:
            status, note = self._not_timed[configuration]
            return ConfigurationResult(
                configuration=configuration, status=status, note=note, entropy_bits=entropy
            )
        measurement = self._measurements[configuration]
        return ConfigurationResult(
            configuration=configuration,
            status=measurement.status,
            note=measurement.failure,
            cells_per_second=measurement.cells_per_second,
            n_rounds=len(measurement.round_seconds),
            entropy_bits=replace(entropy, measured=measurement.entropy_bits),
            peak_memory_bytes=measurement.peak_memory_bytes,
            worker_start_seconds=measurement.worker_start_seconds,
            first_minibatch_seconds=measurement.first_minibatch_seconds,
        )


def _size(configuration: Configuration) -> tuple[int, int, int]:
    return configuration.block_size, configuration.fetch_factor, -configuration.num_workers


def _may_reach(measurement: Measurement, aim: float) -> bool:
    """Return whether a throughput may turn out to be as high as ``aim``."""
    speed = measurement.cells_per_second
    if speed is None:
        return measurement.rough_cells_per_second >= _ROUGH * aim
    return speed.high >= aim


def _is_precise(speed: Estimate | None) -> bool:
    return speed is not None and speed.high - speed.low <= 2 * _PRECISE * speed.value
