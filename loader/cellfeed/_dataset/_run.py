"""The next epoch and its start, and how much of the current one the consumer has received."""

import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from cellfeed._dataset._epochs import Claim, EpochCounter, Start
from cellfeed._dataset._ranks import Beginning, RanksCompared
from cellfeed._decode import Counter, Counters
from cellfeed._errors import DeliveryError, StateError
from cellfeed._torch import get_worker_info
from cellfeed.sampling import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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


class ShareLike(Protocol):
    """A worker's share of an epoch."""

    @property
    def n_delivered(self) -> int:
        """Number of minibatches that it has already delivered."""
        ...

    @property
    def n_minibatches(self) -> int:
        """Number of remaining minibatches."""
        ...


S = TypeVar("S", bound=ShareLike)
S_co = TypeVar("S_co", bound=ShareLike, covariant=True)


class Divided(Protocol[S_co]):
    """An epoch on this rank, divided among workers; see `EpochPlan`."""

    @property
    def seed(self) -> Any: ...
    @property
    def world_size(self) -> int: ...
    @property
    def after(self) -> tuple[Progress, ...]: ...
    @property
    def n_minibatches(self) -> int: ...

    def share(self, *, worker: int, num_workers: int, n_delivered: int) -> S_co:
        """Return the share of a worker after ``n_delivered`` minibatches of all workers."""
        ...

    def share_of_worker(self, *, worker: int, num_workers: int, n_delivered: int) -> S_co:
        """Return the share of a worker after ``n_delivered`` minibatches of its own."""
        ...


class PlanOf(Protocol[S_co]):
    """Makes the plan of an epoch on this rank."""

    def __call__(self, *, epoch: int, after: tuple[Progress, ...]) -> Divided[S_co]:
        """Return the plan."""
        ...


class Counted:
    """An iteration that counts the minibatches its consumer receives.

    Parameters
    ----------
    place
        Position where it begins.
    n_left
        Number of minibatches from there to the end of the epoch.
    counters
        Counters of minibatches and of waiting times.
    goes_on
        Whether it begins where the epoch was stopped.
    on_delivery
        Called with this iteration before each minibatch is delivered, and at its end.
    """

    def __init__(
        self,
        place: Place,
        n_left: int,
        counters: Counters,
        *,
        goes_on: bool = False,
        on_delivery: Callable[["Counted"], None] | None = None,
    ) -> None:
        self._begin = place
        self._counters = counters
        self._on_delivery = on_delivery
        self.n_left = n_left
        self.goes_on = goes_on
        self.n_delivered = 0
        self.has_ended = False
        self.is_closed = False
        self.begun: Beginning | None = None  # if it is compared with other ranks
        self.is_trained = False  # it is complete, or went through a collective of ranks
        self.trained_at: int | None = None  # the clock when that was published
        self.group: Any = None

    @property
    def n_before(self) -> int:
        """Number of minibatches of the epoch that were delivered before it."""
        return sum(each.n_minibatches for each in (*self._begin.after, self._begin.progress))

    @property
    def is_complete(self) -> bool:
        """Whether all of it was delivered; a single minibatch may be all that a look takes."""
        return self.has_ended or self.n_delivered == self.n_left > 1

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self._begin.epoch

    @property
    def is_untouched(self) -> bool:
        """Whether no minibatch of it has been requested."""
        return not self.n_delivered and not self.has_ended

    @property
    def place(self) -> Place:
        """Position of its consumer; after the last minibatch, the start of the next epoch."""
        if self._begin.worker is None and self.n_delivered == self.n_left:
            return Place(epoch=self.epoch + 1)
        progress = self._begin.progress
        n = progress.n_minibatches + self.n_delivered
        return replace(self._begin, progress=replace(progress, n_minibatches=n))

    @property
    def n_of_epoch(self) -> int:
        """Number of minibatches of the epoch on this rank, including those before a stop."""
        return self.n_before + self.n_left

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
                    delivered = [next(minibatches)]
                except StopIteration:
                    break
                before, now = now, time.perf_counter_ns()
                self._counters.add(Counter.WAITING, now - before)
                self._counters.add(Counter.MINIBATCHES, 1)
                _warn_of_undefined(self._counters)
                self.n_delivered += 1
                if self._on_delivery is not None:
                    self._on_delivery(self)
                yield delivered.pop()
                before, now = now, time.perf_counter_ns()
                self._counters.add(Counter.TRAINING, now - before)
        finally:
            self.is_closed = True
            if isinstance(minibatches, Generator):
                minibatches.close()
        self.has_ended = True
        if self._on_delivery is not None:
            self._on_delivery(self)
        if self.n_delivered != self.n_left:
            msg = (
                f"the epoch ended after {self.n_delivered:,} of {self.n_left:,} minibatches; "
                f"{remedy}"
            )
            raise DeliveryError(msg)


