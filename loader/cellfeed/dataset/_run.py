"""Where a run is: the next epoch, and how much of the current one its consumer has received.

Its iterations may be dropped at any moment, by any thread and at the exit of the process.
"""

import atexit
import inspect
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from cellfeed._errors import DeliveryError
from cellfeed.decode import Counter, Counters
from cellfeed.sampling import Progress


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
    """

    epoch: int = 0
    after: tuple[Progress, ...] = ()
    progress: Progress = field(default_factory=Progress)

    @property
    def n_minibatches(self) -> int:
        """Number of minibatches of the epoch that were delivered before."""
        return sum(each.n_minibatches for each in (*self.after, self.progress))

    def divided_among(self, n_streams: int) -> "Position":
        """Return the same position for a number of ranks or streams: the rest is divided anew."""
        there = self.progress
        if there.world_size == n_streams:
            return self
        after = (*self.after, there) if there.n_minibatches else self.after
        return replace(self, after=after, progress=Progress(world_size=n_streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What the order of the rest of an epoch on a rank follows from.

    Parameters
    ----------
    position
        Where it begins.
    rank, world_size
        This rank, and the number of ranks.
    seeds
        The seed of each dataset.
    """

    position: Position
    rank: int
    world_size: int
    seeds: tuple[int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class Epoch:
    """An epoch, or the rest of one, whose minibatches are counted as the consumer receives them.

    Parameters
    ----------
    start
        Position where it begins.
    n_left
        Number of minibatches from there to its end.
    run
        The run that it belongs to.
    counters
        Counters of minibatches and of waiting times.
    """

    start: Position
    n_left: int
    # A reference cycle would keep shared memory open until garbage is collected.
    run: "weakref.ref[Run]"
    counters: Counters
    n_delivered: int = 0

    @property
    def position(self) -> Position:
        """Position of the training loop; after the last minibatch, the start of the next epoch."""
        if self.n_delivered == self.n_left:
            return Position(epoch=self.start.epoch + 1)
        progress = self.start.progress
        n = progress.n_minibatches + self.n_delivered
        return replace(self.start, progress=replace(progress, n_minibatches=n))

    def counting(self, minibatches: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield minibatches without keeping the last, and measure waiting and training times.

        Raises
        ------
        DeliveryError
            There were fewer minibatches than expected.
        """
        now = time.perf_counter_ns()
        try:
            while True:
                try:
                    delivered = [next(minibatches)]
                except StopIteration:
                    break
                before, now = now, time.perf_counter_ns()
                self.counters.add(Counter.WAITING, now - before)
                self.counters.add(Counter.MINIBATCHES, 1)
                _warn_of_non_counts(self.counters)
                self.n_delivered += 1
                if (run := self.run()) is not None:
                    run.latest = self
                yield delivered.pop()
                before, now = now, time.perf_counter_ns()
                self.counters.add(Counter.TRAINING, now - before)
        finally:
            if isinstance(minibatches, Generator):
                minibatches.close()
        if self.n_delivered != self.n_left:
            msg = (
                f"the epoch ended after {self.n_delivered:,} of {self.n_left:,} minibatches; "
                "please report this"
            )
            raise DeliveryError(msg)


_DOUBTS = (
    "{:,} values so far are -1 or less, of which `Log1p` is NaN or -infinity; if they are scaled",
    (
        "in {:,} of the cells so far, the values do not add up to an integer, as counts do; if "
        "`NormalizeTotal` gets values that are normalized or log-transformed"
    ),
)
_REMEDY = " already, leave it out, or read counts, such as `layers/counts`"


def _warn_of_non_counts(counters: Counters) -> None:
    """Warn once of each kind of values that may not be counts."""
    for kind, n in enumerate(counters.non_counts):
        if n and kind not in counters.has_warned_of:
            counters.has_warned_of.add(kind)
            warnings.warn(_DOUBTS[kind].format(n) + _REMEDY, UserWarning, stacklevel=3)


class Run:
    """Where a run is: ``upcoming``, where the next iteration begins, and the ``latest`` epoch.

    Beginning counts: an iteration takes ``upcoming``, which is then the start of the epoch after
    it. The position of the run is that of the epoch that delivered the latest minibatch; before
    the first, and after the epoch was set or a state was loaded, it is ``upcoming``.

    Attributes
    ----------
    is_set
        Whether the epoch was set since the last iteration began.
    """

    def __init__(self) -> None:
        self.upcoming = Position()
        self.latest: Epoch | None = None
        self.is_set = False
        self._lock = threading.Lock()

    @property
    def position(self) -> Position:
        """Position of the consumer."""
        return self.upcoming if self.latest is None else self.latest.position

    @property
    def is_at_end(self) -> bool:
        """Whether the last minibatch of an epoch was delivered, and no other since."""
        return self.latest is not None and self.latest.n_delivered == self.latest.n_left

    def go_to(self, position: Position, *, is_set: bool = False) -> None:
        """Make the next iteration begin at a position."""
        with self._lock:
            self.upcoming, self.latest, self.is_set = position, None, is_set

    def begin(self) -> tuple[Position, Epoch | None, bool]:
        """Return what this was, at whose ``upcoming`` an iteration begins."""
        with self._lock:
            before = self.upcoming, self.latest, self.is_set
            self.upcoming, self.is_set = Position(epoch=self.upcoming.epoch + 1), False
            return before

    def take_back(self, before: tuple[Position, Epoch | None, bool]) -> None:
        """Be as before an iteration that has not begun, unless others have since."""
        with self._lock:
            if self.upcoming == Position(epoch=before[0].epoch + 1):
                self.upcoming, self.latest, self.is_set = before

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which goes on by itself, at the next epoch."""
        return {"upcoming": self.upcoming, "is_set": self.is_set}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)


# Iterations.
#
# An exception in a destructor is printed and ignored, and so is Ctrl-C if it arrives in one.
# Therefore no Python code may run when an iteration is dropped, least of all code that waits.

_Item = TypeVar("_Item")


class Iteration(Generic[_Item]):
    """Iterates over a generator, which a thread closes if the iteration is dropped.

    Parameters
    ----------
    make
        Function that makes the generator when the first item is requested; nothing else may refer
        to the generator.

    Examples
    --------
    >>> list(Iteration(lambda: (n * n for n in range(4))))
    [0, 1, 4, 9]
    """

    __slots__ = ("__weakref__", "_closing", "_items", "_make", "_process")

    def __init__(self, make: Callable[[], Generator[_Item, None, None]]) -> None:
        self._process = os.getpid()
        self._make: Callable[[], Generator[_Item, None, None]] | None = make
        self._items: Generator[_Item, None, None] | None = None
        self._closing: _Closing | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Item:
        if self._process != os.getpid():
            msg = (
                f"an iterator only works in the process that made it, {self._process}, but was "
                f"used in {os.getpid()}, a fork without its threads; make a new one there"
            )
            raise DeliveryError(msg)
        if self._make is not None:
            make, self._make = self._make, None
            self._items = make()
            wait_for_dropped()
            self._closing = _Closing(self, self._items)
            self._closing.start()
        if self._items is None:  # making it has failed
            raise StopIteration
        try:
            return next(self._items)
        finally:
            if self._has_ended:  # it has ended, or an error has ended it
                self._end()

    def close(self) -> None:
        """Discard remaining items, and wait until all work for them has ended."""
        self._make = None
        if self._process == os.getpid() and self._items is not None:
            self._items.close()
            self._end()
            wait_for_dropped()  # what it iterated over itself

    @property
    def _has_ended(self) -> bool:
        return self._items is None or inspect.getgeneratorstate(self._items) == inspect.GEN_CLOSED

    def _end(self) -> None:
        if self._closing is not None:
            self._closing.end()
            self._closing = None


class _Closing(threading.Thread):
    """Closes a generator as soon as its iteration is gone.

    Ctrl-C is raised only in the main thread, so nothing is lost if it arrives meanwhile. Dropped
    iterations are closed before the process exits: a thread that Python stops might hold a lock,
    such as that of h5py, for which the last destructors wait. An iteration that is still alive
    then is not closed; nor in a forked process, where closing it would disturb this one.
    """

    def __init__(self, iteration: Iteration[Any], items: Generator[Any, None, None]) -> None:
        super().__init__(name="cellfeed-closing", daemon=True)
        self._told = SimpleQueue[object]()
        # `SimpleQueue.put` is C code, as all is that runs where the iteration is dropped.
        self._iteration = weakref.ref(iteration, self._told.put)
        self._items = items

    @property
    def is_due(self) -> bool:
        """Whether the iteration is gone."""
        return self._iteration() is None

    def run(self) -> None:
        """Wait for the iteration to be dropped, and close the generator."""
        self._told.get()
        self._items.close()

    def end(self) -> None:
        """Wait for the thread to finish."""
        self._told.put(None)
        self.join()


@atexit.register
def wait_for_dropped() -> None:
    """Wait until dropped iterations are closed, since two at a time take twice the memory."""
    closings = [each for each in threading.enumerate() if isinstance(each, _Closing)]
    for closing in closings:
        if closing.is_due and closing is not threading.current_thread():
            closing.join()
