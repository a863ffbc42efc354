"""Throughput of one configuration, with what it rests on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from cellfeed import CellDataset, Collection, ParameterError, SamplingStrategy, Statistics
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate, Spread, mean_with_interval, positive_estimate
from cellfeed_tuner._machine._busy import OtherPrograms
from cellfeed_tuner._machine._page_cache import (
    CacheState,
    drop_pages,
    load_pages,
    resident_fraction,
)
from cellfeed_tuner._measuring._bytes_read import BytesRead
from cellfeed_tuner._measuring._checks import cache_state, cells_needed
from cellfeed_tuner._measuring._comparison import compare_with_files
from cellfeed_tuner._measuring._labels import LabelWithin, label_codes, names_of
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess, Outcome, Runs
from cellfeed_tuner._measuring._sampled_cells import DeliveredCell
from cellfeed_tuner._measuring._timing import (
    Delivery,
    Entropies,
    MakeDataset,
    Requests,
    Round,
    Sampled,
    Started,
    TimingRequest,
)
from cellfeed_tuner._subject._tunable import Tunable

__all__ = [
    "FEWEST_ROUNDS",
    "LEAST_ROUNDS",
    "MOST_ROUNDS",
    "Measurement",
    "limit_seconds",
    "measure",
    "measure_alone",
    "measure_with",
    "pooled",
    "prepare_cache",
]

LEAST_ROUNDS = 8
"""Rounds after the first without which a throughput rests on "not enough samples"."""
FEWEST_ROUNDS = 4
"""Rounds after the first without which there is no throughput."""

MOST_ROUNDS = 200
"""Rounds after which a measurement by itself ends."""

# A measurement is stopped after so many times the time that it was given, but a slow machine has
# so many seconds for the least number of rounds, however short that time is.
_LIMIT_TIMES, _LEAST_LIMIT_SECONDS = 20, 60.0
# Batches into which the rounds of one process are divided for an interval: neighbouring rounds are
# not independent.
_FEW_BATCHES, _MANY_BATCHES = 4, 8
# Share of pages that may be in the other state: another process may have mapped some.
_STRAY = 0.05

MeasurementStatus = Literal["measured", "not enough samples", "failed"]


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


def measure(
    subject: Collection | Tunable,
    configuration: Configuration,
    *,
    strategy: SamplingStrategy | None = None,
    batch_size: int = 64,
    label: str | Sequence[str] = (),
    cache: CacheState | None = None,
    seconds: float = 5.0,
    seed: int = 0,
    make_dataset: MakeDataset = CellDataset,
) -> Measurement:
    """Measure the throughput of one configuration in a process of its own.

    Only whole fetches count. Start-up of the workers and the time to the first minibatch are
    reported apart. Of a collection, some of the cells that came out are read once more, through
    h5py or zarr, and compared.

    Parameters
    ----------
    subject
        A collection, which cellfeed reads; or any other loader, which has labels, and a batch size
        of its own.
    configuration
        The settings.
    strategy
        How cells are visited, such as `cellfeed.Streaming`; the configuration's block size then
        says nothing. In shuffled blocks of that size if None.
    batch_size
        Cells of a minibatch.
    label
        An obs column of the collection whose minibatch entropy is taken, or several.
    cache
        "cold" drops the files' pages before each epoch and once they were used, "warm" reads all
        files first; None for "cold", or "remote" of files on servers.
    seconds
        Time to spend, if that suffices for the least number of rounds; after 20 times as much,
        and not before a minute, measuring is stopped.
    seed
        Fixes which rows are read.
    make_dataset
        Makes the data set that is measured, as in `autotune`.

    Raises
    ------
    ColumnError
        The collection was opened without a label.
    ParameterError
        The collection or the loader has too few cells for whole fetches; or the measuring process
        cannot import the loader, or it delivers other minibatches than it says.
    FormatError
        A file is damaged.
    """
    if isinstance(subject, Tunable):
        subject.check()
        return measure_alone(
            subject,
            subject.paths,
            TimingRequest(
                configuration=configuration,
                batch_size=subject.batch_size,
                labels=tuple(subject.labels),
                cache=cache or ("cold" if subject.paths else "warm"),
                seed=seed,
                least_rounds=LEAST_ROUNDS,
                most_rounds=MOST_ROUNDS,
                seconds=seconds,
            ),
        )
    collection = subject
    if (needed := cells_needed(configuration, batch_size)) > len(collection):
        msg = f"{configuration}: timing needs {needed:,} cells, but there are {len(collection):,}"
        raise ParameterError(msg)
    labels = names_of(label)
    for each in labels:
        label_codes(collection, each)
    request = TimingRequest(
        configuration=configuration,
        strategy=strategy,
        batch_size=batch_size,
        labels=labels,
        cache=cache_state(collection, cache),
        seed=seed,
        least_rounds=LEAST_ROUNDS,
        most_rounds=MOST_ROUNDS,
        seconds=seconds,
        make_dataset=make_dataset,
    )
    found = measure_alone(collection, collection.files, request)
    faults = compare_with_files(collection, {configuration: found.sampled}).faults
    return replace(found, delivery_fault=found.delivery_fault or faults.get(configuration, ""))


def measure_alone(
    subject: Collection | Tunable, files: Sequence[Path], request: TimingRequest
) -> Measurement:
    """Measure in a process made for it, from the page cache's state on; see `measure`."""
    found_cache = prepare_cache(files, request.cache)
    with MeasuringProcess(subject) as process:
        process.start()
        limit = limit_seconds(request.seconds)
        measurement = measure_with(process, request, limit_seconds=limit)
    return replace(measurement, cache=found_cache)


