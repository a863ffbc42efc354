"""The measurement of one configuration, and the figures that follow from it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np

from cellfeed import CellDataset, Collection, ParameterError, SamplingStrategy, Statistics
from cellfeed.machine import usable_cores
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import FEWEST_ROUNDS, LEAST_ROUNDS
from cellfeed_tuner._interval import Estimate, mean_with_interval, positive_estimate
from cellfeed_tuner._machine import BytesRead, OtherPrograms, ProcessorTime, undisturbed_share
from cellfeed_tuner._measuring._delivery import DeliveredCell, compare_with_files
from cellfeed_tuner._measuring._page_cache import CacheState, cache_state, prepare_cache
from cellfeed_tuner._measuring._process import Measures, MeasuringProcess, Outcome
from cellfeed_tuner._measuring._timing import (
    Findings,
    Infeasible,
    MakeDataset,
    Round,
    Started,
    TimingRequest,
)
from cellfeed_tuner._subject import Tunable, label_codes, names_of

# Rounds after which a standalone measurement ends. Chosen: more rounds do not narrow an interval
# that drifts with the machine.
MOST_ROUNDS = 200
# A standalone measurement is stopped after this many times its given time, but not before this
# many seconds. Chosen: even a slow machine should reach the fewest rounds.
LIMIT_TIMES, LEAST_LIMIT_SECONDS = 20, 60.0
# Batches of adjacent rounds for the interval of one process: with few rounds, and with many.
# Chosen: adjacent rounds are not independent, but batch means nearly are.
FEW_BATCHES, MANY_BATCHES = 4, 8

_JOINED = (
    "round_seconds", "round_waiting_seconds", "round_processor", "round_reads", "round_statistics",
)  # fmt: skip
_Event = TypeVar("_Event")

MeasurementStatus = Literal["timed", "too long", "too few cells", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one configuration: one replicate, or several pooled.

    A replicate is timed in one process for each rank, and consists of rounds.

    Parameters
    ----------
    configuration
        The settings.
    cache
        State of the page cache: "cold", dropped before each epoch and after use; "warm"; "remote"
        for files on servers; "unknown" where the state cannot be set or checked.
    cells_per_round
        Cells of one round: a whole fetch of every worker.
    first_round_seconds
        Time of the first round, which contains the start-up; None if it was not finished.
    uncounted_seconds
        Time of all rounds that contain start-up, the first one and others; see `CountedRounds`.
    round_seconds, round_waiting_seconds
        Time of each round without start-up, and the part of it in which the training loop waited
        for minibatches.
    round_processor
        Processor time of all threads in each of these rounds; empty if unknown.
    rounds_per_replicate
        How many of these rounds each replicate has; empty if there is one replicate.
    worker_start_seconds, first_minibatch_seconds
        Time to start the worker processes, and from then to the first minibatch; neither is
        part of the throughput. None if there was no minibatch.
    round_reads
        Bytes read during each round for which they are known.
    round_statistics
        Counts of the dataset in each of these rounds; empty if it does not count.
    round_entropy_bits
        For each label, and each label within another, the mean entropy of the minibatches of each
        round.
    peak_memory_bytes
        Highest memory of the process and its workers, with the minibatches that may wait for a
        slow training loop; 0 if nothing ran.
    delivery_fault
        The first minibatch with other cells than the plan, or with wrong labels or expression, in
        words; empty if there was none.
    sampled
        Some of the delivered cells, to be compared with the files.
    failure
        Why it failed, or empty.
    is_infeasible
        Whether it failed because an epoch has too few whole fetches.
    n_requests
        Concurrent requests to a server at the end; 0 if there were none.
    others
        Processor time that other programs took meanwhile.
    num_threads, num_function_threads
        Threads of each process that read, and that run the user's functions.
    compiling_seconds
        How long code was compiled meanwhile, which makes the figures too low.
    """

    configuration: Configuration
    cache: CacheState | Literal["unknown"]
    cells_per_round: int
    first_round_seconds: float | None = None
    uncounted_seconds: float = 0.0
    round_seconds: tuple[float, ...] = ()
    round_waiting_seconds: tuple[float, ...] = ()
    round_processor: tuple[ProcessorTime, ...] = ()
    rounds_per_replicate: tuple[int, ...] = ()
    worker_start_seconds: float | None = None
    first_minibatch_seconds: float | None = None
    round_reads: tuple[BytesRead, ...] = ()
    round_statistics: tuple[Statistics, ...] = ()
    round_entropy_bits: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    delivery_fault: str = ""
    sampled: tuple[DeliveredCell, ...] = ()
    failure: str = ""
    is_infeasible: bool = False
    n_requests: int = 0
    others: OtherPrograms = field(default_factory=OtherPrograms)
    num_threads: int = 1
    num_function_threads: int = 0
    compiling_seconds: float = 0.0

    @property
    def status(self) -> MeasurementStatus:
        """Whether whole fetches were timed, and if not, why."""
        if self.is_infeasible:
            return "too few cells"
        if self.failure:
            return "failed"
        return "timed" if self.round_seconds else "too long"

    @property
    def cells_per_second(self) -> Estimate | None:
        """Throughput with its 95 % interval; None if there are too few rounds.

        The interval rests on the means of replicates. If there is one replicate, it rests on means
        of neighbouring rounds, and covers the measured time but not the minutes around it.
        """
        seconds = np.array(self.replicate_seconds)
        if seconds.size <= 1:
            n_rounds = len(self.round_seconds)
            n_batches = MANY_BATCHES if n_rounds >= 2 * MANY_BATCHES else FEW_BATCHES
            batches = np.array_split(self.round_seconds, min(n_batches, max(1, n_rounds)))
            seconds = np.array([each.mean() for each in batches if each.size])
        if len(self.round_seconds) < FEWEST_ROUNDS or seconds.size <= 1:
            return None
        error = float(seconds.std(ddof=1) / seconds.mean() / seconds.size**0.5)
        cells = self.cells_per_round / float(seconds.mean())
        return positive_estimate(cells, error, seconds.size - 1)

    @property
    def replicate_seconds(self) -> tuple[float, ...]:
        """Mean time of a round in each replicate that has rounds."""
        if not self.rounds_per_replicate:
            return (float(np.mean(self.round_seconds)),) if self.round_seconds else ()
        ends = np.cumsum(self.rounds_per_replicate)[:-1]
        parts = np.split(np.array(self.round_seconds), ends)
        return tuple(float(each.mean()) for each in parts if each.size)

    @property
    def undisturbed_share(self) -> float:
        """Share of the rounds' time that they would have taken without other programs."""
        if not self.others.seconds or len(self.round_processor) != len(self.round_seconds):
            return 1.0
        return undisturbed_share(
            sum(self.round_seconds),
            sum(self.round_processor, ProcessorTime(0.0, 0.0)),
            self.others.cpu_seconds / self.others.seconds,
            cores=usable_cores(),
        )

    @property
    def seconds_in_rounds(self) -> float:
        """Time of all rounds, with those that do not count."""
        return self.uncounted_seconds + sum(self.round_seconds)

    @property
    def second_half(self) -> "Measurement":
        """The rounds of the second half of the time, of one replicate."""
        middle, ends = sum(self.round_seconds) / 2, np.cumsum(self.round_seconds)
        begin = int(np.searchsorted(ends, middle, side="right"))
        whole = len(self.round_seconds)
        later = {
            name: getattr(self, name)[begin:]
            for name in _JOINED
            if len(getattr(self, name)) == whole
        }
        return replace(self, **later)

    @property
    def rough_cells_per_second(self) -> float:
        """Throughput from any rounds, even the first, to plan by; 0 if there are none."""
        seconds = self.round_seconds
        if not seconds and self.first_round_seconds is not None:
            seconds = (self.first_round_seconds,)
        return self.cells_per_round * len(seconds) / sum(seconds) if seconds else 0.0

    @property
    def waiting_share(self) -> Estimate | None:
        """Share of time in which the training loop waited, with its 95 % interval."""
        if not self.round_seconds:
            return None
        seconds = np.array(self.round_seconds)
        share = mean_with_interval(self.round_waiting_seconds / seconds, weights=seconds)
        return Estimate(share.value, max(share.low, 0.0), min(share.high, 1.0))

    @property
    def bytes_read_per_cell(self) -> BytesRead | None:
        """Bytes read for each delivered cell; None if they are not known."""
        if not self.round_reads:
            return None
        n_cells = len(self.round_reads) * self.cells_per_round
        return BytesRead(
            asked=sum(each.asked for each in self.round_reads) / n_cells,
            from_storage=sum(each.from_storage for each in self.round_reads) / n_cells,
        )

    @property
    def entropy_bits(self) -> dict[str, Estimate]:
        """Mean entropy of delivered minibatches, of each label, with its 95 % interval."""
        return {
            label: mean_with_interval(bits)
            for label, bits in self.round_entropy_bits.items()
            if bits
        }


