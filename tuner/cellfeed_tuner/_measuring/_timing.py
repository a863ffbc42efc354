"""Timing whole fetches of one configuration, in a process of its own.

A *round* is as many minibatches as it takes for every worker to deliver one whole fetch; rounds
are timed. The first round contains the start-up, and with workers the first round of every epoch
does, so these are reported separately, as are further ones of a server (see `CountedRounds`).
Since the next fetch is read while one is delivered, rounds follow each other without a gap: a
pause in the clock would be unpaid time to prefetch.
"""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from cellfeed import (
    CellDataset,
    Collection,
    Minibatch,
    ParameterError,
    RaggedTensor,
    ReadOptions,
    SamplingStrategy,
    Statistics,
)
from cellfeed.machine import threads_per_process
from cellfeed.stages import begin_with_requests, compiling_seconds, requests_under_way
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import MOST_ROUNDS_OF_REPLICATE, REMOTE_PREFETCH, REPLICATE_SECONDS
from cellfeed_tuner._entropy import by_round, entropies_of
from cellfeed_tuner._machine import (
    BytesRead,
    ProcessorTime,
    bytes_read,
    processor_time_between,
    thread_times,
)
from cellfeed_tuner._measuring._delivery import Delivered, DeliveredCell, sampled_cells
from cellfeed_tuner._measuring._page_cache import (
    FETCHES_PREFETCHED,
    CacheState,
    Dropping,
    held_by_workers,
    rounds_prefetched,
)
from cellfeed_tuner._measuring._process import Finished, Request
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._subject import Selected, Tunable

# Distance between the first epochs of two measurements. Chosen: no measurement runs through as
# many, so each reads different rows.
EPOCHS_APART = 1000


class Pace:
    """One rank's place in step with the others; the only rank if there is no ``barrier``.

    A context manager: the others stop waiting if this rank fails. All methods that wait raise
    `threading.BrokenBarrierError` if another rank has failed.

    Parameters
    ----------
    rank
        The local rank.
    barrier, has_ended, n_rounds
        Memory shared with the other ranks, which are forked after it is made.
    """

    def __init__(
        self, rank: int = 0, barrier: Any = None, has_ended: Any = None, n_rounds: Any = None
    ) -> None:
        self._rank, self._barrier = rank, barrier
        self._has_ended, self._n_rounds = has_ended, n_rounds
        self.is_first, self.is_alone = rank == 0, barrier is None

    @classmethod
    def of_ranks(cls, n: int) -> "list[Pace]":
        """Return one for each of ``n`` ranks."""
        context = multiprocessing.get_context("fork")
        shared = context.Barrier(n), context.RawValue("b", 0), context.RawArray("q", n)
        return [cls(rank, *shared) for rank in range(n)]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.leave()

    def require_equal_epochs(self, n_rounds: int) -> None:
        """Refuse epochs of different lengths, in which ranks would wait for each other forever."""
        if self.is_alone:
            return
        self._n_rounds[self._rank] = n_rounds
        self.meet()
        found = list(self._n_rounds)
        if len(set(found)) > 1:
            msg = (
                f"an epoch has {found} rounds of whole fetches on ranks 0 to {len(found) - 1}, "
                "which would wait for each other for ever; give each rank as many minibatches"
            )
            raise ParameterError(msg)

    def meet(self) -> float:
        """Wait for all ranks, and return for how many seconds."""
        if self.is_alone:
            return 0.0
        began = time.perf_counter()
        self._barrier.wait()
        return time.perf_counter() - began

    def agreed(self, *, ended: bool) -> bool:
        """Wait for all ranks, and return what the first one passed."""
        if self.is_alone:
            return ended
        if self.is_first:
            self._has_ended.value = ended
        self.meet()
        return bool(self._has_ended.value)

    def leave(self) -> None:
        """Stop the others from waiting for this rank."""
        if not self.is_alone:
            self._barrier.abort()


Step = Callable[[Any], object]
"""A training step, called with a minibatch."""


