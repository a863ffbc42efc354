"""The next epoch and its start, and how much of the current one the consumer has received."""

import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeAlias

from cellfeed._dataset._epochs import Claim, EpochCounter, Ticket, wait_for_dropped
from cellfeed._dataset._ranks import Beginning, Clock, RanksCompared
from cellfeed._dataset._statistics import StatisticsHistory
from cellfeed._dataset._trainers import n_taken_ahead
from cellfeed._decode import Counter, Counters
from cellfeed._errors import DeliveryError, StateError
from cellfeed._torch import get_worker_info, torch
from cellfeed.sampling import Progress

# Makes the plan of an epoch on this rank from `epoch` and `after`: an `EpochPlan`, or that of
# interleaved datasets, with its seed, its shares for workers and numbers of minibatches.
PlanOf: TypeAlias = Callable[..., Any]
_N_EARLIER = 8  # iterations that may be the training loop, behind looks of a rank by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in a run, at which it can be stopped and resumed.

    Parameters
    ----------
    epoch
        The epoch.
    after
        How far the epoch had come each time that it was divided again.
    progress
        How far it has come since.
    worker
        The worker process whose minibatches ``progress`` counts; None if it counts those of all
        workers of a rank.
    """

    epoch: int = 0
    after: tuple[Progress, ...] = ()
    progress: Progress = field(default_factory=Progress)
    worker: int | None = None

    @property
    def n_minibatches(self) -> int:
        """Number of minibatches of the epoch that were delivered before."""
        return sum(each.n_minibatches for each in (*self.after, self.progress))


@dataclass(slots=True, eq=False, kw_only=True)
class Counted:
    """An iteration that counts the minibatches its consumer receives.

    Parameters
    ----------
    start
        Position where it begins.
    n_left
        Number of minibatches from there to the end of the epoch.
    counters
        Counters of minibatches and of waiting times.
    resumes
        Whether it begins where the epoch was stopped.
    run, n_resumed
        The run that it belongs to, and how often that was resumed before.
    begun, group, n_elsewhere
        Where it began, if it is compared with other ranks, the group of these, and the collectives
        in other groups; None where nothing is trained.
    history
        Called after each minibatch; None in worker processes.
    log
        Called after each minibatch.
    n_ahead
        Number of minibatches that its consumer takes before the training loop asks for them.
    """

    start: Position
    n_left: int
    counters: Counters
    resumes: bool
    # A reference cycle would keep the shared memory open until garbage is collected; and a
    # `WeakMethod` would run Python code where the dataset is dropped.
    run: "weakref.ref[Run]"
    n_resumed: int
    begun: Beginning | None = None
    group: Any = None
    n_elsewhere: int | None = None
    history: Callable[[], object] | None = None
    log: Callable[[], object] | None = None
    n_ahead: int = 0
    n_delivered: int = 0
    has_ended: bool = False
    is_closed: bool = False
    is_trained: bool = False  # it is complete, or ranks had a collective during it
    trained_at: Clock | None = None  # the clock when that was published

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self.start.epoch

    @property
    def n_before(self) -> int:
        """Number of minibatches of the epoch that were delivered before it."""
        return self.start.n_minibatches

    @property
    def is_complete(self) -> bool:
        """Whether all of it was delivered; a single minibatch may be all that a look takes."""
        return self.has_ended or self.n_delivered == self.n_left > 1

    @property
    def is_over(self) -> bool:
        """Whether no more of it can be delivered."""
        return self.is_closed or self.n_delivered == self.n_left

    @property
    def position(self) -> Position:
        """Position of the training loop; after the last minibatch, the start of the next epoch."""
        n = self.n_delivered - (0 if self.has_ended else min(self.n_ahead, self.n_delivered))
        if self.start.worker is None and n == self.n_left:
            return Position(epoch=self.epoch + 1)
        progress = self.start.progress
        n += progress.n_minibatches
        return replace(self.start, progress=replace(progress, n_minibatches=n))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Close it if it fails before it counts."""
        try:
            yield
        except BaseException:
            self.is_closed = True
            raise

    def counting(
        self, minibatches: Iterator[Any], *, remedy: str = "please report this"
    ) -> Generator[Any, None, None]:
        """Yield minibatches without keeping the last, and measure waiting and training times.

        Raises
        ------
        DeliveryError
            There were fewer minibatches than expected; the message names the remedy.
        """
        now = time.perf_counter_ns()
        try:
            while True:
                try:
                    with self.counters.range_of("waiting"):
                        delivered = [next(minibatches)]
                except StopIteration:
                    break
                before, now = now, time.perf_counter_ns()
                self.counters.add(Counter.WAITING, now - before)
                self.counters.add(Counter.MINIBATCHES, 1)
                _warn_of_doubts(self.counters)
                self.n_delivered += 1
                try:
                    self._record()
                    if self.history is not None:
                        self.history()
                    if self.log is not None:
                        self.log()
                except BaseException:
                    self.n_delivered -= 1  # its consumer does not receive it
                    raise
                yield delivered.pop()
                before, now = now, time.perf_counter_ns()
                self.counters.add(Counter.TRAINING, now - before)
        finally:
            self.is_closed = True
            if isinstance(minibatches, Generator):
                minibatches.close()
        self.has_ended = True
        self._record()
        if self.n_delivered != self.n_left:
            msg = (
                f"the epoch ended after {self.n_delivered:,} of {self.n_left:,} minibatches; "
                f"{remedy}"
            )
            raise DeliveryError(msg)

    def _record(self) -> None:
        run = self.run()
        if run is not None:
            run.record(self)