def measured(request: TimingRequest, outcome: Outcome) -> Measurement:
    """Return the measurement that the children of the measuring process reported."""
    of_ranks = [outcome.events, *outcome.events_of_others]
    started = [each for events in of_ranks for each in _all(Started, events)]
    rounds = [_joined(each) for each in zip(*(_all(Round, e) for e in of_ranks), strict=False)]
    counted = [each for each in rounds if each.counts]
    found = {rank: each for rank, events in enumerate(of_ranks) for each in _all(Findings, events)}
    faults = [
        f"rank {rank}: {each.fault}" if len(of_ranks) > 1 else each.fault
        for rank, each in found.items()
        if each.fault
    ]
    infeasible = [each.reason for events in of_ranks for each in _all(Infeasible, events)]
    start = dict[str, Any]()
    if started:
        start = {
            "worker_start_seconds": max(each.worker_seconds for each in started),
            "first_minibatch_seconds": max(each.first_minibatch_seconds for each in started),
            "num_threads": started[0].num_threads,
            "num_function_threads": started[0].num_function_threads,
        }
    return Measurement(
        configuration=request.configuration,
        cache=request.cache,
        cells_per_round=request.cells_per_round,
        first_round_seconds=rounds[0].seconds if rounds else None,
        uncounted_seconds=sum(each.seconds for each in rounds if not each.counts),
        round_seconds=tuple(each.seconds for each in counted),
        round_waiting_seconds=tuple(each.waiting_seconds for each in counted),
        round_processor=tuple(each.processor for each in counted if each.processor),
        round_reads=tuple(each.read for each in counted if each.read),
        round_statistics=tuple(each.statistics for each in counted if each.statistics),
        round_entropy_bits=_entropies([*found.values()]),
        peak_memory_bytes=outcome.peak_memory_bytes + sum(each.waiting_bytes for each in started),
        delivery_fault=next(iter(faults), ""),
        sampled=() if faults else tuple(chain.from_iterable(e.cells for e in found.values())),
        failure=" ".join((outcome.failure or "").split()) or next(iter(infeasible), ""),
        is_infeasible=bool(infeasible),
        n_requests=max((each.n_requests for each in found.values()), default=0),
        compiling_seconds=max((each.compiling_seconds for each in found.values()), default=0.0),
        others=outcome.others,
        **start,
    )