def _warn_of_undefined(counters: Counters) -> None:
    n = counters.n_undefined
    if n and not counters.has_warned:
        counters.has_warned = True
        msg = (
            f"{n:,} values so far are -1 or less, of which `Log1p` is NaN or -infinity; if they "
            "are scaled already, leave it out, or read counts, such as `layers/counts`"
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


class Run(Generic[S]):
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
        self._stopped: Place | None = None
        self._latest: Counted | None = None
        self._wanted: Claim | None = None
        self._n_resumed = 0
        # Since the epoch was last set: where it was set to, which epoch was trained last, and what
        # else began.
        self._first = self._next
        self._trained: int | None = None
        self._untrained: list[Counted] = []
        self._to_compare: Counted | None = None

    @property
    def n_resumed(self) -> int:
        """How often it was resumed."""
        return self._n_resumed

    @property
    def is_resumed(self) -> bool:
        """Whether the next iteration resumes an epoch."""
        return self._counter.next.goes_on

    @property
    def is_at_end(self) -> bool:
        """Whether the last minibatch of an iteration was delivered, and no other since."""
        return self._latest is not None and self._latest.n_delivered == self._latest.n_left

    def goes_on_elsewhere(self, epoch: int) -> bool:
        """Whether the next iteration resumes another epoch."""
        upcoming = self._counter.next
        return upcoming.goes_on and upcoming.epoch != epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch, from its start.

        If this epoch is about to be resumed and none of it was delivered, it is still resumed.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, is negative or is too large.
        """
        self._count_trained()
        is_next = self._counter.next == Claim(epoch, goes_on=True)
        if is_next or (self._goes_on_untouched and self._latest_epoch == epoch):
            return
        self._latest = None
        self._set_next(Claim(epoch))

    def go_on(self, place: Place) -> None:
        """Make the next iteration resume at a position."""
        self._latest, self._stopped = None, place
        self._n_resumed += 1
        claim = Claim(place.epoch, goes_on=True)
        if get_worker_info() is None:
            self._set_next(claim)
        else:  # of a loader that saves and restores each of its workers
            self._wanted = claim

    @property
    def place(self) -> Place:
        """Position of the consumer.

        Raises
        ------
        StateError
            Minibatches were delivered by worker processes that this process does not count.
        """
        if get_worker_info() is None and self._counter.next != self._next:
            msg = (
                "the minibatches came from a DataLoader that does not count them; iterate over "
                "`dataset.loader(...)` or a torchdata StatefulDataLoader, and call its "
                "`state_dict`"
            )
            raise StateError(msg)
        if self._latest is not None:
            return self._latest.place
        upcoming = self._counter.next
        if upcoming.goes_on and self._stopped is not None:
            return self._stopped
        return Place(epoch=upcoming.epoch)

    @property
    def n_of_epoch(self) -> int:
        """Number of minibatches on this rank of a resumed epoch; 0 if it was not resumed."""
        latest = self._latest
        return latest.n_of_epoch if latest is not None and latest.goes_on else 0

    def begin(self, plan_of: PlanOf[S]) -> tuple[S, Counted]:
        """Begin an iteration of this process.

        Raises
        ------
        StateError
            It would resume at the position of another worker process.
        """
        worker = get_worker_info()
        if worker is None:
            self._require_same(self._to_compare)
            self._count_trained()
        claim = self._counter.claim(self._wanted)
        self._wanted = None
        if worker is not None:
            return self._begun(claim, plan_of, worker.id, worker.num_workers)
        try:
            return self._begun(claim, plan_of, 0, 1)
        except BaseException:
            self._counter.set_next(claim)  # nothing came of it
            raise
        finally:
            self._next = self._counter.next

    def begin_for_workers(
        self, plan_of: PlanOf[S], first: Start | None, iteration: int, num_workers: int
    ) -> tuple[Start, Counted]:
        """Begin an iteration of worker processes; see `EpochCounter.claim_for_workers`."""
        self._require_same(self._to_compare)
        self._count_trained()
        start, claim = self._counter.claim_for_workers(first, iteration)
        try:
            return start, self._begun(claim, plan_of, None, num_workers)[1]
        except BaseException:
            self._counter.withdraw(start, iteration, claim)  # nothing came of it
            raise
        finally:
            self._next = self._counter.next

    def note(self, counted: Counted, n_resumed: int) -> None:
        """Record the delivering iteration, unless the run was resumed again since it began.

        Raises
        ------
        ParameterError
            Ranks train together that have begun different epochs.
        """
        if n_resumed == self._n_resumed:
            self._latest = self._to_compare = counted
        if counted.begun is None or counted.group is not self._compared.group:
            counted.is_trained = counted.is_complete
            return
        is_trained = counted.is_complete or self._compared.clock != counted.begun.clock
        if is_trained and not counted.is_trained:
            counted.is_trained, counted.trained_at = True, self._compared.clock
            self._compared.begin(counted.begun, is_trained=True)
        n = counted.n_delivered
        if counted.has_ended or n & (n - 1) == 0:  # often at first
            self._require_same(counted)

    def _begun(
        self, claim: Claim, plan_of: PlanOf[S], worker: int | None, num_workers: int
    ) -> tuple[S, Counted]:
        """Return the share and the count of a worker, or of all workers if it is None."""
        stopped = self._stopped if claim.goes_on else None
        plan, n_before = self._plan(claim.epoch, stopped, plan_of, num_workers)
        if stopped is not None and stopped.worker is not None:
            if (stopped.worker, stopped.progress.num_workers) != (worker, num_workers):
                msg = (
                    f"the state is of worker {stopped.worker} of {stopped.progress.num_workers}, "
                    f"but this is worker {worker} of {num_workers}; use as many as before"
                )
                raise StateError(msg)
            share = plan.share_of_worker(
                worker=stopped.worker, num_workers=num_workers, n_delivered=n_before
            )
        else:
            share = plan.share(worker=worker or 0, num_workers=num_workers, n_delivered=n_before)
        is_counted_alone = get_worker_info() is not None
        progress = Progress(
            world_size=plan.world_size,
            num_workers=num_workers,
            n_minibatches=share.n_delivered if is_counted_alone else n_before,
        )
        place = Place(
            epoch=claim.epoch,
            after=plan.after,
            progress=progress,
            worker=worker if is_counted_alone else None,
        )
        n_left = share.n_minibatches if is_counted_alone else plan.n_minibatches - n_before
        noting = self._noting(self._n_resumed)
        # A worker hands over to a loader in another process, which waits for others too.
        counters = Counters() if is_counted_alone else self._counters
        counted = Counted(place, n_left, counters, goes_on=claim.goes_on, on_delivery=noting)
        self._latest = counted
        if not is_counted_alone:
            self._to_compare = counted
            self._untrained.append(counted)
            clock = self._compared.clock
            if clock is not None:
                counted.begun = Beginning(clock, counted.epoch, counted.n_before, plan.seed)
                counted.group = self._compared.group
                self._compared.begin(counted.begun)
        return share, counted

    @staticmethod
    def _plan(
        epoch: int, stopped: Place | None, plan_of: PlanOf[S], num_workers: int
    ) -> tuple[Divided[S], int]:
        """Return the plan of an iteration, and the number of minibatches delivered before."""
        if stopped is None:
            return plan_of(epoch=epoch, after=()), 0
        plan, last = plan_of(epoch=epoch, after=stopped.after), stopped.progress
        if (last.world_size, last.num_workers) == (plan.world_size, num_workers):
            return plan, last.n_minibatches
        if not last.n_minibatches:
            return plan, 0
        return plan_of(epoch=epoch, after=(*stopped.after, last)), 0

    def _noting(self, n_resumed: int) -> Callable[[Counted], None]:
        """Return a callback that notes the delivering iteration."""
        # A reference cycle would keep the shared memory open until garbage is collected; and a
        # `WeakMethod` would run Python code where the dataset is dropped.
        this = weakref.ref(self)

        def note(counted: Counted) -> None:
            run = this()
            if run is not None:
                run.note(counted, n_resumed)

        return note

    @property
    def _goes_on_untouched(self) -> bool:
        return self._latest is not None and self._latest.goes_on and self._latest.is_untouched

    @property
    def _latest_epoch(self) -> int | None:
        return None if self._latest is None else self._latest.epoch

    def _require_same(self, counted: Counted | None) -> None:
        """Check that ranks which trained together in an iteration began the same.

        Raises
        ------
        ParameterError
            They did not.
        """
        if counted is None or counted.begun is None or counted.group is not self._compared.group:
            return
        # All ranks have published theirs before the next collective, so that all find the same.
        if counted.is_trained and counted.trained_at != self._compared.clock:
            self._to_compare = None  # it is said once
            self._compared.require_same(counted.begun)
            self._to_compare = counted

    def _count_trained(self) -> None:
        """Make the next iteration the one after those that count.

        Among ranks, these are the ones in which they trained; otherwise all that began, except for
        a resumed one that delivered nothing.
        """
        if self._counter.next != self._next:  # workers of another DataLoader began epochs
            self._set_next(self._counter.next)
        untrained, self._untrained = self._untrained, []
        clocks = {each.begun.clock for each in untrained if each.begun and each.is_trained}
        for each in untrained:
            is_beside = each.begun is not None and each.begun.clock in clocks
            if each.is_trained or (not is_beside and self._was_trained(each)):
                self._trained = max(each.epoch, self._trained or 0)
            elif not each.is_closed:  # it may still be
                self._untrained.append(each)
        if self._compared.clock is not None:
            trained = self._trained
            upcoming = self._first if trained is None else Claim(trained + 1)
        elif self._goes_on_untouched and self._latest is not None:
            upcoming = Claim(self._latest.epoch, goes_on=True)
        else:
            return
        self._counter.set_next(upcoming)
        self._next = self._counter.next

    def _was_trained(self, counted: Counted) -> bool:
        """Return whether an iteration counts: ranks trained in it, not one of them alone."""
        begun = counted.begun
        if begun is None or counted.group is not self._compared.group:
            return False  # there was only this rank
        is_look = counted.n_delivered <= 1 and begun.clock == self._compared.clock
        return not is_look and self._compared.have_begun(begun)

    def _set_next(self, claim: Claim) -> None:
        self._counter.set_next(claim)
        self._next = self._first = self._counter.next
        self._trained, self._untrained = None, []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_latest": None, "_to_compare": None, "_untrained": []}
