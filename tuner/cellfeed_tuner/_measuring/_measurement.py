"""What was measured of one configuration, and what follows from it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np

from cellfeed import Statistics
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import FEW_BATCHES, FEWEST_ROUNDS, LEAST_ROUNDS, MANY_BATCHES
from cellfeed_tuner._interval import Estimate, Spread, mean_with_interval, positive_estimate
from cellfeed_tuner._machine._busy import OtherPrograms
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._machine._processes import BytesRead
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._measuring._events import (
    Findings,
    Infeasible,
    Round,
    Started,
    TimingSettings,
)
from cellfeed_tuner._measuring._measuring_process import Outcome
from cellfeed_tuner._subject._labels import LabelWithin

__all__ = ["Measurement", "MeasurementStatus", "measured", "pooled"]

_JOINED = ("round_seconds", "round_waiting_seconds", "round_reads", "round_statistics")
_Event = TypeVar("_Event")

MeasurementStatus = Literal["measured", "not enough samples", "too few cells", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured of one configuration.

    Parameters
    ----------
    configuration
        The settings.
    cache
        State of the page cache: "cold", dropped before each epoch and once used; "warm";
        "remote" of files on servers; "unknown" where that cannot be had.
    cells_per_round
        Cells of one round: a whole fetch of every worker.
    first_round_seconds
        Time of the first round, which holds the start-up; None if it did not come so far.
    uncounted_seconds
        Time of all rounds that hold start-up, the first one and others; see `CountedRounds`.
    round_seconds, round_waiting_seconds
        Time of each round that is free of start-up, and the part of it in which the training
        loop waited for minibatches.
    rounds_per_replicate
        How many of these rounds each process timed that took part; all of them one, if empty.
    worker_start_seconds, first_minibatch_seconds
        Time to start the worker processes, and from then to the first minibatch; neither is
        part of the throughput. None if it did not come so far.
    round_reads
        What was read during each round of which that is known.
    round_statistics
        What the data set counted in each of these rounds; none if it does not count.
    round_entropy_bits
        For each label, and each label within another, its mean entropy in the minibatches of
        each round.
    peak_memory_bytes
        Highest memory of the process and its workers, with the minibatches that may wait for a
        slow training loop; 0 if nothing ran.
    delivery_fault
        The first minibatch whose cells were not those of the plan, or had labels or expression
        that are not theirs, in words; empty if there was none.
    sampled
        Some of the cells that came out, to be compared with the files.
    failure
        What it failed of, or empty.
    is_infeasible
        Whether that is because an epoch has too few whole fetches.
    n_killed
        How often the process or a worker was killed, and it was tried once more.
    n_requests
        Requests that were under way at a server at the end; 0 if none was asked.
    others
        What other programs took of the processors meanwhile.
    n_threads, n_function_threads
        Threads of each process that read, and that the user's functions have.
    """

    configuration: Configuration
    cache: CacheState | Literal["unknown"]
    cells_per_round: int
    first_round_seconds: float | None = None
    uncounted_seconds: float = 0.0
    round_seconds: tuple[float, ...] = ()
    round_waiting_seconds: tuple[float, ...] = ()
    rounds_per_replicate: tuple[int, ...] = ()
    worker_start_seconds: float | None = None
    first_minibatch_seconds: float | None = None
    round_reads: tuple[BytesRead, ...] = ()
    round_statistics: tuple[Statistics, ...] = ()
    round_entropy_bits: Mapping[str | LabelWithin, tuple[float, ...]] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    delivery_fault: str = ""
    sampled: tuple[DeliveredCell, ...] = ()
    failure: str = ""
    is_infeasible: bool = False
    n_killed: int = 0
    n_requests: int = 0
    others: OtherPrograms = field(default_factory=OtherPrograms)
    n_threads: int = 1
    n_function_threads: int = 0

    @property
    def note(self) -> str:
        """What to say of it beside its status and its figures; empty if nothing."""
        if not self.n_killed:
            return self.failure
        times = {1: "once", 2: "twice"}.get(self.n_killed, f"{self.n_killed} times")
        if self.failure:
            return f"{self.failure} (killed {times})"
        return f"killed {times}, perhaps for want of memory, and tried again"

    @property
    def status(self) -> MeasurementStatus:
        """Whether there is a throughput to rely on, and if not, what kept it."""
        if len(self.round_seconds) >= LEAST_ROUNDS:
            return "measured"
        if self.is_infeasible:
            return "too few cells"
        return "failed" if self.failure else "not enough samples"

    @property
    def cells_per_second(self) -> Estimate | None:
        """Throughput with its 95 % interval; None if there are not even the fewest rounds.

        The unit is the replicate; of one alone, it is a batch of neighbouring rounds, so that the
        interval covers the time that was measured and not the minutes around it.
        """
        seconds = np.array(self.replicate_seconds)
        if seconds.size <= 1:
            seconds = np.array(_batch_means(self.round_seconds))
        if len(self.round_seconds) < FEWEST_ROUNDS or seconds.size <= 1:
            return None
        error = float(seconds.std(ddof=1) / seconds.mean() / seconds.size**0.5)
        cells = self.cells_per_round / float(seconds.mean())
        return positive_estimate(cells, error, seconds.size - 1)

    @property
    def replicate_seconds(self) -> tuple[float, ...]:
        """Mean time of a round in each replicate that has any."""
        if not self.rounds_per_replicate:
            return (float(np.mean(self.round_seconds)),) if self.round_seconds else ()
        ends = np.cumsum(self.rounds_per_replicate)[:-1]
        parts = np.split(np.array(self.round_seconds), ends)
        return tuple(float(each.mean()) for each in parts if each.size)

    def cells_per_second_given(self, spread: Spread) -> Estimate | None:
        """Throughput with its 95 % interval, given how much replicates differ.

        None if there are not even the fewest rounds.
        """
        seconds = self.replicate_seconds
        if len(self.round_seconds) < FEWEST_ROUNDS:
            return None
        return spread.estimate(self.cells_per_round / float(np.mean(seconds)), len(seconds))

    @property
    def rough_cells_per_second(self) -> float:
        """Throughput from however little there is, to plan further by; 0 if there is nothing."""
        seconds = self.round_seconds
        if not seconds and self.first_round_seconds is not None:
            seconds = (self.first_round_seconds,)
        return self.cells_per_round * len(seconds) / sum(seconds) if seconds else 0.0

    @property
    def waiting_share(self) -> Estimate | None:
        """Share of time in which a training loop waited, with its 95 % interval."""
        if not self.round_seconds:
            return None
        seconds = np.array(self.round_seconds)
        share = mean_with_interval(self.round_waiting_seconds / seconds, weights=seconds)
        return Estimate(share.value, max(share.low, 0.0), min(share.high, 1.0))

    @property
    def bytes_read_per_cell(self) -> BytesRead | None:
        """What was read for each cell that came out; None if that is not known."""
        if not self.round_reads:
            return None
        n_cells = len(self.round_reads) * self.cells_per_round
        return BytesRead(
            asked=sum(each.asked for each in self.round_reads) / n_cells,
            from_storage=sum(each.from_storage for each in self.round_reads) / n_cells,
        )

    @property
    def entropy_bits(self) -> dict[str | LabelWithin, Estimate]:
        """Mean entropy of each label, and of each within another, with its 95 % interval.

        In the minibatches that came out.
        """
        return {
            label: mean_with_interval(bits)
            for label, bits in self.round_entropy_bits.items()
            if bits
        }


