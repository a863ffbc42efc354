"""Timing whole fetches of one configuration, in a process of its own.

A *round* is as many minibatches as it takes for every worker to deliver one whole fetch; it is
what is timed. The first round holds the start-up, and with workers the first round of every
epoch does, so these are reported apart; so are more of them of a server (see `CountedRounds`).
Since the next fetch is under way while one is dealt out, rounds follow each other without a gap: a
pause in the clock would be time to read ahead for which nobody is charged.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Collection,
    Minibatch,
    SamplingStrategy,
    Statistics,
)
from cellfeed.machine import threads_per_process
from cellfeed.stages import begin_with_requests, requests_under_way
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._defaults import REMOTE_PREFETCH
from cellfeed_tuner._entropy._conditional_entropy import conditional_entropies_of
from cellfeed_tuner._entropy._minibatch_entropy import entropies_of
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._bytes_read import BytesRead, bytes_read
from cellfeed_tuner._measuring._counted_rounds import CountedRounds
from cellfeed_tuner._measuring._delivery import Delivered
from cellfeed_tuner._measuring._dropping import Dropping, closed_at_the_end, rounds_ahead
from cellfeed_tuner._measuring._labels import LabelWithin
from cellfeed_tuner._measuring._sampled_cells import DeliveredCell, sampled_cells
from cellfeed_tuner._measuring._selected import Selected

__all__ = [
    "SLICE_SECONDS",
    "Delivery",
    "Entropies",
    "MakeDataset",
    "Requests",
    "Round",
    "Sampled",
    "Started",
    "TimingRequest",
    "run_timing",
]

SLICE_SECONDS = 0.5
"""What a look at a configuration takes, unless its rounds are longer."""

MakeDataset = Callable[..., CellDataset]
"""What makes the data set that is measured; called as `CellDataset` is."""

# Epochs that one measurement may go through, at most.
_EPOCHS_APART = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest:
    """What to time, and for how long.

    Parameters
    ----------
    configuration, batch_size
        The settings.
    labels
        The obs columns whose entropies are taken; may be none.
    given
        Another, within whose values that of the first is taken too; may be none.
    cache
        "cold": pages are dropped before each epoch and once they were used, so that no round
        profits from an earlier one, as where the files are larger than memory. "warm": pages
        stay.
    seed
        Fixes which rows are read.
    least_rounds, most_rounds
        Rounds that count, after the first; with none, one round is read all the same.
    seconds
        Stop after this time, once there are `least_rounds`.
    number
        Which measurement of the collection it is: each reads other rows, as the epochs of a
        training do.
    step_seconds
        How long a training loop computes on each minibatch, without the processor: it sleeps.
    strategy
        How cells are visited; in shuffled blocks of the configuration's size, of the rows that
        are selected, if None.
    make_dataset
        What is called for the data set.
    prefetch
        Fetches that are read ahead; as many as that reads by itself if None.
    n_requests
        Requests under way at a server to begin with; 0 to find out how many it takes.
    """

    configuration: Configuration
    batch_size: int
    labels: Sequence[str]
    cache: CacheState
    seed: int
    least_rounds: int
    most_rounds: int = 64
    seconds: float = SLICE_SECONDS
    number: int = 0
    given: str | None = None
    step_seconds: float = 0.0
    strategy: SamplingStrategy | None = None
    make_dataset: MakeDataset = CellDataset
    prefetch: int | None = None
    n_requests: int = 0

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels, and what the first is taken within."""
        return (*self.labels, *([] if self.given is None else [self.given]))

    @property
    def first_epoch(self) -> int:
        """The epoch to begin with."""
        return _EPOCHS_APART * self.number

    def run(self, subject: Collection | Selected, report: Callable[[object], None]) -> None:
        """Time it; see `run_timing`."""
        selected = Selected.of(subject)
        strategy = self.strategy or selected.blocks(self.configuration.block_size)
        run_timing(selected.collection, replace(self, strategy=strategy), report)


