"""Timing a DataLoader in this process.

Workers are processes of their own anyway, a training step may use a GPU, which a forked process
could not, and a notebook's objects exist nowhere else. Of the dataset, as little as possible is
changed: without workers, a shallow copy is iterated over, so that files it opens on first use are
not inherited by workers later.
"""

import copy
import hashlib
import math
import multiprocessing
import pickle
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.process import BaseProcess
from typing import Any, cast

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from cellfeed import CellfeedError, ParameterError
from cellfeed.interrupts import interrupts_held
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration, workers_in_words
from cellfeed_tuner._dataloaders._remade import Epoch, remade
from cellfeed_tuner._headroom import saved_random_numbers, synchronize
from cellfeed_tuner._interval import Estimate, mean_with_interval
from cellfeed_tuner._machine import ProcessorClock
from cellfeed_tuner._measuring._process import Outcome, failure_of
from cellfeed_tuner._measuring._timing import Findings, Round, Started, Step, TimingRequest
from cellfeed_tuner._results import Waiting

# Rounds into which the time of a replicate is divided. Chosen: more than the fewest of which there
# is a throughput.
ROUNDS_OF_REPLICATE = 10
# Labels are kept of so many minibatches of a replicate. Chosen: their mean entropy is then exact
# enough.
MOST_LABELLED = 200
# Seconds for workers to end, after which they are killed. Chosen: DataLoader itself waits for 5 s.
ENDING_SECONDS = 6.0
# Least seconds without a minibatch after which workers count as hung. Chosen: workers that are not
# forked import PyTorch first.
TIMEOUT_SECONDS = 20.0
# Minibatches between the first ones of two replicates, where rows are read in order. Chosen: a
# prime number, so that any may be the first.
START_APART = 1_000_003

Labels = Callable[[Any], Any]
"""Returns the labels of a minibatch's rows."""

_NOTHING = object()
_ANY_NUMBER = 1 << 60


