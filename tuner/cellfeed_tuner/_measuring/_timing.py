"""Timing whole fetches of one configuration, in a process of its own.

A *round* is as many minibatches as it takes for every worker to deliver one whole fetch; rounds
are timed. The first round contains the start-up, and with workers the first round of every epoch
does, so these are reported separately, as are further ones of a server (see `CountedRounds`).
Since the next fetch is read while one is delivered, rounds follow each other without a gap: a
pause in the clock would be unpaid time to read ahead.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cellfeed import Collection, Statistics
from cellfeed_tuner._constants import (
    FETCHES_AHEAD,
    LONG_EPOCH,
    LONG_EPOCH_OF_WORKERS,
)
from cellfeed_tuner._machine._processes import (
    BytesRead,
    Progressed,
    bytes_read,
    processor_time_between,
    thread_times,
)
from cellfeed_tuner._measuring._dropping import Dropping, rounds_ahead
from cellfeed_tuner._measuring._events import (
    Findings,
    Infeasible,
    MakeDataset,
    Round,
    Started,
    Step,
    TimingSettings,
)
from cellfeed_tuner._measuring._pace import Pace
from cellfeed_tuner._measuring._session import DatasetSession, EpochTooShortError, Session
from cellfeed_tuner._subject._selected import Selected
from cellfeed_tuner._subject._tunable import Tunable

__all__ = [
    "CountedRounds", "Findings", "Infeasible", "MakeDataset", "Round", "Started",
    "Step", "TimingRequest",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest(TimingSettings):
    """A configuration to time; see `TimingSettings`."""

    def parts(self) -> "list[TimingRequest]":
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
            self.ranks.become(self.rank)
        if isinstance(subject, Tunable):
            session = Session(subject, self)
        else:
            session = DatasetSession(Selected.of(subject), self)
        counted_seconds, n_counted = 0.0, 0
        for each in _rounds(session, self, report):
            report(each)
            n_counted += each.counts
            counted_seconds += each.seconds if each.counts else 0.0
            enough = counted_seconds >= self.seconds and n_counted >= self.least_rounds
            if self.pace.agreed(ended=each.may_end and (enough or n_counted >= self.most_rounds)):
                break
        report(session.findings())


def _rounds(
    session: Session, request: TimingSettings, report: Callable[[object], None]
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
    has_started, n_minibatches = False, 0
    while True:
        make_cold.before_epoch()
        pace.meet()
        begin = start = time.perf_counter()
        loader = session.begin_epoch()
        minibatches = iter(loader)
        workers_there = time.perf_counter()
        n_ahead = rounds_ahead(loader, configuration.minibatches_per_round)
        n_ahead += not pace.is_alone  # others may have begun with the next one
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
                    report(Progressed(n_minibatches))
                    if not has_started:
                        has_started = True
                        size = session.size_of(minibatch)
                        seconds = workers_there - start, came - workers_there
                        report(_started(session, loader, size, *seconds))
                    if request.step is not None:
                        request.step(minibatch)
                    elif request.step_seconds:
                        time.sleep(request.step_seconds)
                make_cold.after_round(n_ahead)
                waiting_seconds += pace.meet()
                end = time.perf_counter()
                read_so_far, counted_so_far = bytes_read(), session.statistics()
                times_so_far = thread_times()
                # At the end of an epoch, nothing is left to be read ahead.
                is_known = request.cache != "remote" and number < n_rounds - n_ahead
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


def _started(
    session: Session, loader: Any, minibatch_bytes: int, worker_seconds: float, first: float
) -> Started:
    waiting = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
    return Started(
        worker_seconds,
        first,
        waiting * minibatch_bytes,
        session.n_threads,
        session.n_function_threads,
    )


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
        return FETCHES_AHEAD if n_rounds >= long * FETCHES_AHEAD else 1

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
