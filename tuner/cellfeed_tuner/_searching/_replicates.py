"""All that a search measures, replicate by replicate."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from sys import maxsize
from typing import NamedTuple

import numpy as np

from cellfeed import CellDataset
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    LEAST_LIMIT_LEFT,
    MOST_ROUNDS_OF_REPLICATE,
    REPLICATE_SECONDS,
)
from cellfeed_tuner._machine import OtherPrograms
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._measuring._measurement import Measurement, measure_with, pooled
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._measuring._process import Measures
from cellfeed_tuner._measuring._timing import MakeDataset, Step, TimingRequest
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._results import ConfigurationResult, EntropyBits, LabelResult, Status
from cellfeed_tuner._searching._model import Replicate
from cellfeed_tuner._time_budget import Progress, TimeBudget, silent

# How many times its limit a round takes that did not end within it.
BEYOND_LIMIT = 1.5


class _Taken(NamedTuple):
    """One replicate: in which turn it was measured, and whether in turn with others."""

    found: Measurement
    turn: int
    in_turn: bool
    limit_seconds: float


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Times configurations, and keeps the results, replicate by replicate.

    Attributes
    ----------
    faults
        How the minibatches of a configuration deviated from the plan or the files.
    by_clock
        Whether costs are by the clock, also on a busy machine, where they are otherwise what
        the same work would take without other programs; see `undisturbed_share`.
    sampled
        Cells of the last replicate of each configuration; the one measured last comes last.
    turn
        The number of the turn; replicates of one turn share what the machine did meanwhile.
    n_replicates, n_discarded
        Replicates of all configurations, and others in which code was compiled.
    n_requests
        Concurrent requests that a server was found to sustain.
    """

    process: Measures
    labels: Sequence[str]
    batch_size: int
    cache: CacheState
    seed: int
    budget: TimeBudget
    on_progress: Progress = silent
    make_dataset: MakeDataset = CellDataset
    step: Step | None = None
    ranks: Ranks = field(default_factory=Ranks)
    by_clock: bool = False
    faults: dict[Configuration, str] = field(default_factory=dict)
    sampled: dict[Configuration, tuple[DeliveredCell, ...]] = field(default_factory=dict)
    n_replicates: int = 0
    n_requests: int = 0
    turn: int = field(default=0, init=False)
    n_discarded: int = field(default=0, init=False)
    others: OtherPrograms = field(default_factory=OtherPrograms, init=False)
    _taken: dict[Configuration, list[_Taken]] = field(default_factory=dict, init=False)
    # Those of one configuration as one, until there are more.
    _pooled: dict[Configuration, Measurement] = field(default_factory=dict, init=False)
    _overheads: list[float] = field(default_factory=list, init=False)
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
        if configuration not in self._pooled:
            found = [each.found for each in self._taken[configuration]]
            self._pooled[configuration] = pooled(found)
        return self._pooled[configuration]

    def n_turns(self, configuration: Configuration, other: Configuration | None = None) -> int:
        """Return in how many turns a configuration was timed beside others, or beside another."""
        turns = (
            {one.turn for one in self._taken.get(each, ()) if one.in_turn}
            for each in (configuration, other or configuration)
        )
        return len(set.intersection(*turns))

    def has_delivered(self, configuration: Configuration | None = None) -> bool:
        """Return whether a configuration, or any, has delivered a whole fetch."""
        some = self if configuration is None else [configuration]
        taken = (one for each in some for one in self._taken.get(each, ()))
        return any(one.found.first_round_seconds is not None for one in taken)

    def take(
        self,
        configuration: Configuration,
        *,
        in_turn: bool = False,
        limit_seconds: float | None = None,
        **settings: float,
    ) -> Measurement:
        """Measure one more replicate of a configuration, keep it and return it.

        ``settings`` are those of `timed`.
        """
        limit = min(limit_seconds or self.budget.limit_seconds, self.budget.left)
        limit = max(LEAST_LIMIT_LEFT, limit)
        new = self.timed(configuration, limit_seconds=limit, **settings)  # type: ignore[arg-type]
        taken = _Taken(new, self.turn, in_turn, limit)
        self._keep(taken)
        return new

    def restore(self, found: Measurement, turn: int) -> None:
        """Keep a replicate that was measured before, in turn with the others of its number."""
        taken = _Taken(found, turn, in_turn=True, limit_seconds=self.budget.limit_seconds)
        self._keep(taken)
        self.n_replicates += 1
        if found.delivery_fault:
            self.faults.setdefault(found.configuration, found.delivery_fault)

    def keep_only(self, found: Measurement) -> None:
        """Replace all replicates of a configuration, which was faster before than it stays."""
        last = self._taken.pop(found.configuration)[-1]
        self._keep(last._replace(found=found, in_turn=False))

    def _keep(self, taken: _Taken) -> None:
        self._pooled.pop(taken.found.configuration, None)
        self._taken.setdefault(taken.found.configuration, []).append(taken)

    def longest_seconds(self, configuration: Configuration) -> float:
        """Return how long a configuration was measured without a break, at most."""
        taken = self._taken.get(configuration, ())
        return max((each.found.seconds_in_rounds for each in taken), default=0.0)

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
        return max(0.0, first - usual)

    @property
    def slowdown(self) -> float:
        """How many times as long as without other programs the last replicates took."""
        last = [each for each in self._last if each.round_seconds and not self.by_clock]
        return median(1 / each.undisturbed_share for each in last) if last else 1.0

    @property
    def overhead_seconds(self) -> float:
        """Median time of a replicate beyond its rounds."""
        return median(self._overheads) if self._overheads else 0.0

    def timed(
        self,
        configuration: Configuration,
        *,
        least_rounds: int = 1,
        step_seconds: float = 0.0,
        limit_seconds: float,
        seconds: float = REPLICATE_SECONDS,
        is_sustained: bool = False,
        ranks: Ranks | None = None,
    ) -> Measurement:
        """Measure a configuration without keeping it as one of its replicates.

        Counted rounds take ``seconds``, without a limit to their number if ``is_sustained``. If
        other ``ranks`` are given, they sleep in place of a training step.
        """
        in_all, begin = self.budget.seconds, self.budget.spent
        speeds = {each: self[each].rough_cells_per_second for each in self}
        fastest = max((each for each in speeds if speeds[each]), key=speeds.get, default=None)  # type: ignore[arg-type]
        doing = f"timing {configuration}" + (f"; fastest so far: {fastest}" if fastest else "")
        self.on_progress("throughput", min(begin, in_all), in_all, doing)
        request = TimingRequest(
            configuration=configuration,
            batch_size=self.batch_size,
            labels=self.labels,
            cache=self.cache,
            seed=self.seed,
            least_rounds=least_rounds,
            seconds=seconds,
            most_rounds=maxsize if is_sustained else MOST_ROUNDS_OF_REPLICATE,
            number=self.n_replicates,
            step_seconds=step_seconds,
            step=self.step if step_seconds and ranks is None else None,
            make_dataset=self.make_dataset,
            n_requests=self.n_requests,
            ranks=ranks or self.ranks,
        )
        self.n_replicates += 1
        found = measure_with(self.process, request, limit_seconds=limit_seconds)
        if found.compiling_seconds:  # it was part of what was timed
            self.n_discarded += 1
            limit = max(LEAST_LIMIT_LEFT, min(limit_seconds, self.budget.left))
            found = measure_with(self.process, request, limit_seconds=limit)
        self.learn_pace(found, self.budget.spent - begin)
        self.others += found.others
        self.n_requests = found.n_requests or self.n_requests
        if found.delivery_fault:
            self.faults.setdefault(configuration, found.delivery_fault)
        if found.sampled:
            self.sampled.pop(configuration, None)
            self.sampled[configuration] = found.sampled
        return replace(found, sampled=())

    def learn_pace(self, found: Measurement, seconds: float) -> None:
        """Learn how busy the machine is from a measurement that took so many seconds in all."""
        if found.round_seconds and not found.compiling_seconds:
            self._last.append(found)
            self._overheads.append(max(0.0, seconds - found.seconds_in_rounds))

    def result(
        self, configuration: Configuration, entropies: Mapping[str, EntropyBits]
    ) -> ConfigurationResult:
        """Return what was measured of a configuration, with each label's entropy in order."""
        found = self[configuration]
        # What nothing is expected of is expected as it was delivered.
        delivered = {n: EntropyBits(expected=e, random=0.0) for n, e in found.entropy_bits.items()}
        bits = {
            name: replace(each, measured=found.entropy_bits.get(name))
            for name, each in (delivered | dict(entropies)).items()
        }
        return replace(
            untimed(configuration, bits, "timed"),
            status=found.status,
            note=found.failure or self._why_too_long(configuration),
            n_rounds=len(found.round_seconds),
            peak_memory_bytes=found.peak_memory_bytes,
            bytes_read_per_cell=found.bytes_read_per_cell,
        )

    def _why_too_long(self, configuration: Configuration) -> str:
        """Return what is known of fetches of which none counts; empty if some do."""
        taken = self._taken[configuration]
        if any(each.found.round_seconds for each in taken):
            return ""
        firsts = [each.found.first_round_seconds for each in taken]
        if known := list(filter(None, firsts)):
            return f"the first fetch, which does not count, took {min(known):.1f} s"
        limit = max(each.limit_seconds for each in taken)
        of = " of every worker" if configuration.num_workers else ""
        return f"no fetch{of} ended in {limit:.1f} s"

    def replicates(self, configuration: Configuration) -> list[Replicate]:
        """Return the cost in each replicate with a counted round; empty if it failed.

        If no round ended in time, a round takes longer than the limit.
        """
        taken = self._taken[configuration]
        found = [Replicate(self.cost(e.found), e.turn) for e in taken if e.found.round_seconds]
        if found or taken[0].found.failure:
            return found
        firsts = [each.found.first_round_seconds for each in taken]
        seconds = max(filter(None, firsts), default=BEYOND_LIMIT * taken[-1].limit_seconds)
        cost = seconds / self.slowdown / taken[0].found.cells_per_round
        return [Replicate(cost, taken[0].turn)]

    def cost(self, found: Measurement) -> float:
        """Return seconds per cell, without the delay by other programs unless ``by_clock``."""
        share = 1.0 if self.by_clock else found.undisturbed_share
        return share * float(np.mean(found.round_seconds)) / found.cells_per_round


def untimed(
    configuration: Configuration,
    entropies: Mapping[str, EntropyBits],
    status: Status,
    note: str = "",
) -> ConfigurationResult:
    """Return what is known of a configuration without timing it."""
    return ConfigurationResult(
        configuration=configuration,
        status=status,
        note=note,
        labels={name: LabelResult(entropy_bits=each) for name, each in entropies.items()},
    )