def limit_seconds(seconds: float) -> float:
    """Return after how long a measurement by itself is stopped that was given this time."""
    return max(_LIMIT_TIMES * seconds, _LEAST_LIMIT_SECONDS)


def prepare_cache(files: Sequence[Path], cache: CacheState) -> CacheState | Literal["unknown"]:
    """Bring files' pages into the state that measurements start from.

    Returns
    -------
    That state; "unknown" where pages stayed, or the kernel does not tell.
    """
    if cache == "remote":
        return cache
    (drop_pages if cache == "cold" else load_pages)(files)
    resident = resident_fraction(files)
    if resident is None:
        return "unknown"
    as_wanted = resident <= _STRAY if cache == "cold" else resident >= 1 - _STRAY
    return cache if as_wanted else "unknown"


def measure_with(
    process: Runs[TimingRequest], request: TimingRequest, *, limit_seconds: float
) -> Measurement:
    """Measure in a process that is already there; see `measure`."""
    empty = Measurement(
        configuration=request.configuration,
        cache=request.cache,
        cells_per_round=request.cells_per_round,
    )
    return _filled(empty, process.run(request, limit_seconds=limit_seconds))


def _filled(empty: Measurement, outcome: Outcome) -> Measurement:
    started = [event for event in outcome.events if isinstance(event, Started)]
    rounds = [event for event in outcome.events if isinstance(event, Round)]
    entropies = [event for event in outcome.events if isinstance(event, Entropies)]
    faults = [event.fault for event in outcome.events if isinstance(event, Delivery)]
    samples = [event.cells for event in outcome.events if isinstance(event, Sampled)]
    return replace(
        empty,
        first_round_seconds=rounds[0].seconds if rounds else None,
        round_seconds=tuple(each.seconds for each in rounds if each.counts),
        round_waiting_seconds=tuple(each.waiting_seconds for each in rounds if each.counts),
        round_reads=tuple(each.read for each in rounds if each.counts and each.read),
        round_statistics=tuple(
            each.statistics for each in rounds if each.counts and each.statistics
        ),
        worker_start_seconds=started[0].worker_seconds if started else None,
        n_threads=started[0].n_threads if started else 1,
        n_function_threads=started[0].n_function_threads if started else 0,
        first_minibatch_seconds=started[0].first_minibatch_seconds if started else None,
        round_entropy_bits={each.label: tuple(each.bits.tolist()) for each in entropies},
        peak_memory_bytes=outcome.peak_memory_bytes
        + max((event.waiting_bytes + event.unshared_bytes for event in started), default=0),
        delivery_fault=next(filter(None, faults), ""),
        sampled=samples[0] if samples else (),
        failure=outcome.failure or "",
        n_requests=max(
            (each.n for each in outcome.events if isinstance(each, Requests)), default=0
        ),
        n_killed=outcome.n_killed,
        others=outcome.others,
    )


def _batch_means(round_seconds: Sequence[float]) -> list[float]:
    """Return means of batches of neighbouring rounds, at least two rounds each if these suffice."""
    n_batches = _MANY_BATCHES if len(round_seconds) >= 2 * _MANY_BATCHES else _FEW_BATCHES
    batches = np.array_split(round_seconds, min(n_batches, max(1, len(round_seconds))))
    return [float(each.mean()) for each in batches if each.size]


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Return one measurement from several replicates of the same configuration.

    Start-up times are those of the first; the peak is the highest.
    """
    first = measurements[0]
    entropies = defaultdict[str | LabelWithin, tuple[float, ...]](tuple)
    for each in measurements:
        for label, bits in each.round_entropy_bits.items():
            entropies[label] += bits
    return replace(
        first,
        round_seconds=tuple(s for each in measurements for s in each.round_seconds),
        rounds_per_replicate=tuple(len(each.round_seconds) for each in measurements),
        round_waiting_seconds=tuple(s for each in measurements for s in each.round_waiting_seconds),
        round_reads=tuple(read for each in measurements for read in each.round_reads),
        round_statistics=tuple(s for each in measurements for s in each.round_statistics),
        round_entropy_bits=dict(entropies),
        peak_memory_bytes=max(each.peak_memory_bytes for each in measurements),
        delivery_fault=next(filter(None, (each.delivery_fault for each in measurements)), ""),
        failure=next((each.failure for each in measurements if each.failure), ""),
        n_killed=sum(each.n_killed for each in measurements),
        others=sum((each.others for each in measurements), OtherPrograms()),
    )