def measured(request: TimingSettings, outcome: Outcome) -> Measurement:
    """Return what a child of the measuring process reported of a request as a measurement."""
    peak_memory_bytes, start = outcome.peak_memory_bytes, dict[str, Any]()
    for started in _all(Started, outcome):
        peak_memory_bytes += started.waiting_bytes
        start = {
            "worker_start_seconds": started.worker_seconds,
            "first_minibatch_seconds": started.first_minibatch_seconds,
            "n_threads": started.n_threads,
            "n_function_threads": started.n_function_threads,
        }
    rounds = _all(Round, outcome)
    counted = [each for each in rounds if each.counts]
    findings = next(iter(_all(Findings, outcome)), Findings())
    infeasible = "".join(each.reason for each in _all(Infeasible, outcome))
    return Measurement(
        configuration=request.configuration,
        cache=request.cache,
        cells_per_round=request.cells_per_round,
        first_round_seconds=rounds[0].seconds if rounds else None,
        uncounted_seconds=sum(each.seconds for each in rounds if not each.counts),
        round_seconds=tuple(each.seconds for each in counted),
        round_waiting_seconds=tuple(each.waiting_seconds for each in counted),
        round_reads=tuple(each.read for each in counted if each.read),
        round_statistics=tuple(each.statistics for each in counted if each.statistics),
        round_entropy_bits={
            label: tuple(bits.tolist()) for label, bits in findings.entropies.items()
        },
        peak_memory_bytes=peak_memory_bytes,
        delivery_fault=findings.fault,
        sampled=findings.cells,
        failure=" ".join((outcome.failure or "").split()) or infeasible,
        is_infeasible=bool(infeasible),
        n_requests=findings.n_requests,
        n_killed=outcome.n_killed,
        others=outcome.others,
        **start,
    )


def _all(kind: type[_Event], outcome: Outcome) -> list[_Event]:
    """Return the events of a kind."""
    return [each for each in outcome.events if isinstance(each, kind)]


def _batch_means(round_seconds: Sequence[float]) -> list[float]:
    """Return means of batches of neighbouring rounds, at least two rounds each if these suffice."""
    n_batches = MANY_BATCHES if len(round_seconds) >= 2 * MANY_BATCHES else FEW_BATCHES
    batches = np.array_split(round_seconds, min(n_batches, max(1, len(round_seconds))))
    return [float(each.mean()) for each in batches if each.size]


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Return one measurement from several replicates of the same configuration.

    Start-up times are those of the first; the peak is the highest.
    """
    joined: dict[str, Any] = {
        name: tuple(chain.from_iterable(getattr(each, name) for each in measurements))
        for name in _JOINED
    }
    first: dict[str, Any] = {
        name: next(filter(None, (getattr(each, name) for each in measurements)), "")
        for name in ("delivery_fault", "failure")
    }
    entropies = defaultdict[str | LabelWithin, tuple[float, ...]](tuple)
    for each in measurements:
        for label, bits in each.round_entropy_bits.items():
            entropies[label] += bits
    return replace(
        measurements[0],
        uncounted_seconds=sum(each.uncounted_seconds for each in measurements),
        rounds_per_replicate=tuple(len(each.round_seconds) for each in measurements),
        round_entropy_bits=dict(entropies),
        peak_memory_bytes=max(each.peak_memory_bytes for each in measurements),
        is_infeasible=any(each.is_infeasible for each in measurements),
        n_killed=sum(each.n_killed for each in measurements),
        others=sum((each.others for each in measurements), OtherPrograms()),
        **joined,
        **first,
    )