_DOUBTS = (
    "{:,} values so far are -1 or less, of which `Log1p` is NaN or -infinity; if they are scaled",
    (
        "in {:,} of the cells so far, the values do not add up to an integer, as counts do; if "
        "`NormalizeTotal` gets values that are normalized or log-transformed"
    ),
)
_REMEDY = " already, leave it out, or read counts, such as `layers/counts`"


def _warn_of_doubts(counters: Counters) -> None:
    """Warn once of each kind of values that may not be counts."""
    for kind, n in enumerate(counters.doubts):
        if n and kind not in counters.has_warned_of:
            counters.has_warned_of.add(kind)
            warnings.warn(_DOUBTS[kind].format(n) + _REMEDY, UserWarning, stacklevel=3)


class Run:
    """The consecutive epochs of a dataset, the first of which may be resumed.

    Each iteration is the next epoch. Among ranks that are compared, one that was broken off counts
    only if ranks trained together in it, so that one rank may look at minibatches by itself.

    Parameters
    ----------
    counters
        Counters of delivered minibatches and of waiting times.
    compared
        The ranks that train together.
    """

    def __init__(self, counters: Counters, compared: RanksCompared) -> None:
        self._counters = counters
        self._compared = compared
        self._counter = EpochCounter()
        self._next = self._counter.next  # as this process left it
        self._stopped: Position | None = None
        self._latest: Counted | None = None
        self._earlier: list[Counted] = []  # the latest before it, last the latest
        self._wanted: Claim | None = None
        self.n_resumed = 0
        # After each minibatch of this process.
        self.history: StatisticsHistory | None = None
        self.log: Callable[[], object] | None = None
        # Since the epoch was last set: where it was set to, which epoch was trained last, and what
        # else began.
        self._first = self._next
        self._trained: int | None = None
        self._untrained: list[Counted] = []
        self._to_compare: Counted | None = None

    @property
    def is_resumed(self) -> bool:
        """Whether the next iteration resumes an epoch."""
        return bool(self._counter.next.resumes)

    @property
    def n_resumed_after(self) -> int:
        """After how many of its minibatches the next iteration resumes an epoch; else 0."""
        return self._stopped.n_minibatches if self.is_resumed and self._stopped else 0

    @property
    def is_at_end(self) -> bool:
        """Whether the last minibatch of an iteration was delivered, and no other since."""
        return self._latest is not None and self._latest.n_delivered == self._latest.n_left

    def discarded_by(self, epoch: int) -> Position | None:
        """Return where the next iteration resumes another epoch; None if it does not."""
        self._count_trained()
        upcoming = self._counter.next
        return self._stopped if upcoming.resumes and upcoming.epoch != epoch else None

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch, from its start.

        If this epoch is about to be resumed and none of it was delivered, it is still resumed.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, is negative or is too large.
        """
        self._count_trained()
        is_resumed = self.n_resumed and Claim(epoch, self.n_resumed) in (
            self._counter.next,
            self._resumed_untouched,
        )
        if not is_resumed:
            self._latest, self._earlier = None, []
            self._set_next(Claim(epoch))

    def resume(self, position: Position) -> None:
        """Make the next iteration resume at a position."""
        self._latest, self._earlier, self._stopped = None, [], position
        self.n_resumed += 1
        claim = Claim(position.epoch, self.n_resumed)
        if get_worker_info() is None:
            self._set_next(claim)
        else:  # of a loader that saves and restores each of its workers
            self._wanted = claim

    @property
    def position(self) -> Position:
        """Position of the consumer.

        Raises
        ------
        StateError
            Minibatches were delivered by worker processes that this process does not count.
        """
        upcoming = self._counter.next
        if get_worker_info() is None and upcoming != self._next:
            msg = (
                "the minibatches came from a DataLoader that does not count them; iterate over "
                "`dataset.loader(...)` or a torchdata StatefulDataLoader, and call its "
                "`state_dict`"
            )
            raise StateError(msg)
        trained = self._trained_now()
        if trained is not None:
            return trained.position
        if self._latest is not None:  # this rank has only looked at minibatches
            upcoming = self._upcoming(self._decide()[0])
        if upcoming.resumes and self._stopped is not None:
            return self._stopped
        return Position(epoch=upcoming.epoch)

    @property
    def n_of_epoch(self) -> int:
        """Number of minibatches on this rank of a resumed epoch; 0 unless one is under way."""
        latest = self._latest
        if latest is None or not latest.resumes or self.is_at_end:
            return 0
        return latest.n_before + latest.n_left

    def begin(self, plan_of: PlanOf) -> tuple[Any, Counted]:
        """Begin an iteration of this process, and return its share of the epoch.

        Raises
        ------
        StateError
            It would resume at the position of another worker process.
        """
        worker = get_worker_info()
        if worker is None:
            self._require_same(self._to_compare)
            self._count_trained()
            return self._begin_claimed(plan_of, 0, 1, self._counter.claim())
        claim, self._wanted = self._counter.claim(self._wanted), None
        return self._begin(plan_of, worker.id, worker.num_workers, claim)

    def begin_for_workers(
        self, plan_of: PlanOf, latest: Ticket | None, num_workers: int
    ) -> tuple[Ticket, Counted]:
        """Begin an iteration of worker processes; see `EpochCounter.claim_for_workers`."""
        self._require_same(self._to_compare)
        self._count_trained()
        ticket, claim = self._counter.claim_for_workers(latest)
        return ticket, self._begin_claimed(plan_of, None, num_workers, claim, ticket)[1]

    def record(self, counted: Counted) -> None:
        """Record the delivering iteration, unless the run was resumed again since it began.

        Raises
        ------
        ParameterError
            Ranks train together that have begun different epochs.
        """
        if counted.n_resumed == self.n_resumed:
            self._make_latest(counted)
            self._to_compare = counted
        begun = self._comparable(counted)
        if begun is None:
            counted.is_trained = counted.is_complete
            return
        if counted.n_delivered > 1 or counted.has_ended:
            self._compared.warn_of_own_later(begun)
        clock = self._compared.clock
        if not counted.is_trained and (counted.is_complete or clock != begun.clock):
            counted.is_trained, counted.trained_at = True, clock
            self._compared.begin(begun, is_trained=True)
        n = counted.n_delivered
        if counted.is_complete or n & (n - 1) == 0:  # often at first
            self._require_same(counted)
        if counted.has_ended and counted.trained_at == clock:  # nor did others know of it
            self._compared.warn_of_others(begun)

    def _begin_claimed(
        self,
        plan_of: PlanOf,
        worker: int | None,
        num_workers: int,
        claim: Claim,
        ticket: Ticket | None = None,
    ) -> tuple[Any, Counted]:
        """Begin an iteration that this process consumes, or leave its epoch to the next one."""
        try:
            return self._begin(plan_of, worker, num_workers, claim)
        except BaseException:
            self._counter.withdraw(claim, ticket)
            raise
        finally:
            self._next = self._counter.next

    def _begin(
        self, plan_of: PlanOf, worker: int | None, num_workers: int, claim: Claim
    ) -> tuple[Any, Counted]:
        """Return the share and the count of a worker, or of all workers if it is None."""
        if claim.resumes not in (0, self.n_resumed):
            msg = (
                "a state was loaded after these worker processes had started, which do not know "
                "it; make the DataLoader again, or iterate over `dataset.loader(...)`"
            )
            raise StateError(msg)
        stopped = self._stopped if claim.resumes and self._stopped is not None else Position()
        plan, last = plan_of(epoch=claim.epoch, after=stopped.after), stopped.progress
        n_before = last.n_minibatches
        # The only worker of a rank has delivered all of its minibatches.
        n_ranks = last.world_size if last.num_workers > 1 else plan.world_size
        if n_before and (last.world_size, last.num_workers) != (plan.world_size, num_workers):
            plan, n_before = plan_of(epoch=claim.epoch, after=(*stopped.after, last)), 0
        if stopped.worker is None:
            share = plan.share(worker=worker or 0, num_workers=num_workers, n_delivered=n_before)
        elif (stopped.worker, last.num_workers, n_ranks) == (worker, num_workers, plan.world_size):
            share = plan.share_of_worker(
                worker=worker, num_workers=num_workers, n_delivered=n_before
            )
        else:
            msg = (
                f"the state is of worker {stopped.worker} of {last.num_workers} on one of "
                f"{last.world_size} ranks, but this is worker {worker} of {num_workers} on one of "
                f"{plan.world_size}; use as many as before"
            )
            raise StateError(msg)
        is_counted_alone = get_worker_info() is not None
        counted = Counted(
            start=Position(
                epoch=claim.epoch,
                after=plan.after,
                progress=Progress(
                    world_size=plan.world_size,
                    num_workers=num_workers,
                    n_minibatches=share.n_delivered if is_counted_alone else n_before,
                ),
                worker=worker if is_counted_alone else None,
            ),
            n_left=share.n_minibatches if is_counted_alone else plan.n_minibatches - n_before,
            # A worker hands over to a loader in another process, which waits for others too.
            counters=Counters() if is_counted_alone else self._counters,
            resumes=bool(claim.resumes),
            run=weakref.ref(self),
            n_resumed=self.n_resumed,
            history=None if is_counted_alone else self.history,
            log=None if is_counted_alone else self.log,
            n_ahead=n_taken_ahead(),
        )
        self._make_latest(counted)
        if not is_counted_alone:
            self._to_compare = counted
            self._untrained.append(counted)
            clock = self._compared.clock
            if clock is not None:
                counted.begun = Beginning(clock, counted.epoch, counted.n_before, plan.seed)
                counted.group = self._compared.group
                if torch.is_grad_enabled():
                    counted.n_elsewhere = self._compared.n_elsewhere
                self._compared.begin(counted.begun)
        return share, counted

    @property
    def _resumed_untouched(self) -> Claim | None:
        """The claim of the latest iteration, if it resumed an epoch and delivered nothing.

        A thread that waits for its first minibatch will have it.
        """
        latest = self._latest
        if latest is None or not latest.resumes or latest.n_delivered or latest.has_ended:
            return None
        if latest.is_closed:
            return Claim(latest.epoch, self.n_resumed)
        return None

    def _make_latest(self, counted: Counted) -> None:
        latest = self._latest
        if latest is not None and latest is not counted:
            others = [each for each in self._earlier if each is not counted]
            self._earlier = [*others, latest][-_N_EARLIER:]
        self._latest = counted

    def _trained_now(self) -> Counted | None:
        """Return the latest iteration that is not a look of this rank alone, if there is one."""
        each, earlier = self._latest, [*self._earlier]
        while each is not None and self._is_look(each, earlier):
            each = earlier.pop() if earlier else None
        return each

    def _is_look(self, counted: Counted, earlier: Sequence[Counted]) -> bool:
        """Return whether this rank takes minibatches by itself, after some earlier iterations."""
        begun = self._comparable(counted)
        if counted.is_trained or begun is None:
            return False
        wait_for_dropped()
        if begun.clock != self._compared.clock:
            return not self._was_trained(counted)
        if counted.is_closed:  # others may have begun it as well
            return counted.n_delivered <= 1
        # It has just begun: a training loop, unless one goes on beside it.
        return any(each.is_trained and not each.is_over for each in earlier)

    def _comparable(self, counted: Counted) -> Beginning | None:
        """Return where an iteration began, if other ranks may have begun it."""
        if counted.begun is None or counted.group is not self._compared.group:
            return None
        return counted.begun

    def _require_same(self, counted: Counted | None) -> None:
        """Check that ranks which trained together in an iteration began the same.

        Raises
        ------
        ParameterError
            They did not.
        """
        begun = None if counted is None else self._comparable(counted)
        if counted is None or begun is None:
            return
        # All ranks have published theirs before the next collective, so that all find the same.
        if counted.is_trained and counted.trained_at != self._compared.clock:
            self._to_compare = None  # it is said once
            self._compared.require_same(begun)
            self._to_compare = counted

    def _count_trained(self) -> None:
        """Make the next iteration the one after those that count."""
        for each in self._untrained:
            begun = self._comparable(each)
            if begun is not None and each.n_elsewhere is not None and each.is_over:
                self._compared.warn_of_other_groups(begun, each.n_elsewhere)
        if self._counter.next != self._next:  # workers of another DataLoader began epochs
            self._set_next(self._counter.next)
        self._trained, self._untrained = self._decide()
        upcoming = self._upcoming(self._trained)
        if upcoming != self._next:
            self._counter.set_next(upcoming)
            self._next = upcoming

    def _decide(self) -> tuple[int | None, list[Counted]]:
        """Return which epoch was trained last, and the iterations that may still be trained."""
        trained, undecided = self._trained, list[Counted]()
        clocks = {each.begun.clock for each in self._untrained if each.begun and each.is_trained}
        for each in self._untrained:
            is_beside = each.begun is not None and each.begun.clock in clocks
            if each.is_trained or (not is_beside and self._was_trained(each)):
                trained = max(each.epoch, trained or 0)
            elif not each.is_closed:  # it may still be
                undecided.append(each)
        return trained, undecided

    def _upcoming(self, trained: int | None) -> Claim:
        """Return the claim after the iterations that count.

        Among ranks, these are the ones in which they trained; otherwise all that began, except for
        a resumed one that delivered nothing.
        """
        if self._compared.clock is not None:
            return self._first if trained is None else Claim(trained + 1)
        return self._resumed_untouched or self._counter.next

    def _was_trained(self, counted: Counted) -> bool:
        """Return whether an iteration counts: ranks trained in it, not one of them alone."""
        begun = self._comparable(counted)
        if begun is None:  # there was only this rank, or its group is gone
            return counted.begun is not None and counted.n_delivered > 1
        if counted.n_delivered <= 1 and begun.clock == self._compared.clock:
            return False
        have_begun = self._compared.have_begun(begun)
        # If others may still come to it: a collective during it is of a training loop.
        return not counted.is_closed if have_begun is None else have_begun

    def _set_next(self, claim: Claim) -> None:
        self._counter.set_next(claim)
        self._next = self._first = self._counter.next
        self._trained, self._untrained = None, []

    def __getstate__(self) -> dict[str, Any]:
        counter, upcoming = self._counter, self._counter.next
        if upcoming == self._next:
            upcoming = self._upcoming(self._decide()[0])
        if get_spawning_popen() is None:
            counter = EpochCounter(upcoming)
        return self.__dict__ | {
            "_counter": counter,
            "_next": counter.next,
            "_first": upcoming,
            "_trained": None,
            "_latest": None,
            "_earlier": [],
            "_to_compare": None,
            "_untrained": [],
            "history": None,
            "log": None,
        }
