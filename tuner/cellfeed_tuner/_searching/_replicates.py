"""All that a search measures, replicate by replicate."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log, sqrt
from statistics import median
from sys import maxsize
from typing import NamedTuple

import numpy as np

from cellfeed import CellDataset
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    FEWEST_ROUNDS,
    LEAST_LIMIT_LEFT,
    MOST_ROUNDS_OF_REPLICATE,
    REPLICATE_SECONDS,
)
from cellfeed_tuner._interval import Estimate, Spread, seen_spread
from cellfeed_tuner._machine import OtherPrograms
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, Measurement, measure_with, pooled
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._measuring._process import Runs
from cellfeed_tuner._measuring._timing import MakeDataset, Step, TimingRequest
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._results import ConfigurationResult, EntropyBits, LabelResult, Status
from cellfeed_tuner._searching._posterior import Replicate
from cellfeed_tuner._subject import LabelWithin
from cellfeed_tuner._time_budget import Progress, TimeBudget, silent

# Fewest pairs of adjacent replicates for estimating what replicates of the same time have in
# common. Chosen.
FEWEST_PRODUCTS = 4


class _Taken(NamedTuple):
    """One replicate: in which turn it was measured, and whether in turn with others."""

    found: Measurement
    number: int  # in the order of time
    turn: int
    in_turn: bool
    is_first_trial: bool
    limit_seconds: float


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Times configurations, and keeps the results, replicate by replicate.

    Entropy is measured of each label, and of the first one within ``given``; see `autotune`.

    Attributes
    ----------
    faults
        How the minibatches of a configuration deviated from the plan or the files.
    by_clock
        Whether costs are by the clock, also on a busy machine, where they are otherwise what
        the same work would take without other programs; see `undisturbed_share`.
    sampled
        Cells of the last replicate of each configuration; the one measured last comes last.
    n_replicates
        Replicates of all configurations.
    """

    process: Runs
    labels: Sequence[str]
    batch_size: int
    cache: CacheState
    seed: int
    budget: TimeBudget
    given: str | None = None
    on_progress: Progress = silent
    make_dataset: MakeDataset = CellDataset
    step: Step | None = None
    ranks: Ranks = field(default_factory=Ranks)
    by_clock: bool = False
    faults: dict[Configuration, str] = field(default_factory=dict, init=False)
    n_replicates: int = field(default=0, init=False)
    others: OtherPrograms = field(default_factory=OtherPrograms, init=False)
    sampled: dict[Configuration, tuple[DeliveredCell, ...]] = field(
        default_factory=dict, init=False
    )
    _overheads: list[float] = field(default_factory=list, init=False)
    # Concurrent requests that a server was found to sustain.
    _n_requests: int = field(default=0, init=False)
    _taken: dict[Configuration, list[_Taken]] = field(default_factory=dict, init=False)
    _turn: int = field(default=0, init=False)
    # The last replicates of any.
    _last: deque[Measurement] = field(default_factory=lambda: deque(maxlen=4), init=False)

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._taken

    def __iter__(self) -> Iterator[Configuration]:
        """Iterate over what was measured, in the order of first replicates."""
        return iter(self._taken)

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, configuration: Configuration) -> Measurement:
        """Return all replicates of a configuration as one measurement."""
        return pooled([each.found for each in self._taken[configuration]])

    def with_throughput(self) -> dict[Configuration, Measurement]:
        """Return what was measured of each configuration that has a throughput."""
        found = {each: self[each] for each in self}
        return {each: one for each, one in found.items() if len(one.round_seconds) >= FEWEST_ROUNDS}

    def entropy_within(self, configuration: Configuration) -> Estimate | None:
        """Return the entropy of the first label within the other; None where there is none."""
        if self.given is None or configuration not in self:
            return None
        return self[configuration].entropy_bits.get(LabelWithin(self.labels[0], self.given))

    def begin_turn(self) -> None:
        """Count replicates from now on to another turn."""
        self._turn += 1

    def take(
        self,
        configuration: Configuration,
        least_rounds: int = 1,
        *,
        in_turn: bool = False,
        limit_seconds: float | None = None,
        sustained_seconds: float | None = None,
    ) -> Measurement:
        """Measure one more replicate of a configuration, keep it and return it.

        It is that of a first trial if it is the first one, and not ``in_turn``. It takes
        ``sustained_seconds`` if they are given, and else as long as any.
        """
        limit = min(limit_seconds or self.budget.limit_seconds, self.budget.left)
        limit = max(LEAST_LIMIT_LEFT, limit)
        is_first_trial = configuration not in self and not in_turn
        new = self.timed(
            configuration,
            least_rounds=least_rounds,
            limit_seconds=limit,
            sustained_seconds=sustained_seconds,
        )
        taken = _Taken(new, self.n_replicates, self._turn, in_turn, is_first_trial, limit)
        self._taken.setdefault(configuration, []).append(taken)
        self.n_replicates += 1
        return new

    def keep_only(self, found: Measurement) -> None:
        """Replace all replicates of a configuration, which was faster before than it stays."""
        last = self._taken[found.configuration][-1]
        self._taken[found.configuration] = [
            last._replace(found=found, in_turn=False, is_first_trial=False)
        ]

    def longest_seconds(self, configuration: Configuration) -> float:
        """Return how long a configuration was measured without a break, at most."""
        found = [each.found for each in self._taken.get(configuration, ())]
        seconds = [each.uncounted_seconds + sum(each.round_seconds) for each in found]
        return max(seconds, default=0.0)

    def start_seconds(self, configuration: Configuration) -> float:
        """Return how much longer than others the first rounds of the last replicate took.

        These do not count: worker processes start, or memory is new to the process.
        """
        found = [each.found for each in self._taken.get(configuration, ())]
        timed = [each for each in found if each.first_round_seconds and each.round_seconds]
        if not timed:
            return 0.0
        last = timed[-1]
        first, usual = last.first_round_seconds or 0.0, float(np.mean(last.round_seconds))
        return (last.worker_start_seconds or 0.0) + max(0.0, first - usual)

    @property
    def slowdown(self) -> float:
        """How many times as long as without other programs the last replicates took."""
        if self.by_clock:
            return 1.0
        last = [each for each in self._last if each.round_seconds]
        return median(1 / each.undisturbed_share for each in last) if last else 1.0

    def published(self, configuration: Configuration) -> Measurement:
        """Return the measurement to publish: of turns alone, or without a first trial's replicate.

        Earlier replicates are biased: a configuration takes part in turns because it was fast, and
        the replicate of a first trial is short. They count where the others have too few rounds.
        """
        taken = self._taken[configuration]
        in_turns = [each.found for each in taken if each.in_turn]
        for unbiased in (in_turns, self._after_first_trial(configuration)):
            if sum(len(each.round_seconds) for each in unbiased) >= LEAST_ROUNDS:
                return pooled(unbiased)
        return self[configuration]

    def cells_per_second(self, configuration: Configuration) -> Estimate | None:
        """Return the throughput to publish; None if it has too few rounds."""
        return self.published(configuration).cells_per_second_given(self.spread)

    @property
    def overhead_seconds(self) -> float:
        """Median time of a replicate beyond its rounds."""
        return median(self._overheads) if self._overheads else 0.0

    @property
    def spread(self) -> Spread:
        """How much replicates of one configuration differ, and what those of one time share."""
        return replace(Spread.of(self._comparable()), common=self._drift())

    @property
    def replicate_spread(self) -> float | None:
        """The observed part of that alone; None if nothing was measured twice."""
        return seen_spread(self._comparable())

    def _comparable(self) -> list[list[float]]:
        """Return seconds per cell of each replicate that is as long as the others.

        None of those that were stopped.
        """
        return [
            [
                seconds / found.cells_per_round
                for found in self._after_first_trial(each)
                for seconds in found.replicate_seconds
            ]
            for each in self
        ]

    def _after_first_trial(self, configuration: Configuration) -> list[Measurement]:
        """Return all replicates of a configuration but that of a first trial."""
        return [each.found for each in self._taken[configuration] if not each.is_first_trial]

    def _drift(self) -> float:
        """Return the standard deviation of what replicates of one time have in common.

        It comes from the mean product of the deviations of neighbouring replicates, which is 0 on
        a machine that does not change. A drift ends twice as far from its mean, as a variance, as
        it is on average.
        """
        in_turns = [each for taken in self._taken.values() for each in taken if each.in_turn]
        in_turns.sort(key=lambda each: each.number)
        speeds = [
            (each.found.configuration, log(each.found.rough_cells_per_second))
            for each in in_turns
            if each.found.round_seconds
        ]
        of_one = defaultdict[Configuration, list[float]](list)
        for configuration, speed in speeds:
            of_one[configuration].append(speed)
        off = [
            (each, (speed - np.mean(own)) * (len(own) / (len(own) - 1)) ** 0.5)
            for each, speed in speeds
            if len(own := of_one[each]) > 1
        ]
        products = [
            mine * other for (one, mine), (another, other) in pairwise(off) if one != another
        ]
        if len(products) < FEWEST_PRODUCTS:
            return 0.0
        return sqrt(2 * max(0.0, float(np.mean(products))))

    def _fastest_so_far(self) -> str:
        speeds = {
            each: found.rough_cells_per_second for each, found in self.with_throughput().items()
        }
        if not speeds:
            return ""
        fastest = max(speeds, key=lambda each: speeds[each])
        return f"; fastest so far: {fastest}, {speeds[fastest]:,.0f} cells/s"

    def timed(
        self,
        configuration: Configuration,
        *,
        least_rounds: int = LEAST_ROUNDS,
        step_seconds: float = 0.0,
        limit_seconds: float | None = None,
        prefetch: int | None = None,
        sustained_seconds: float | None = None,
        ranks: Ranks | None = None,
    ) -> Measurement:
        """Measure a configuration without adding to its replicates.

        If other ``ranks`` are given, they sleep in place of a training step.
        """
        seconds_in_all, begin = self.budget.seconds, self.budget.spent
        doing = f"timing {configuration}{self._fastest_so_far()}"
        self.on_progress("throughput", min(begin, seconds_in_all), seconds_in_all, doing)
        found = measure_with(
            self.process,
            TimingRequest(
                configuration=configuration,
                batch_size=self.batch_size,
                labels=self.labels,
                given=self.given,
                cache=self.cache,
                seed=self.seed,
                least_rounds=least_rounds,
                seconds=sustained_seconds or REPLICATE_SECONDS,
                most_rounds=maxsize if sustained_seconds else MOST_ROUNDS_OF_REPLICATE,
                number=self.n_replicates,
                step_seconds=step_seconds,
                step=self.step if step_seconds and ranks is None else None,
                make_dataset=self.make_dataset,
                prefetch=prefetch,
                n_requests=self._n_requests,
                ranks=ranks or self.ranks,
            ),
            limit_seconds=limit_seconds or self.budget.limit_seconds,
        )
        self._last.append(found)
        in_rounds = found.uncounted_seconds + sum(found.round_seconds)
        if found.round_seconds:
            self._overheads.append(max(0.0, self.budget.spent - begin - in_rounds))
        self.others += found.others
        self._n_requests = found.n_requests or self._n_requests
        if found.delivery_fault:
            self.faults.setdefault(configuration, found.delivery_fault)
        if found.sampled:
            self.sampled.pop(configuration, None)
            self.sampled[configuration] = found.sampled
        return replace(found, sampled=())

    def result(
        self,
        configuration: Configuration,
        entropies: Mapping[str, EntropyBits],
        not_timed: tuple[Status, str] | None,
    ) -> ConfigurationResult:
        """Return what is known of a configuration, with the entropy of each label in order.

        ``not_timed`` says why it was not timed, with a note; None if it was.
        """
        if not_timed is None:
            measurement = self[configuration]
            bits = measurement.entropy_bits
            entropies = {n: replace(each, measured=bits.get(n)) for n, each in entropies.items()}
        first, *others = entropies
        result = ConfigurationResult(
            configuration=configuration,
            status="measured",
            entropy_bits=entropies[first],
            further_labels={each: LabelResult(entropy_bits=entropies[each]) for each in others},
        )
        if not_timed is not None:
            return replace(result, status=not_timed[0], note=not_timed[1])
        published = self.published(configuration)
        return replace(
            result,
            status=measurement.status if measurement.failure else published.status,
            note=measurement.note,
            cells_per_second=self.cells_per_second(configuration),
            n_rounds=len(published.round_seconds),
            peak_memory_bytes=measurement.peak_memory_bytes,
            bytes_read_per_cell=measurement.bytes_read_per_cell,
        )

    def replicates(self, configuration: Configuration) -> list[Replicate]:
        """Return the cost in each replicate; empty if the configuration failed."""
        if found := self.timed_replicates(configuration):
            return found
        first = self._taken[configuration][0]
        if first.found.failure:
            return []
        # If no round ended in time, a round takes at least as long as the limit.
        limit_seconds = self._taken[configuration][-1].limit_seconds
        seconds = first.found.first_round_seconds or limit_seconds
        cost = seconds / self.slowdown / first.found.cells_per_round
        return [Replicate(cost, first.turn, first.number)]

    def timed_replicates(self, configuration: Configuration) -> list[Replicate]:
        """Return the cost in each replicate that has a counted round."""
        return [
            Replicate(self.cost(each.found), each.turn, each.number)
            for each in self._taken[configuration]
            if each.found.round_seconds
        ]

    def cost(self, found: Measurement) -> float:
        """Return seconds per cell, without the delay by other programs unless ``by_clock``."""
        share = 1.0 if self.by_clock else found.undisturbed_share
        return share * float(np.mean(found.round_seconds)) / found.cells_per_round