@dataclass(frozen=True, slots=True)
class Started:
    """The first minibatch is there.

    Parameters
    ----------
    worker_seconds
        Time to start the workers.
    first_minibatch_seconds
        Time from then to the first minibatch.
    waiting_bytes
        Memory that minibatches take which wait for a training loop that is slower than the
        workers; 0 without workers.
    n_threads, n_function_threads
        Threads of each process that read, and that the user's functions have.
    """

    worker_seconds: float
    first_minibatch_seconds: float
    waiting_bytes: int
    n_threads: int = 1
    n_function_threads: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One timed round.

    Parameters
    ----------
    seconds
        Time that it took.
    counts
        Whether it is free of start-up.
    waiting_seconds
        The part of it in which the training loop waited for minibatches.
    read
        What was read meanwhile; None where it is not as much as was delivered, since more or
        less was read ahead, or is not counted, as of a server.
    may_end
        Whether measuring may end with it.
    statistics
        What the data set counted meanwhile, if it counts.
    """

    seconds: float
    counts: bool
    waiting_seconds: float
    read: BytesRead | None
    may_end: bool = True
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Entropies:
    """Entropies of one label, or of one within another, in the minibatches that came out.

    Parameters
    ----------
    label
        The obs column, or the two.
    bits
        Mean over each round, first rounds too, shape (n_rounds,).
    """

    label: str | LabelWithin
    bits: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Delivery:
    """Whether the minibatches that came out are those of the plan, with the labels of their rows.

    Parameters
    ----------
    fault
        The first that is not, in words; empty if all are.
    """

    fault: str


@dataclass(frozen=True, slots=True)
class Requests:
    """How many requests were under way at a server at the end.

    Parameters
    ----------
    n
        How many; 0 if none was asked by this process.
    """

    n: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some cells of the last minibatch, with all that it has of them.

    Parameters
    ----------
    cells
        In the order in which they are best compared with the files.
    """

    cells: tuple[DeliveredCell, ...]


def run_timing(
    collection: Collection, request: TimingRequest, report: Callable[[object], None]
) -> None:
    """Time a configuration, and report each event as it happens.

    Parameters
    ----------
    collection
        What is read.
    request
        What to time.
    report
        Called with `Started` once, then with each `Round`; at the end with `Delivery`, with
        `Sampled` if nothing is wrong so far, and with `Entropies` of each label, as minibatches
        have it, if these are whole.
    """
    configuration = request.configuration
    strategy = request.strategy
    if request.n_requests:
        begin_with_requests(request.n_requests)
    dataset = request.make_dataset(
        collection,
        BlockShuffling(block_size=configuration.block_size) if strategy is None else strategy,
        batch_size=request.batch_size,
        fetch_factor=configuration.fetch_factor,
        seed=request.seed,
        **({} if request.prefetch is None else {"prefetch": request.prefetch}),
    )
    dataset.set_epoch(request.first_epoch)
    came = Delivered(request.all_labels)
    deadline = time.perf_counter() + request.seconds
    n_timed = 0
    for each in _rounds(dataset, request, report, came):
        report(each)
        n_timed += each.counts
        late = time.perf_counter() > deadline and n_timed >= request.least_rounds
        if each.may_end and (late or n_timed >= request.most_rounds):
            break
    report(Requests(requests_under_way()))
    plan = dataset.plan(epoch=request.first_epoch)
    fault = came.fault(collection, configuration, plan)
    report(Delivery(fault))
    # Values that were transformed are not those of the files.
    if came.last is not None and not fault and not dataset.transform:
        cells = sampled_cells(came.last, request.all_labels, seed=request.number)
        report(Sampled(cells))
    for entropies in _entropies(request, came.codes(collection)):
        report(entropies)