def _all(kind: type[_Event], events: Sequence[object]) -> list[_Event]:
    return [each for each in events if isinstance(each, kind)]


def _joined(rounds: Sequence[Round]) -> Round:
    """Return one round of all ranks: the slowest sets the pace."""
    first, *others = rounds
    if not others:
        return first
    reads = [each.read for each in rounds if each.read]
    processor = [each.processor for each in rounds if each.processor]
    return replace(
        first,
        seconds=max(each.seconds for each in rounds),
        waiting_seconds=sum(each.waiting_seconds for each in rounds) / len(rounds),
        read=sum(reads[1:], reads[0]) if len(reads) == len(rounds) else None,
        processor=sum(processor[1:], processor[0]) if len(processor) == len(rounds) else None,
        statistics=None,  # where time goes is explained for one process
    )


def _entropies(findings: Sequence[Findings]) -> dict[str, tuple[float, ...]]:
    """Return entropies in the rounds that all ranks have, averaged over ranks."""
    n_rounds = min((len(bits) for each in findings for bits in each.entropies.values()), default=0)
    return {
        label: tuple(np.mean([each.entropies[label][:n_rounds] for each in findings], 0).tolist())
        for label in (findings[0].entropies if findings else ())
        if all(label in each.entropies for each in findings)
    }


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Return one measurement from several replicates of the same configuration.

    Start-up times are the first replicate's; the peak is the highest.
    """
    joined: dict[str, Any] = {
        name: tuple(chain.from_iterable(getattr(each, name) for each in measurements))
        for name in _JOINED
    }
    first: dict[str, Any] = {
        name: next(filter(None, (getattr(each, name) for each in measurements)), "")
        for name in ("delivery_fault", "failure")
    }
    entropies = defaultdict[str, tuple[float, ...]](tuple)
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
        others=sum((each.others for each in measurements), OtherPrograms()),
        **joined,
        **first,
    )


# Measuring the throughput of one configuration.


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
    reported separately. If the subject is a collection, some of the delivered cells are read again
    through h5py or zarr, and compared.

    Parameters
    ----------
    subject
        A collection, which cellfeed reads; or any other loader, which has its own labels and batch
        size.
    configuration
        The settings.
    strategy
        How cells are visited, such as `cellfeed.Streaming`; the configuration's block size is then
        ignored. In shuffled blocks of that size if None.
    batch_size
        Cells of a minibatch.
    label
        One obs column of the collection, or several, whose minibatch entropy is measured.
    cache
        "cold" drops the files' pages from the page cache before each epoch and after use; "warm"
        reads all files first; None for "cold", or "remote" for files on servers.
    seconds
        Time to spend, or longer if the least number of rounds takes longer. Measuring is stopped
        after 20 times as long, and at least a minute.
    seed
        Determines which rows are read.
    make_dataset
        Makes the dataset to measure, as in `autotune`.

    Raises
    ------
    ColumnError
        The collection was opened without a label.
    ParameterError
        The collection or the loader has too few cells for whole fetches; or the measuring process
        cannot import the loader; or the loader's minibatches contradict its attributes.
    FormatError
        A file is damaged.
    """
    if isinstance(subject, Tunable):
        subject.check()
        files, batch_size, labels = subject.paths, subject.batch_size, tuple(subject.labels)
        cache = cache or ("cold" if files else "warm")
    else:
        needed, files, labels = (
            configuration.cells_to_time(batch_size),
            subject.files,
            names_of(label),
        )
        if needed > len(subject):
            msg = f"{configuration}: timing needs {needed:,} cells, but there are {len(subject):,}"
            raise ParameterError(msg)
        for each in labels:
            label_codes(subject, each)
        cache = cache_state(subject, cache)
    request = TimingRequest(
        configuration=configuration,
        batch_size=batch_size,
        labels=labels,
        cache=cache,
        seed=seed,
        least_rounds=LEAST_ROUNDS,
        most_rounds=MOST_ROUNDS,
        seconds=seconds,
        strategy=strategy,
        make_dataset=make_dataset,
    )
    found_cache = prepare_cache(files, cache)
    with MeasuringProcess(subject) as process:
        process.start()
        found = measure_with(process, request, limit_seconds=limit_seconds(seconds))
    if found.is_infeasible:
        raise ParameterError(found.failure)
    fault = found.delivery_fault
    if not isinstance(subject, Tunable):
        faults = compare_with_files(subject, {configuration: found.sampled}).faults
        fault = fault or faults.get(configuration, "")
    return replace(found, cache=found_cache, delivery_fault=fault)


def limit_seconds(seconds: float) -> float:
    """Return after how long a measurement of so many seconds is stopped."""
    return max(LIMIT_TIMES * seconds, LEAST_LIMIT_SECONDS)


def measure_with(process: Measures, request: TimingRequest, *, limit_seconds: float) -> Measurement:
    """Measure in a process that is already running; see `measure`."""
    return measured(request, process.run(request, limit_seconds=limit_seconds))
