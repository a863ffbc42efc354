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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cellfeed import Collection, Statistics
from cellfeed_tuner._constants import SLICE_SECONDS
from cellfeed_tuner._measuring._bytes_read import BytesRead, bytes_read
from cellfeed_tuner._measuring._counted_rounds import CountedRounds
from cellfeed_tuner._measuring._dropping import Dropping, closed_at_the_end, rounds_ahead
from cellfeed_tuner._measuring._events import (
    Delivery,
    Entropies,
    Infeasible,
    MakeDataset,
    Requests,
    Round,
    Sampled,
    Started,
    Step,
    TimingSettings,
)
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._measuring._session import DatasetSession, EpochTooShortError, Session
from cellfeed_tuner._measuring._side_by_side import run_side_by_side
from cellfeed_tuner._ranks._pace import Pace
from cellfeed_tuner._subject._tunable import Tunable

__all__ = [
    "SLICE_SECONDS",
    "Delivery",
    "Entropies",
    "Infeasible",
    "MakeDataset",
    "Requests",
    "Round",
    "Sampled",
    "Started",
    "Step",
    "TimingRequest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest(TimingSettings):
    """A configuration to time; see `TimingSettings`."""

    def run(
        self, subject: Collection | Selected | Tunable, report: Callable[[object], None]
    ) -> None:
        """Time it, in a process for each rank, and report each event as it happens.

        `Started` once, then each `Round`, and at the end what the session finds.
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
        deadline, n_timed = time.perf_counter() + request.seconds, 0
        for each in _rounds(session, request, report, pace):
            report(each)
            n_timed += each.counts
            late = time.perf_counter() > deadline and n_timed >= request.least_rounds
            if pace.agreed(ended=each.may_end and (late or n_timed >= request.most_rounds)):
                break
        for finding in session.findings():
            report(finding)


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
        with closed_at_the_end(minibatches):
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
