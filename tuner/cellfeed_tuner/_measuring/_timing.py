"""Timing whole fetches of one configuration, in a process of its own.

A *round* is as many minibatches as it takes for every worker to deliver one whole fetch; it is
what is timed. The first round holds the start-up, and with workers the first round of every
epoch does, so these are reported apart; so are more of them of a server (see `CountedRounds`).
Since the next fetch is under way while one is dealt out, rounds follow each other without a gap: a
pause in the clock would be time to read ahead for which nobody is charged.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cellfeed import Collection, Statistics
from cellfeed_tuner._constants import (
    FETCHES_AHEAD,
    LONG_EPOCH,
    LONG_EPOCH_OF_WORKERS,
)
from cellfeed_tuner._machine._processes import BytesRead, bytes_read
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
from cellfeed_tuner._measuring._session import DatasetSession, EpochTooShortError, Session
from cellfeed_tuner._measuring._side_by_side import Pace, run_side_by_side
from cellfeed_tuner._subject._selected import Selected
from cellfeed_tuner._subject._tunable import Tunable

__all__ = [
    "CountedRounds", "Findings", "Infeasible", "MakeDataset", "Round", "Started",
    "Step", "TimingRequest",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest(TimingSettings):
    """A configuration to time; see `TimingSettings`."""

    def run(
        self, subject: Collection | Selected | Tunable, report: Callable[[object], None]
    ) -> None:
        """Time it, in a process for each rank, and report each event as it happens.

        `Started` once, then each `Round`, and `Findings` at the end.
        """
        try:
            if self.ranks.n_local > 1:
                run_side_by_side(partial(self._run_rank, subject), self.ranks.n_local, report)
            else:
                self._run_rank(subject, 0, Pace(), report)
        except EpochTooShortError as error:
            report(Infeasible(str(error)))

    def _run_rank(
        self,
        subject: Collection | Selected | Tunable,
        rank: int,
        pace: Pace,
        report: Callable[[object], None],
    ) -> None:
        if self.ranks.n_total > 1 or {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys():
            self.ranks.become(rank)
        request = replace(self, rank=rank)
        if isinstance(subject, Tunable):
            session = Session(subject, request)
        else:
            session = DatasetSession(Selected.of(subject), request)
        timed_seconds, n_timed = 0.0, 0
        for each in _rounds(session, request, report, pace):
            report(each)
            n_timed += each.counts
            timed_seconds += each.seconds if each.counts else 0.0
            enough = timed_seconds >= request.seconds and n_timed >= request.least_rounds
            if pace.agreed(ended=each.may_end and (enough or n_timed >= request.most_rounds)):
                break
        report(session.findings())


def _rounds(
    session: Session, request: TimingRequest, report: Callable[[object], None], pace: Pace
) -> Iterator[Round]:
    """Yield one round after the other, epoch after epoch."""
    configuration, n_rounds = request.configuration, session.n_rounds
    pace.require_alike(n_rounds)
    # One drops what all have read.
    files = session.files if pace.is_first else ()
    make_cold = Dropping(files, request.cache, mapped=session.is_mapped)
    is_remote = request.cache == "remote"
    counted = CountedRounds(
        n_rounds=n_rounds, n_asked=session.n_asked, has_workers=configuration.num_workers > 0
    )
    started = False
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
        counted_before = session.statistics()
        # Dropped, cellfeed's iterator would end in a thread, while the next epoch is timed; of
        # other loaders, which may have nothing to close, dropping ends what there is.
        has_end = hasattr(minibatches, "close")
        with closing(minibatches) if has_end else nullcontext():
            for number in range(n_rounds):
                waiting_seconds = 0.0
                for place in range(configuration.minibatches_per_round):
                    wanted = time.perf_counter()
                    minibatch = next(minibatches, None)
                    waiting_seconds += time.perf_counter() - wanted
                    session.take(minibatch)
                    if minibatch is None:  # there should have been one
                        pace.leave()
                        return
                    if not started and place == 0:
                        first = time.perf_counter() - workers_there
                        report(_started(session, loader, minibatch, workers_there - start, first))
                    if request.step is not None:
                        request.step(minibatch)
                    elif request.step_seconds:
                        time.sleep(request.step_seconds)
                make_cold.after_round(n_ahead)
                waiting_seconds += pace.meet()
                end = time.perf_counter()
                read_so_far = bytes_read()
                # At the end of an epoch, nothing is left to be read ahead.
                is_counted = not is_remote and number < n_rounds - n_ahead
                read = _between(read_before, read_so_far) if is_counted else None
                read_before = read_so_far
                started = True
                counts, may_end = counted.counts(number, end - begin), counted.may_end(number)
                counted_so_far = session.statistics()
                statistics = _between(counted_before, counted_so_far)
                counted_before = counted_so_far
                yield Round(end - begin, counts, waiting_seconds, read, may_end, statistics)
                begin = end
        del minibatches


_Counted = TypeVar("_Counted", BytesRead, Statistics)


def _between(before: _Counted | None, after: _Counted | None) -> _Counted | None:
    """Return what was counted between two moments; None where one of them is not known."""
    return None if before is None or after is None else after - before


class CountedRounds:
    """Says of one round after the other whether it counts.

    The first fetches of a process go into memory that the system must clear first, and take up
    to half as long again as all later ones, which find that memory: in long epochs they do not
    count.

    So many as ``n_asked`` are asked of a server at the start of an epoch; 0 of files on this
    machine. They come in one round trip, and the rounds that deliver them take no time that a
    later one would take. So rounds count once all of these are delivered, or once as much time has
    gone by as the start took: by then it is the link or the decoding that sets the pace. Where
    epochs are so short that they are mostly start, as of any training then, later ones count as a
    whole. Worker processes are started anew in each epoch.

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
        """Return how many first rounds do not count, of files on this machine."""
        long = LONG_EPOCH_OF_WORKERS if has_workers else LONG_EPOCH
        return FETCHES_AHEAD if n_rounds >= long * FETCHES_AHEAD else 1

    def counts(self, number: int, seconds: float) -> bool:
        """Return whether a round counts; each is told of once, in order."""
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
        """Return whether measuring may end after a round: not amid an epoch that counts whole."""
        return not self._counts_whole or number == self._n_rounds - 1

    def _is_counted(self, number: int) -> bool:
        if number < self._n_new and (self._is_first_epoch or self._has_workers):
            return False
        if not self._n_asked or self._counts_whole:
            # Without workers, the first rounds of a later epoch are rounds like any others.
            return True
        is_long = self._n_rounds >= LONG_EPOCH * (self._n_asked + 1)
        if is_long and number > self._n_asked:
            return True
        return number > 0 and self._since >= self._start_seconds


def _started(
    session: Session, loader: Any, minibatch: Any, worker_seconds: float, first: float
) -> Started:
    """Return what is known with the first minibatch."""
    waiting = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
    return Started(
        worker_seconds,
        first,
        waiting * session.size_of(minibatch),
        session.n_threads,
        session.n_function_threads,
    )