class LoaderTimer:
    """Times configurations of a DataLoader; to a search, it is a `MeasuringProcess`.

    A round is a slice of a replicate, in which every worker delivers as many minibatches. Its
    seconds are scaled to the rows of a round of the request. Where an epoch ends before a replicate
    does, whole epochs are timed, with the start of their workers. Otherwise the start, during which
    queues fill, is measured and distributed over the epoch, if its length is known and workers are
    started in each. Times are by the clock: how long workers waited for a processor does not say
    how long the minibatches were delayed.

    Parameters
    ----------
    loader
        The DataLoader.
    step
        Called with each minibatch; None to time the DataLoader alone.
    labels_of, label
        Returns the labels of a minibatch, and their name; None and empty without entropy.
    memory_bytes
        What workers, and this process in addition to what it has, may take.

    Attributes
    ----------
    epoch
        What is known of an epoch; the length of one that ended is added.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        step: Step | None = None,
        labels_of: Labels | None = None,
        label: str = "",
        memory_bytes: int,
    ) -> None:
        self.epoch = Epoch.of(loader)
        self._loader, self._step, self._labels_of, self._label = loader, step, labels_of, label
        self._memory_limit, self._over_memory = memory_bytes, _ANY_NUMBER
        self._replicates: dict[Configuration, list[_Replicate]] = {}

    def start(self) -> None:
        """Do nothing: this process has started."""

    def waiting(self, configuration: Configuration) -> Waiting | None:
        """Return for what share of its time training waited; None without a step."""
        replicates = self._replicates.get(configuration, ())
        counted = [(part.seconds, part.waiting) for each in replicates for part in each.counted]
        if self._step is None or not counted:
            return None
        seconds, waiting = np.array(counted).T
        share = mean_with_interval(waiting / seconds, weights=seconds)
        within = Estimate(share.value, max(0.0, share.low), min(1.0, share.high))
        return Waiting(share=within, n_rounds=seconds.size, expected_share=share.value)

    @property
    def n_by_label(self) -> Counter[Any]:
        """How often each label was seen."""
        replicates = chain.from_iterable(self._replicates.values())
        labels = [part for each in replicates for part in each.labels]
        return Counter(np.concatenate(labels).tolist() if labels else ())

    def step_seconds(self, configuration: Configuration) -> float | None:
        """Return the mean time of a training step beside the workers; None without one."""
        replicates = self._replicates.get(configuration, ())
        n_steps = sum(each.n_minibatches for each in replicates) if self._step else 0
        return sum(each.step_seconds for each in replicates) / n_steps if n_steps else None

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        """Time one replicate, until its rounds are counted or the time is up.

        A minibatch that is being loaded without workers is not cut short.
        """
        settings, memory_before = request.configuration, _own_memory()
        if settings.num_workers >= self._over_memory:
            failure = f"{workers_in_words(self._over_memory)} took more memory than is given"
            return Outcome(events=(), peak_memory_bytes=0, failure=failure)
        replicate = _Replicate(
            self._loader, request, self.epoch,
            step=self._step, labels_of=self._labels_of, limit_seconds=limit_seconds,
        )  # fmt: skip
        clock, failure = ProcessorClock(), ""
        try:
            replicate.run()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - any error belongs in the report
            failure = failure_of(error)
        memory = max(0, _own_memory() - memory_before) + replicate.worker_memory
        n = replicate.n_of_epoch
        if n and self.epoch.n_minibatches is None and not settings.num_workers:
            self.epoch = replace(self.epoch, n_minibatches=n, n_rows=n * self.epoch.batch_size)
        if not failure and memory > self._memory_limit:
            most = f"{self._memory_limit / 1e6:,.0f} MB"
            failure = f"it takes {memory / 1e6:,.0f} MB, more than the {most} that it may take"
            self._over_memory = settings.num_workers
        self._replicates.setdefault(settings, []).append(replicate)
        findings = Findings(entropies={self._label: replicate.entropies} if self._label else {})
        return Outcome(
            events=(*replicate.events, findings),
            peak_memory_bytes=memory,
            failure=failure or None,
            others=clock.others(replicate.worker_cpu_seconds),
        )


@dataclass(frozen=True, slots=True)
class _Slice:
    """Time in which ``n`` minibatches came, and what of it was waited for them."""

    n: int
    seconds: float
    waiting: float


class _Replicate:
    """One replicate of one configuration, and what was measured of it.

    Attributes
    ----------
    events
        `Started`, and each `Round`.
    labels
        Labels of the first minibatches, each of shape (n_rows,).
    counted
        The parts of the time whose rounds count.
    n_minibatches, step_seconds
        How many minibatches came, and how long all training steps took.
    n_of_epoch
        Minibatches of an epoch that ended; None if none did.
    worker_memory, worker_cpu_seconds
        What workers took.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        request: TimingRequest,
        epoch: Epoch,
        *,
        step: Step | None,
        labels_of: Labels | None,
        limit_seconds: float,
    ) -> None:
        self._loader, self._request, self._epoch = loader, request, epoch
        self._step, self._labels_of = step, labels_of
        self._limit_seconds = limit_seconds
        self._deadline = time.perf_counter() + limit_seconds
        settings = request.configuration
        self._per_round = max(1, settings.num_workers)
        # Rounds have as many rows for any batch size.
        rows = cast("int", settings.get("batch_size", epoch.batch_size))
        self._round_size = request.cells_per_round / rows
        n = epoch.n_minibatches
        self._n_expected = n and math.ceil(n * epoch.batch_size / rows)
        self.events: list[Started | Round] = [Started(0.0, 0.0, 0)]
        self.counted: list[_Slice] = []
        self.labels: list[NDArray[Any]] = []
        self.n_minibatches, self.step_seconds = 0, 0.0
        self.n_of_epoch: int | None = None
        self.worker_memory, self.worker_cpu_seconds = 0, 0.0
        self._waited, self._n_in_epoch = 0.0, 0
        self._workers: set[BaseProcess] = set()
        self._digests: list[bytes] = []

    @property
    def entropies(self) -> NDArray[np.float64]:
        """Label entropy of each labelled minibatch, in bits."""
        counts = [np.unique(each, return_counts=True)[1] for each in self.labels]
        return np.array([theory.entropy_bits(each) for each in counts])

    def run(self) -> None:
        """Measure, and end all workers."""
        before, spent = {*multiprocessing.active_children()}, _cpu_seconds_of_ended()
        loader = self._made()
        try:
            if not self._time_slices(loader, before):
                self._time_epochs(loader)
            if self.counted:  # what does not count is part of no epoch, or of others
                self.events = [e for e in self.events if not isinstance(e, Round) or e.counts]
        except BaseException as error:
            with interrupts_held():
                # Frames hold the iterator, and with it the workers.
                traceback.clear_frames(error.__traceback__)
            raise
        finally:
            with interrupts_held():
                del loader
                _end({*multiprocessing.active_children()} - before)
                self._workers = set()  # which hold open files
            ended = _cpu_seconds_of_ended() - spent
            self.worker_cpu_seconds = max(self.worker_cpu_seconds, ended)

    def _made(self) -> DataLoader[Any]:
        settings, loader = self._request.configuration, self._loader
        changed: dict[str, Any] = dict(settings)
        if not settings.num_workers:
            changed["dataset"] = _copied(loader.dataset)
        elif not loader.timeout:
            changed["timeout"] = max(TIMEOUT_SECONDS, self._limit_seconds)
        if type(loader.sampler) is SequentialSampler and loader.batch_size and len(loader):
            # The first rows would soon be in the page cache.
            start = START_APART * self._request.number % len(loader) * loader.batch_size
            changed["sampler"] = _Onwards(len(loader.sampler), start)
        return remade(loader, **changed)

    def _time_slices(self, loader: DataLoader[Any], before: set[BaseProcess]) -> bool:
        """Time slices of an epoch; return False if it ends before there are enough."""
        request, slices, counted_seconds = self._request, list[_Slice](), 0.0
        begin = at = time.perf_counter()
        first_seconds, start = 0.0, None
        starts_again = loader.num_workers > 0 and not loader.persistent_workers
        # Minibatches that may be ready when the first one comes.
        n_ready, n = self._per_round * (loader.prefetch_factor or 1), 0
        with closing(self._minibatches(loader)) as minibatches:
            for came in minibatches:
                n += 1
                if not first_seconds:
                    first_seconds = came - begin
                    # However long workers took to start, something is measured.
                    self._deadline = max(self._deadline, came + 2 * request.seconds)
                    self._workers = {*multiprocessing.active_children()} - before
                    looked = time.perf_counter()
                    self._look_at_workers()
                    begin += time.perf_counter() - looked
                is_late = came > self._deadline
                is_whole = n % self._per_round == 0
                if start is None:
                    is_over = n >= n_ready or came - begin >= 2 * first_seconds
                else:
                    is_over = came - at >= request.seconds / ROUNDS_OF_REPLICATE
                if not (is_whole and is_over) and not is_late:
                    continue
                synchronize()
                found = _Slice(n, time.perf_counter() - at, self._waited)
                if start is None:
                    start = found
                elif is_whole:
                    slices.append(found)
                    counted_seconds += found.seconds
                n_rounds = sum(each.n for each in slices) / self._round_size
                is_enough = counted_seconds >= request.seconds and n_rounds >= request.least_rounds
                if is_enough or is_late:
                    self._look_at_workers()
                    self._report(start, slices, starts_again=starts_again)
                    return True
                at, self._waited, n = time.perf_counter(), 0.0, 0
        # Where workers start again, this epoch is like all others.
        self._end_epoch(time.perf_counter() - begin, counts=starts_again)
        return False

    def _time_epochs(self, loader: DataLoader[Any]) -> None:
        """Time whole epochs, until there are enough of them."""
        request = self._request
        while time.perf_counter() < self._deadline:
            n_rounds = sum(isinstance(each, Round) and each.counts for each in self.events)
            counted_seconds = sum(each.seconds for each in self.counted)
            if counted_seconds >= request.seconds and n_rounds >= request.least_rounds:
                return
            begin = time.perf_counter()
            with closing(self._minibatches(loader)) as minibatches:
                for now in minibatches:
                    if now > self._deadline:
                        return
            synchronize()
            self._end_epoch(time.perf_counter() - begin, counts=True)

    def _minibatches(self, loader: DataLoader[Any]) -> Generator[float]:
        """Yield the time when each minibatch of an epoch has come and was trained on."""
        self._waited, self._n_in_epoch, wanted = 0.0, 0, time.perf_counter()
        with interrupts_held():  # which would be lost in a fork
            minibatches = iter(loader)
        try:
            while (minibatch := next(minibatches, _NOTHING)) is not _NOTHING:
                self._waited += time.perf_counter() - wanted
                self._n_in_epoch += 1
                self.n_minibatches += 1
                self._take(minibatch)
                wanted = time.perf_counter()
                yield wanted
            self._waited += time.perf_counter() - wanted
        finally:
            with interrupts_held():  # which would be lost while an object is deleted
                del minibatches

    def _take(self, minibatch: Any) -> None:
        """Take the labels of a minibatch, and train on it."""
        self._require_division(minibatch)
        if self._labels_of is not None and len(self.labels) < MOST_LABELLED:
            self.labels.append(_labels(self._labels_of, minibatch))
        if self._step is not None:
            began = time.perf_counter()
            try:
                self._step(minibatch)
            except Exception as error:
                raise StepError(f"`step` failed: {_said(error)}") from error
            self.step_seconds += time.perf_counter() - began

    def _report(self, start: _Slice, slices: Sequence[_Slice], *, starts_again: bool) -> None:
        """Report the rounds of all slices, each with its share of the start of an epoch."""
        n, n_of_epoch = sum(each.n for each in slices), self._n_expected
        usual = sum(each.seconds for each in slices) / n if n else start.seconds / start.n
        extra = max(0.0, start.seconds - start.n * usual)
        share = extra / n_of_epoch if n_of_epoch and starts_again else 0.0
        self._add_rounds(_Slice(1, usual, 0.0))
        for each in slices:
            self._add_rounds(each, share=share, counts=True)

    def _end_epoch(self, seconds: float, *, counts: bool) -> None:
        """Report the rounds of a whole epoch."""
        n, known = self._n_in_epoch, self._n_expected
        num_workers = self._request.configuration.num_workers
        if not n and num_workers:
            raise RuntimeError("an epoch has no minibatch: each worker has too few rows")
        if not n:
            msg = f"{type(self._loader).__name__} delivers no minibatch"
            if self.n_of_epoch:
                msg += " in its second epoch; what can be read only once cannot be tuned"
            raise ParameterError(msg)
        if self._epoch.is_iterable and known and n > known + max(0, num_workers - 1):
            fact = f"{num_workers} workers deliver {n} minibatches in place of {known}"
            raise RepeatedRowsError(fact)
        self.n_of_epoch = n
        self._add_rounds(_Slice(n, seconds, self._waited), counts=counts)

    def _add_rounds(self, part: _Slice, *, share: float = 0.0, counts: bool = False) -> None:
        """Report some time as rounds, one if it does not count; add a share to each minibatch."""
        n_rounds = max(1, round(part.n / self._round_size)) if counts else 1
        seconds, waiting = part.seconds / part.n + share, part.waiting / part.n + share
        each = Round(seconds * self._round_size, counts, waiting * self._round_size, None)
        self.events += [each] * n_rounds
        self.counted += [part] * counts

    def _require_division(self, minibatch: Any) -> None:
        """Refuse workers of which the first two deliver the same first minibatch.

        If the first of them delivers it twice, minibatches are all alike.
        """
        place, num_workers = self.n_minibatches - 1, self._request.configuration.num_workers
        if not self._epoch.is_iterable or num_workers < 2 or place > num_workers:  # noqa: PLR2004
            return
        if place not in {0, 1, num_workers}:
            return
        with suppress(Exception):  # it is of an unknown kind
            self._digests.append(hashlib.sha256(b"".join(_bytes_of(minibatch))).digest())
        if len(self._digests) == 3 and self._digests[0] == self._digests[1] != self._digests[2]:  # noqa: PLR2004
            raise RepeatedRowsError(f"the first minibatches of {num_workers} workers are the same")

    def _look_at_workers(self) -> None:
        """Note the memory and the processor time of the workers."""
        memory, cpu_seconds = 0, 0.0
        for each in self._workers:
            with suppress(psutil.Error):
                process = psutil.Process(each.pid)
                memory += int(process.memory_full_info().uss)
                cpu_seconds += sum(process.cpu_times()[:2])
        self.worker_memory = max(self.worker_memory, memory)
        self.worker_cpu_seconds = max(self.worker_cpu_seconds, cpu_seconds)