MakeDataset = Callable[..., CellDataset]
"""Makes the dataset to measure; called as `CellDataset` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest(Request):
    """What to time, and for how long; see `measure` and `autotune` for the rest.

    Parameters
    ----------
    least_rounds, most_rounds, seconds
        Counted rounds. Measuring stops when they took so many seconds, if it has the least. One
        round is always read.
    number
        The number of this replicate. Each replicate reads other rows, as epochs of a training do.
    step_seconds, step
        How long a training loop sleeps on each minibatch; or a function to call with each instead.
    n_requests
        The first number of concurrent requests to a server; 0 leaves it to the dataset.
    ranks, rank, pace
        How many ranks are timed side by side, which of them this is, and how they keep in step.
    """

    configuration: Configuration
    batch_size: int
    labels: Sequence[str]
    cache: CacheState
    seed: int
    least_rounds: int
    most_rounds: int = MOST_ROUNDS_OF_REPLICATE
    seconds: float = REPLICATE_SECONDS
    number: int = 0
    step_seconds: float = 0.0
    step: Step | None = None
    strategy: SamplingStrategy | None = None
    make_dataset: MakeDataset = CellDataset
    n_requests: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    rank: int = 0
    pace: Pace = field(default_factory=Pace)

    @property
    def cells_per_round(self) -> int:
        """Cells of a whole fetch of each worker of each rank of this machine."""
        minibatches = self.configuration.minibatches_per_round
        return minibatches * self.batch_size * self.ranks.n_local

    @property
    def first_epoch(self) -> int:
        """The first epoch to read."""
        return EPOCHS_APART * self.number

    def parts(self) -> "Sequence[TimingRequest]":
        """Return the request of each rank."""
        n = self.ranks.n_local
        if n == 1:
            return [self]
        return [replace(self, rank=rank, pace=each) for rank, each in enumerate(Pace.of_ranks(n))]

    def run(
        self, subject: Collection | Selected | Tunable, report: Callable[[object], None]
    ) -> None:
        """Report `Started` once, then each `Round` as it happens, and `Findings` at the end."""
        try:
            with self.pace:
                self._run(subject, report)
        except EpochTooShortError as error:
            report(Infeasible(str(error)))
        except threading.BrokenBarrierError:
            pass  # another rank has failed, and says why

    def _run(
        self, subject: Collection | Selected | Tunable, report: Callable[[object], None]
    ) -> None:
        if self.ranks.n_total > 1 or {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys():
            self.ranks.set_environment(self.rank)
        if isinstance(subject, Tunable):
            session = Session(subject, self)
        else:
            session = DatasetSession(Selected.of(subject), self)
        counted_seconds, n_counted, compiled_before = 0.0, 0, compiling_seconds()
        for each in _rounds(session, self, report):
            report(each)
            n_counted += each.counts
            counted_seconds += each.seconds if each.counts else 0.0
            enough = counted_seconds >= self.seconds and n_counted >= self.least_rounds
            if self.pace.agreed(ended=each.may_end and (enough or n_counted >= self.most_rounds)):
                break
        report(replace(session.findings(), compiling_seconds=compiling_seconds() - compiled_before))
        report(Finished())


@dataclass(frozen=True, slots=True)
class Started:
    """The first minibatch has come, ``first_minibatch_seconds`` after the workers started.

    Minibatches that wait for a training loop slower than the workers take ``waiting_bytes``. Each
    process reads with ``num_threads``, and the user's functions have ``num_function_threads``.
    """

    worker_seconds: float
    first_minibatch_seconds: float
    waiting_bytes: int
    num_threads: int = 1
    num_function_threads: int = 0


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The configuration cannot be timed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """One timed round, and what the dataset counted in it, if it counts.

    It ``counts`` if it is free of start-up. The training loop waited ``waiting_seconds`` for its
    minibatches. ``read`` is None where the bytes differ from what was delivered, because more or
    less was prefetched, and for servers. Measuring does not end after a round unless it
    ``may_end``. ``processor`` is the processor time of all threads; None if unknown.
    """

    seconds: float
    counts: bool
    waiting_seconds: float
    read: BytesRead | None
    may_end: bool = True
    statistics: Statistics | None = None
    processor: ProcessorTime | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Findings:
    """What is known at the end.

    Parameters
    ----------
    fault
        The first minibatch whose rows or labels differ from the plan; empty if none does.
    n_requests
        Concurrent requests to a server; 0 if this process sent none.
    cells
        Some cells of the last minibatch.
    entropies
        Mean entropy of each label, and of one within another, in each round, shape (n_rounds,).
    compiling_seconds
        How long code was compiled meanwhile.
    """

    fault: str = ""
    n_requests: int = 0
    cells: tuple[DeliveredCell, ...] = ()
    entropies: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    compiling_seconds: float = 0.0


# An epoch is long if it has this many times the rounds at its start, which are requested from a
# server or go into new memory.
LONG_EPOCH = 3
# The same for epochs read by worker processes, which are restarted in each epoch. Chosen: what is
# left out would change throughput by a few percent.
LONG_EPOCH_OF_WORKERS = 10

# A loader opened in the measuring process, and the rows and labels that it delivers.


class EpochTooShortError(ParameterError):
    """An epoch has too few whole fetches to time any."""


class Session:
    """A loader of any kind, opened with the settings of a request.

    If ``is_mapped``, ``files`` may be mapped into memory. An epoch has ``n_rounds`` of whole
    fetches; without any, or with workers and fewer than two, it is too short. At its start,
    ``n_asked`` fetches are requested from a server. For threads, see `Started`.
    """

    is_mapped = True
    n_asked = 0
    num_threads, num_function_threads = 1, 0

    def __init__(self, tunable: Tunable, request: TimingRequest) -> None:
        self._tunable, self._request = tunable, request
        self.files = tunable.paths
        _seed((request.seed, request.number, *([request.rank] if request.rank else [])))
        self._loader: Any = tunable.open(request.configuration)
        self._n_minibatches = self._length()
        self.n_rounds = self._n_minibatches // request.configuration.minibatches_per_round
        if (needed := request.configuration.cells_to_time(1)) > self._n_minibatches:
            n = needed // request.configuration.minibatches_per_round
            msg = (
                f"an epoch has {self._n_minibatches} minibatches, but {request.configuration} "
                f"needs {needed} to be timed: {n} whole fetch{'es' if n > 1 else ''}"
            )
            raise EpochTooShortError(msg)
        self._labels: dict[str, list[NDArray[Any]]] = {name: [] for name in request.labels}

    def begin_epoch(self) -> Any:
        """Return the iterable of one more epoch."""
        return self._loader

    def take(self, minibatch: Any) -> None:
        """Keep the labels of a minibatch; None stands for a missing one.

        A missing minibatch, or one that is not whole or lacks a label, is a `ParameterError`.
        """
        if minibatch is None:
            msg = f"the loader ended early: it should have {self._n_minibatches} minibatches"
            raise ParameterError(msg)
        if not self._labels:
            return
        found = self._tunable.labels_of(minibatch)
        for name, delivered in self._labels.items():
            values = np.asarray(found[name]) if name in found else np.empty(0)
            if values.shape != (self._request.batch_size,):
                msg = (
                    f"`labels_of` of {self._tunable.name} gives {name} of shape {values.shape} "
                    f"for a minibatch of {self._request.batch_size}; give a value for each row, "
                    "and open the loader with whole minibatches only"
                )
                raise ParameterError(msg)
            delivered.append(values)

    def size_of(self, minibatch: Any) -> int:  # noqa: ARG002 - of a minibatch of any kind
        """Return the bytes of a minibatch; 0 if unknown."""
        return 0

    def statistics(self) -> Statistics | None:
        """Return the loader's counters; None if it has none."""
        return None

    def findings(self) -> Findings:
        """Return the entropies of all rounds."""
        codes = {}
        for name, delivered in self._labels.items():
            found, _ = pd.factorize(np.ravel(delivered))  # missing values become -1
            codes[name] = found.reshape(len(delivered), -1)
        return Findings(entropies=self._entropies(codes))

    def _entropies(
        self, codes: Mapping[str, NDArray[np.integer]]
    ) -> dict[str, NDArray[np.float64]]:
        """Return entropies in each round, over labels of shape (n_minibatches, batch_size)."""
        n = self._request.configuration.minibatches_per_round
        return {label: by_round(entropies_of(each), n) for label, each in codes.items()}

    def _length(self) -> int:
        """Return how many whole minibatches an epoch has."""
        try:
            return len(self._loader)
        except TypeError:
            sizes = [len(np.asarray(each)) for each in self._tunable.labels.values()]
            if not sizes:
                msg = f"{self._tunable.name} opens a loader without `len()`; give it `labels`"
                raise ParameterError(msg) from None
            return sizes[0] // self._request.ranks.n_total // self._tunable.batch_size


