"""All that a search measures, replicate by replicate."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt
from statistics import median
from sys import maxsize

import numpy as np

from cellfeed import CellDataset, Collection
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    FEWEST_ROUNDS,
    LEAST_LIMIT_LEFT,
    MOST_ROUNDS_OF_REPLICATE,
    REPLICATE_SECONDS,
)
from cellfeed_tuner._interval import Estimate, Spread, seen_spread
from cellfeed_tuner._machine import OtherPrograms
from cellfeed_tuner._measuring._delivery import DeliveredCell, compare_with_files
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, Measurement, measure_with, pooled
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._measuring._process import Runs
from cellfeed_tuner._measuring._timing import MakeDataset, Step, TimingRequest
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._results import (
    ConfigurationResult,
    EntropyBits,
    LabelResult,
    Status,
)
from cellfeed_tuner._searching._posterior import Replicate
from cellfeed_tuner._subject import LabelWithin
from cellfeed_tuner._time_budget import Progress, TimeBudget, silent

# Fewest pairs of adjacent replicates for estimating what replicates of the same time have in
# common. Chosen.
FEWEST_PRODUCTS = 4


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
    _overheads: list[float] = field(default_factory=list, init=False)
    others: OtherPrograms = field(default_factory=OtherPrograms, init=False)
    sampled: dict[Configuration, tuple[DeliveredCell, ...]] = field(
        default_factory=dict, init=False
    )
    # Concurrent requests that a server was found to sustain.
    _n_requests: int = field(default=0, init=False)
    _replicates: dict[Configuration, list[Measurement]] = field(default_factory=dict, init=False)
    # In which turn each of them was measured.
    _turns: dict[Configuration, list[int]] = field(default_factory=dict, init=False)
    _turn: int = field(default=0, init=False)
    # The logarithm of the throughput of each replicate in turns, in the order of time.
    _logs: list[tuple[Configuration, float]] = field(default_factory=list, init=False)
    # The time limit of the last replicate of each.
    _waited: dict[Configuration, float] = field(default_factory=dict, init=False)
    # The last replicates of any.
    _last: deque[Measurement] = field(default_factory=lambda: deque(maxlen=4), init=False)
    # Configurations whose first replicate was that of a first trial.
    _first_trials: set[Configuration] = field(default_factory=set, init=False)
    # Replicates that were measured in turns with others.
    _in_turns: dict[Configuration, list[Measurement]] = field(default_factory=dict, init=False)

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._replicates

    def __iter__(self) -> Iterator[Configuration]:
        """Iterate over what was measured, in the order of first replicates."""
        return iter(self._replicates)

    def __len__(self) -> int:
        return len(self._replicates)

    def __getitem__(self, configuration: Configuration) -> Measurement:
        """Return all replicates of a configuration as one measurement."""
        return pooled(self._replicates[configuration])

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
        if configuration not in self and not in_turn:
            self._first_trials.add(configuration)
        limit = min(limit_seconds or self.budget.limit_seconds, self.budget.left)
        limit = max(LEAST_LIMIT_LEFT, limit)
        new = self.timed(
            configuration,
            least_rounds=least_rounds,
            limit_seconds=limit,
            sustained_seconds=sustained_seconds,
        )
        self._replicates.setdefault(configuration, []).append(new)
        self._turns.setdefault(configuration, []).append(self._turn)
        if in_turn:
            self._in_turns.setdefault(configuration, []).append(new)
            if new.round_seconds:
                self._logs.append((configuration, float(np.log(new.rough_cells_per_second))))
        self._waited[configuration] = limit
        self.n_replicates += 1
        return new

    def keep_only(self, found: Measurement) -> None:
        """Replace all replicates of a configuration, which was faster before than it stays."""
        configuration = found.configuration
        self._replicates[configuration] = [found]
        self._turns[configuration] = [self._turn]
        self._in_turns.pop(configuration, None)
        self._first_trials.discard(configuration)
        self._logs = [(one, log) for one, log in self._logs if one != configuration]

    def longest_seconds(self, configuration: Configuration) -> float:
        """Return how long a configuration was measured without a break, at most."""
        return max(
            (
                each.uncounted_seconds + sum(each.round_seconds)
                for each in self._replicates.get(configuration, ())
            ),
            default=0.0,
        )

    def start_seconds(self, configuration: Configuration) -> float:
        """Return how much longer than others the first rounds of the last replicate took.

        These do not count: worker processes start, or memory is new to the process.
        """
        found = self._replicates.get(configuration, ())
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

    def at_depth(
        self,
        configuration: Configuration,
        prefetch: int,
        *,
        least_rounds: int,
        limit_seconds: float,
    ) -> Measurement:
        """Measure a configuration with so many fetches read ahead, and return it."""
        new = self.timed(
            configuration,
            least_rounds=least_rounds,
            prefetch=prefetch,
            limit_seconds=limit_seconds,
        )
        self.n_replicates += 1
        return new

    def is_from_turns(self, configuration: Configuration) -> bool:
        """Return whether a configuration was measured in turns with others, and often enough."""
        found = self._in_turns.get(configuration, [])
        return sum(len(each.round_seconds) for each in found) >= LEAST_ROUNDS

    def fair(self, configuration: Configuration) -> Measurement:
        """Return the measurement to publish: of turns alone, or without a first trial's replicate.

        Earlier replicates are biased: a configuration takes part in turns because it was fast, and
        the replicate of a first trial is short. They count where the others have too few rounds.
        """
        if self.is_from_turns(configuration):
            return pooled(self._in_turns[configuration])
        later = self._after_first_trial(configuration)
        if sum(len(each.round_seconds) for each in later) >= LEAST_ROUNDS:
            return pooled(later)
        return self[configuration]

    def cells_per_second(self, configuration: Configuration) -> Estimate | None:
        """Return the throughput to publish; None if it has too few rounds."""
        return self.fair(configuration).cells_per_second_given(self.spread)

    @property
    def overhead_seconds(self) -> float:
        """Median time of a replicate beyond its rounds."""
        return median(self._overheads) if self._overheads else 0.0

    @property
    def spread(self) -> Spread:
        """How much replicates of one configuration differ, and what those of one time share."""
        return replace(Spread.of(self._comparable()), common=self._drift())

    def _comparable(self) -> list[list[float]]:
        """Return seconds per cell of each replicate that is as long as the others."""
        return [self._seconds_per_cell(self._after_first_trial(each)) for each in self]

    def _drift(self) -> float:
        """Return the standard deviation of what replicates of one time have in common.

        It comes from the mean product of the deviations of neighbouring replicates, which is 0 on
        a machine that does not change. A drift ends twice as far from its mean, as a variance, as
        it is on average.
        """
        logs = {each: [log for one, log in self._logs if one == each] for each in self}
        means = {each: np.mean(found) for each, found in logs.items() if len(found) > 1}
        off = [
            (each, (log - means[each]) * (len(logs[each]) / (len(logs[each]) - 1)) ** 0.5)
            for each, log in self._logs
            if each in means
        ]
        products = [
            mine * other for (one, mine), (another, other) in pairwise(off) if one != another
        ]
        if len(products) < FEWEST_PRODUCTS:
            return 0.0
        return sqrt(2 * max(0.0, float(np.mean(products))))

    @property
    def replicate_spread(self) -> float | None:
        """The observed part of that alone; None if nothing was measured twice."""
        return seen_spread(self._comparable())

    def timed(
        self,
        configuration: Configuration,
        *,
        least_rounds: int = LEAST_ROUNDS,
        step_seconds: float = 0.0,
        limit_seconds: float | None = None,
        prefetch: int | None = None,
        sustained_seconds: float | None = None,
    ) -> Measurement:
        """Measure a configuration without adding to its replicates."""
        seconds_in_all, begin = self.budget.seconds, self.budget.spent
        self.on_progress("throughput", min(begin, seconds_in_all), seconds_in_all)
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
                step=self.step if step_seconds else None,
                make_dataset=self.make_dataset,
                prefetch=prefetch,
                n_requests=self._n_requests,
                ranks=self.ranks,
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
        if not_timed is not None:
            status, note = not_timed
            first, further = _by_label(entropies)
            return ConfigurationResult(
                configuration=configuration,
                status=status,
                note=note,
                entropy_bits=first,
                further_labels=further,
            )
        measurement = self[configuration]
        published = self.fair(configuration)
        measured = measurement.entropy_bits
        first, further = _by_label(
            {name: replace(each, measured=measured.get(name)) for name, each in entropies.items()}
        )
        return ConfigurationResult(
            configuration=configuration,
            status=measurement.status if measurement.failure else published.status,
            note=measurement.note,
            cells_per_second=self.cells_per_second(configuration),
            n_rounds=len(published.round_seconds),
            entropy_bits=first,
            further_labels=further,
            peak_memory_bytes=measurement.peak_memory_bytes,
            bytes_read_per_cell=measurement.bytes_read_per_cell,
        )

    def compare_with_files(self, collection: Collection, *, most_seconds: float) -> int:
        """Compare delivered cells with the files, keep faults, and return their number."""
        found = compare_with_files(collection, self.sampled, most_seconds=most_seconds)
        for configuration, fault in found.faults.items():
            self.faults.setdefault(configuration, fault)
        return found.n_cells

    def replicates(self, configuration: Configuration) -> list[Replicate]:
        """Return the cost in each replicate; empty if the configuration failed."""
        if found := self.timed_replicates(configuration):
            return found
        measured = self._replicates[configuration]
        if measured[0].failure:
            return []
        # If no round ended in time, a round takes at least as long as the limit.
        seconds = measured[0].first_round_seconds or self._waited[configuration]
        cost = seconds / self.slowdown / measured[0].cells_per_round
        return [Replicate(cost, self._turns[configuration][0])]

    def timed_replicates(self, configuration: Configuration) -> list[Replicate]:
        """Return the cost in each replicate that has a counted round."""
        numbered = zip(self._replicates[configuration], self._turns[configuration], strict=True)
        return [Replicate(self.cost(each), turn) for each, turn in numbered if each.round_seconds]

    def cost(self, found: Measurement) -> float:
        """Return seconds per cell, without the delay by other programs unless ``by_clock``."""
        share = 1.0 if self.by_clock else found.undisturbed_share
        return share * float(np.mean(found.round_seconds)) / found.cells_per_round

    def _after_first_trial(self, configuration: Configuration) -> list[Measurement]:
        """Return all replicates of a configuration but that of a first trial."""
        return self._replicates[configuration][configuration in self._first_trials :]

    def _seconds_per_cell(self, measured: Iterable[Measurement]) -> list[float]:
        """Return seconds per cell of each replicate; none of those that were stopped."""
        return [
            seconds / each.cells_per_round
            for each in measured
            for seconds in each.replicate_seconds
        ]

    def seconds_per_cell(self) -> Mapping[Configuration, float]:
        """Return the mean of the replicates of each configuration that did not fail."""
        return {
            each: float(np.mean([one.seconds_per_cell for one in found]))
            for each in self
            if (found := self.replicates(each))
        }


def _by_label(
    entropies: Mapping[str, EntropyBits],
) -> tuple[EntropyBits, dict[str, LabelResult]]:
    """Return the first label's entropy, and the others' by name."""
    first, *others = entropies
    return entropies[first], {name: LabelResult(entropy_bits=entropies[name]) for name in others}