class StepError(ParameterError):
    """The training step failed."""


class RepeatedRowsError(RuntimeError):
    """Each worker delivers all rows, or rows of others."""

    def __init__(self, fact: str) -> None:
        super().__init__(
            f"{fact}: the dataset does not divide its rows among workers; divide them by "
            "torch.utils.data.get_worker_info() in `__iter__`"
        )


class _Onwards(Sampler[int]):
    """Rows in order, from another one on."""

    def __init__(self, n_rows: int, start: int) -> None:
        self._n_rows, self._start = n_rows, start

    def __len__(self) -> int:
        return self._n_rows

    def __iter__(self) -> Iterator[int]:
        yield from range(self._start, self._n_rows)
        yield from range(self._start)


@contextmanager
def random_states_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the states of random generators, the global ones and those of a DataLoader."""
    samplers = [loader, loader.sampler, loader.batch_sampler]
    samplers.append(getattr(loader.batch_sampler, "sampler", None))
    own = {id(g): g for g in (getattr(s, "generator", None) for s in samplers)}
    generators = [each for each in own.values() if isinstance(each, torch.Generator)]
    states, restore = [each.get_state() for each in generators], saved_random_numbers()
    try:
        yield
    finally:
        restore()
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, and of those within it; others as they are."""
    if not isinstance(dataset, Dataset):
        return dataset
    try:
        copied = copy.copy(dataset)
        for name, value in vars(copied).items():
            if isinstance(value, Dataset):
                vars(copied)[name] = _copied(value)
            elif isinstance(value, list) and any(isinstance(each, Dataset) for each in value):
                vars(copied)[name] = list(map(_copied, value))
    except Exception:  # noqa: BLE001 - whatever its own way of copying raises
        return dataset
    return copied