def own_read_options(make_dataset: MakeDataset) -> ReadOptions:
    """Return the read options that a partial gives, or the default ones."""
    own: ReadOptions | None = getattr(make_dataset, "keywords", {}).get("read_options")
    return own or ReadOptions()


class DatasetSession(Session):
    """cellfeed's own dataset, compared with its plan; see `Session`."""

    is_mapped = False

    def __init__(self, selected: Selected, request: TimingRequest) -> None:
        configuration, collection = request.configuration, selected.collection
        others = configuration.others
        asked: dict[str, Any] = {
            name: others[name] for name in ("prefetch", "num_threads") if name in others
        }
        arguments: dict[str, Any] = {}
        if asked:
            arguments["read_options"] = replace(own_read_options(request.make_dataset), **asked)
        if request.ranks.n_total > 1:
            arguments |= {"rank": request.rank, "world_size": request.ranks.n_total}
        self._request, self._collection = request, collection
        self.files = collection.files
        if request.n_requests:
            begin_with_requests(request.n_requests)
        self._dataset = request.make_dataset(
            collection,
            request.strategy or selected.blocks(configuration.block_size, others.get("align")),
            batch_size=request.batch_size,
            fetch_factor=configuration.fetch_factor,
            seed=request.seed,
            **arguments,
        )
        self._dataset.set_epoch(request.first_epoch)
        self.n_rounds = configuration.rounds_per_epoch(self._dataset.plan(epoch=0))
        if self.n_rounds == 0:
            msg = "an epoch has too few whole fetches"
            raise EpochTooShortError(msg)
        if request.cache == "remote":
            self.n_asked = self._dataset.read_options.prefetch or REMOTE_PREFETCH
        self.num_threads = self._dataset.read_options.num_threads or threads_per_process(
            configuration.fetches_per_round
        )
        self.num_function_threads = self._dataset.transform_threads
        self._came = Delivered(request.labels)

    def begin_epoch(self) -> Any:
        """Return the loader of one more epoch, with new workers."""
        return self._dataset.loader(self._request.configuration.num_workers)

    def take(self, minibatch: Minibatch | None) -> None:
        """Keep rows and labels of a minibatch; None stands for a missing one."""
        self._came.take(minibatch)

    def statistics(self) -> Statistics:
        """Return the dataset's counters."""
        return self._dataset.statistics()

    def size_of(self, minibatch: Minibatch) -> int:
        """Return the bytes of a minibatch, with the cells that come with it."""
        parts = [minibatch.rows, *minibatch.obs.values()]
        for each in minibatch.values():
            if isinstance(each, RaggedTensor):
                parts += [each.offsets, each.values]  # noqa: PD011 - no pandas
            elif each.layout == torch.sparse_csr:
                parts += [each.crow_indices(), each.col_indices(), each.values()]
            else:
                parts.append(each)
        others = map(self.size_of, minibatch.companions.values())
        return sum(part.nbytes for part in parts) + sum(others)

    def findings(self) -> Findings:
        """Return the first fault, entropies, and some cells if there is no fault.

        Entropies are of delivered labels, and absent if these are incomplete.
        """
        request, came = self._request, self._came
        plan = self._dataset.plan(epoch=request.first_epoch)
        fault = came.fault(self._collection, request.configuration, plan)
        cells: tuple[DeliveredCell, ...] = ()
        # Transformed values differ from those in the files.
        if came.last is not None and not fault and not self._dataset.transform:
            fault = self._wrong_dtype(came.last)
        if came.last is not None and not fault and not self._dataset.transform:
            cells = sampled_cells(came.last, request.labels, seed=request.number)
        return Findings(
            fault=fault,
            n_requests=requests_under_way(),
            cells=cells,
            entropies=self._entropies(came.codes(self._collection)),
        )

    def _wrong_dtype(self, minibatch: Minibatch) -> str:
        """Return how the dtype of X differs from the requested one or the files', in words."""
        asked, name = self._dataset.dtype, next(iter(self._collection.elements))
        wanted = asked.get(name) if isinstance(asked, Mapping) else asked
        expected = np.dtype(wanted or self._collection.dtype).name
        found = str(minibatch[name].dtype).removeprefix("torch.")
        if found == expected or getattr(self._dataset, "fetch_callback", None) is not None:
            return ""
        source = "the files have" if wanted is None else "the request was for"
        return f"minibatches have {name} of {found} where {source} {expected}"