def _entropies(
    request: TimingRequest, codes: Mapping[str, NDArray[np.integer]]
) -> Iterator[Entropies]:
    """Yield entropies over the labels of minibatches, shape (n_minibatches, batch_size)."""
    per_round = request.configuration.minibatches_per_round
    if not codes:
        return
    for label in request.labels:
        yield Entropies(label, _by_round(entropies_of(codes[label]), per_round))
    if request.given is not None:
        first = request.labels[0]
        bits = conditional_entropies_of(codes[first], codes[request.given])
        yield Entropies(LabelWithin(first, request.given), _by_round(bits, per_round))


def _rounds(
    dataset: CellDataset,
    request: TimingRequest,
    report: Callable[[object], None],
    came: Delivered,
) -> Iterator[Round]:
    """Yield one round after the other, epoch after epoch."""
    configuration = request.configuration
    n_rounds = configuration.rounds_per_epoch(dataset.plan(epoch=0))
    if n_rounds == 0:  # nothing would ever come
        msg = "an epoch has too few whole fetches"
        raise RuntimeError(msg)
    make_cold = Dropping(dataset.collection.files, request.cache)
    is_remote = request.cache == "remote"
    counted = CountedRounds(
        n_rounds=n_rounds,
        n_asked=(dataset.prefetch or REMOTE_PREFETCH) if is_remote else 0,
        has_workers=configuration.num_workers > 0,
    )
    started = False
    while True:
        make_cold.before_epoch()
        begin = start = time.perf_counter()
        loader = dataset.loader(configuration.num_workers)
        minibatches = iter(loader)
        workers_there = time.perf_counter()
        n_ahead = rounds_ahead(loader, configuration.minibatches_per_round)
        read_before: BytesRead | None = None
        counted_before = dataset.statistics()
        with closed_at_the_end(minibatches):
            for number in range(n_rounds):
                waiting_seconds = 0.0
                for place in range(configuration.minibatches_per_round):
                    wanted = time.perf_counter()
                    minibatch = next(minibatches, None)
                    waiting_seconds += time.perf_counter() - wanted
                    came.take(minibatch)
                    if minibatch is None:  # there should have been one
                        return
                    if not started and place == 0:
                        first = time.perf_counter() - workers_there
                        waiting = configuration.num_workers * (loader.prefetch_factor or 0)
                        size = _bytes_of(minibatch)
                        threads = dataset.num_threads or threads_per_process(
                            configuration.fetches_per_round
                        )
                        report(
                            Started(
                                workers_there - start,
                                first,
                                waiting * size,
                                threads,
                                dataset.transform_threads,
                            )
                        )
                    if request.step_seconds:
                        time.sleep(request.step_seconds)
                make_cold.after_round(n_ahead)
                end = time.perf_counter()
                read_so_far = bytes_read()
                read = None
                # At the end of an epoch, nothing is left to be read ahead.
                is_counted = not is_remote and number < n_rounds - n_ahead
                if read_before and read_so_far and is_counted:
                    read = read_so_far - read_before
                read_before = read_so_far
                started = True
                counts, may_end = counted.counts(number, end - begin), counted.may_end(number)
                counted_so_far = dataset.statistics()
                statistics = counted_so_far - counted_before
                counted_before = counted_so_far
                yield Round(end - begin, counts, waiting_seconds, read, may_end, statistics)
                begin = end
        del minibatches


def _bytes_of(minibatch: Minibatch) -> int:
    parts = [minibatch.rows, *minibatch.obs.values()]
    for each in minibatch.values():
        if each.layout == torch.sparse_csr:
            parts += [each.crow_indices(), each.col_indices(), each.values()]
        else:
            parts.append(each)
    return sum(part.nbytes for part in parts)


def _by_round(entropies: NDArray[np.float64], minibatches_per_round: int) -> NDArray[np.float64]:
    whole = entropies.size - entropies.size % minibatches_per_round
    means: NDArray[np.float64] = entropies[:whole].reshape(-1, minibatches_per_round).mean(axis=1)
    return means