def _labels(labels_of: Labels, minibatch: Any) -> NDArray[Any]:
    try:
        found = np.asarray(labels_of(minibatch)).ravel()
    except Exception as error:
        msg = f"`label` gives no labels of a {type(minibatch).__name__}: {_said(error)}"
        raise ParameterError(msg) from error
    if not found.size or not all(
        isinstance(each, bool | int | float | str) for each in found.tolist()
    ):
        msg = f"`label` must give a number or a word for each row, but gave {found!r:.60}"
        raise ParameterError(msg)
    return found.copy()


def _bytes_of(minibatch: Any) -> Iterator[bytes]:
    """Yield the bytes of all parts of a minibatch."""
    if isinstance(minibatch, Mapping):
        minibatch = list(minibatch.values())
    if isinstance(minibatch, list | tuple):
        for each in minibatch:
            yield from _bytes_of(each)
    elif isinstance(minibatch, torch.Tensor | np.ndarray):
        yield np.asarray(minibatch).tobytes()
    else:
        yield pickle.dumps(minibatch)


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _own_memory() -> int:
    return int(psutil.Process().memory_info().rss)


def _cpu_seconds_of_ended() -> float:
    """Return the processor time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(workers: set[BaseProcess]) -> None:
    """Wait for the end of workers, which was asked for; kill those that do not end."""
    deadline = time.monotonic() + ENDING_SECONDS
    for each in workers:
        each.join(max(0.0, deadline - time.monotonic()))
        if each.is_alive():
            each.kill()
            each.join(ENDING_SECONDS)