def _seed(words: tuple[int, ...]) -> None:
    """Seed the global generators, so that each replicate and each rank reads other rows."""
    (word,) = np.random.SeedSequence(words).generate_state(1).tolist()
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002 - other loaders draw from it
    torch.manual_seed(word)


# Dropping pages of files from the page cache after a loader has used them.


def _rounds(
    session: Session, request: TimingRequest, report: Callable[[object], None]
) -> Iterator[Round]:
    """Yield one round after the other, epoch after epoch."""
    configuration, n_rounds, pace = request.configuration, session.n_rounds, request.pace
    pace.require_equal_epochs(n_rounds)
    # One rank drops what all have read.
    files = session.files if pace.is_first else ()
    make_cold = Dropping(files, request.cache, mapped=session.is_mapped)
    counted = CountedRounds(
        n_rounds=n_rounds, n_asked=session.n_asked, has_workers=configuration.num_workers > 0
    )
    has_started, n_minibatches, overslept = False, 0, 0.0
    while True:
        make_cold.before_epoch()
        pace.meet()
        begin = start = time.perf_counter()
        loader = session.begin_epoch()
        minibatches = iter(loader)
        workers_there = time.perf_counter()
        n_prefetched = rounds_prefetched(loader, configuration.minibatches_per_round)
        n_prefetched += not pace.is_alone  # others may have begun with the next one
        read_before: BytesRead | None = None
        counted_before, times_before = session.statistics(), thread_times()
        # If it were dropped, cellfeed's iterator would end in a thread while the next epoch is
        # timed. Other loaders may have nothing to close; dropping ends their iterators.
        has_end = hasattr(minibatches, "close")
        with closing(minibatches) if has_end else nullcontext():
            for number in range(n_rounds):
                waiting_seconds = 0.0
                for _ in range(configuration.minibatches_per_round):
                    wanted = time.perf_counter()
                    minibatch = next(minibatches, None)
                    came = time.perf_counter()
                    waiting_seconds += came - wanted
                    session.take(minibatch)
                    if minibatch is None:  # there should have been one
                        pace.leave()
                        return
                    n_minibatches += 1
                    report(n_minibatches)
                    if not has_started:
                        has_started = True
                        report(
                            Started(
                                workers_there - start,
                                came - workers_there,
                                held_by_workers(loader) * session.size_of(minibatch),
                                session.num_threads,
                                session.num_function_threads,
                            )
                        )
                    if request.step is not None:
                        request.step(minibatch)
                    elif request.step_seconds:
                        # As long on average as it should, though a busy machine wakes it late.
                        came = time.perf_counter()
                        time.sleep(request.step_seconds - overslept)
                        overslept += time.perf_counter() - came - request.step_seconds
                        overslept = min(overslept, request.step_seconds / 2)
                make_cold.after_round(n_prefetched)
                waiting_seconds += pace.meet()
                end = time.perf_counter()
                read_so_far, counted_so_far = bytes_read(), session.statistics()
                times_so_far = thread_times()
                # At the end of an epoch, nothing is left to be prefetched.
                is_known = request.cache != "remote" and number < n_rounds - n_prefetched
                yield Round(
                    end - begin,
                    counted.counts(number, end - begin),
                    waiting_seconds,
                    _between(read_before, read_so_far) if is_known else None,
                    counted.may_end(number),
                    _between(counted_before, counted_so_far),
                    processor_time_between(times_before, times_so_far),
                )
                begin, read_before, counted_before = end, read_so_far, counted_so_far
                times_before = times_so_far
        del minibatches


_Counted = TypeVar("_Counted", BytesRead, Statistics)


def _between(before: _Counted | None, after: _Counted | None) -> _Counted | None:
    """Return the difference of two counts; None if one of them is unknown."""
    return None if before is None or after is None else after - before


class CountedRounds:
    """Decides for each round whether it counts.

    The first fetches of a process go into memory that the system must clear first, and take up
    to half as long again as later ones, which reuse that memory: in long epochs they do not count.

    At the start of an epoch, ``n_asked`` fetches are requested from a server; 0 for files on this
    machine. They come in one round trip, and the rounds that deliver them are faster than later
    ones. So rounds count after all of these are delivered, or after as much time as the start took:
    by then the link or the decoding limits the pace. If epochs are so short that they are mostly
    start-up, as they then are in training, the epochs after the first count as a whole. Worker
    processes are restarted in each epoch.

    Examples
    --------
    >>> rounds = CountedRounds(n_rounds=6, n_asked=0, has_workers=False)
    >>> [rounds.counts(number, 0.1) for number in range(6)]
    [False, False, True, True, True, True]
    >>> rounds = CountedRounds(n_rounds=6, n_asked=1, has_workers=False)
    >>> [rounds.counts(number, 1.0 if number == 0 else 0.1) for number in range(6)]
    [False, False, True, True, True, True]
    >>> rounds = CountedRounds(n_rounds=3, n_asked=1, has_workers=False)
    >>> [rounds.counts(number, 0.1) for number in range(3)]
    [False, False, True]
    >>> rounds = CountedRounds(n_rounds=3, n_asked=1, has_workers=False)
    >>> [rounds.counts(number, 1.0 if number == 0 else 0.1) for number in [0, 1, 2, 0, 1, 2]]
    [False, False, False, True, True, True]
    """

    def __init__(self, *, n_rounds: int, n_asked: int, has_workers: bool) -> None:
        self._n_rounds, self._n_asked, self._has_workers = n_rounds, n_asked, has_workers
        self._n_new = 1 if n_asked else self.n_new(n_rounds, has_workers=has_workers)
        self._is_first_epoch, self._counts_whole = True, False
        self._start_seconds = self._since = 0.0
        self._has_counted = False

    @staticmethod
    def n_new(n_rounds: int, *, has_workers: bool) -> int:
        """Return how many first rounds do not count for files on this machine."""
        long = LONG_EPOCH_OF_WORKERS if has_workers else LONG_EPOCH
        return FETCHES_PREFETCHED if n_rounds >= long * FETCHES_PREFETCHED else 1

    def counts(self, number: int, seconds: float) -> bool:
        """Return whether a round counts; called once for each round, in order."""
        if number == 0:
            self._start_seconds, self._since, self._has_counted = seconds, 0.0, False
        counted = self._is_counted(number)
        self._has_counted |= counted
        if number:
            self._since += seconds
        if number == self._n_rounds - 1:
            self._is_first_epoch = False
            self._counts_whole |= not self._has_counted
        return counted

    def may_end(self, number: int) -> bool:
        """Return whether measuring may end after a round: not within an epoch that counts whole."""
        return not self._counts_whole or number == self._n_rounds - 1

    def _is_counted(self, number: int) -> bool:
        if number < self._n_new and (self._is_first_epoch or self._has_workers):
            return False
        if not self._n_asked or self._counts_whole:
            # Without workers, the first rounds of a later epoch are like any others.
            return True
        is_long = self._n_rounds >= LONG_EPOCH * (self._n_asked + 1)
        if is_long and number > self._n_asked:
            return True
        return number > 0 and self._since >= self._start_seconds
