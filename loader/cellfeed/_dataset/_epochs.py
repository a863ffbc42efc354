"""The epoch number of an iteration, on which all worker processes of a DataLoader agree.

A DataLoader copies the dataset into its workers, so a counter in the dataset would start again
in each of them, and every epoch would have the same order. The counter is therefore in memory that
the processes share.

Workers of one iteration identify each other by how they were started: a DataLoader starts them one
after another in one thread, so the number of that start, less the worker's number, is the same
for all of them, and differs from that of any other iteration. (The base seed, which a DataLoader
draws for each iteration, repeats if a user seeds torch again.) The DataLoader of
`CellDataset.loader` claims the epoch for its workers; in any other DataLoader, the first worker
that begins claims it for all. Persistent worker processes count their iterations.

A process that is not a worker keeps its own count of epochs, so that ranks that were started with
one dataset do not take each other's epochs.

The next epoch may resume where it was stopped. The shared memory records this too, so that all
workers of that iteration resume, and no later ones.
"""

import atexit
import fcntl
import inspect
import itertools
import mmap
import os
import secrets
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from multiprocessing import Process, current_process, get_start_method, parent_process
from multiprocessing.context import ForkServerProcess, get_spawning_popen
from multiprocessing.reduction import DupFd
from queue import SimpleQueue
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from cellfeed._bytes._store import closed_with
from cellfeed._errors import DeliveryError, ParameterError, require_integer
from cellfeed._torch import get_worker_info
from cellfeed.sampling import EpochPlan, Share

_EPOCH_LIMIT = 1 << 62

_N_PROCESSES, _N_CLAIMS = 4096, 1024
_MEMORY = np.dtype(
    [
        ("clock", np.int64),
        # The next epoch of each process that iterates, and when it was last asked for.
        (
            "counts",
            [("process", np.int64), ("epoch", np.int64), ("goes_on", np.int64), ("used", np.int64)],
            _N_PROCESSES,
        ),
        # The epochs of iterations by worker processes; the oldest are forgotten.
        ("claims", [("key", np.int64, 4), ("epoch", np.int64), ("goes_on", np.int64)], _N_CLAIMS),
        ("n_claims", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a process.

    Parameters
    ----------
    process, thread
        The process and thread that started it.
    number
        Number of processes that the thread had started by then.
    """

    process: int
    thread: int
    number: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The epoch of an iteration.

    Parameters
    ----------
    epoch
        Number of the epoch.
    goes_on
        Whether it resumes where it was stopped.
    """

    epoch: int
    goes_on: bool = False


class _Starts(threading.local):
    """Count of the processes that this thread has started."""

    _threads = itertools.count()

    def __init__(self) -> None:
        self.thread = next(self._threads)
        self.count = 0
        self._spawning: weakref.ref[Any] | None = None

    def count_spawn(self, popen: Any) -> None:
        """Count a process that is not forked, once for any number of counters."""
        if self._spawning is None or self._spawning() is not popen:
            self._spawning = weakref.ref(popen)
            self.count += 1


class _Process:
    """A unique number of this process, and its start if it was forked."""

    def __init__(self) -> None:
        self.starts = _Starts()
        self.start: Start | None = None
        self._begin()
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def _begin(self) -> None:
        self.number = secrets.randbits(62) + 1
        self.lock = threading.Lock()

    def last_start(self) -> Start:
        """Return the latest start of a process in this thread."""
        return Start(self.number, self.starts.thread, self.starts.count)

    def _before_fork(self) -> None:
        self.starts.count += 1

    def _after_fork(self) -> None:
        self.start = self.last_start()
        self._begin()


_this_process = _Process()


class EpochCounter:
    """Assigns epoch numbers 0, 1, 2, ..., one per iteration.

    It survives fork and spawn, keeps counting with persistent workers, and can be pickled (a
    pickled copy starts its own count at the next epoch). The memory is an unnamed file, which is
    freed with the last process, however that ends.
    """

    def __init__(self) -> None:
        fd = _file_without_name()
        os.ftruncate(fd, _MEMORY.itemsize)
        self._open(fd, counted_by=_this_process.number)

    @property
    def next(self) -> Claim:
        """The claim of the next iteration."""
        with self._locked():
            count = self._count(self._iterating())
            return Claim(int(count["epoch"]), bool(count["goes_on"]))

    def set_next(self, claim: Claim) -> None:
        """Set the epoch of the next iteration.

        Raises
        ------
        ParameterError
            The epoch is not an integer, is negative or is too large.
        """
        require_epoch(claim.epoch)
        with self._locked():
            self._set(self._count(self._iterating()), claim)

    def claim(self, wanted: Claim | None = None) -> Claim:
        """Return the claim of the iteration that starts now in this process.

        Parameters
        ----------
        wanted
            The claim that this worker process was given; all workers of the same iteration were
            given the same.
        """
        worker, start = get_worker_info(), self._start()
        with self._locked():
            if worker is None or start is None:
                return self._advance(_this_process.number)
            self._iteration += 1
            first = replace(start, number=start.number - worker.id)
            return self._claim_together(first, self._iteration, wanted)

    def claim_for_workers(self, first: Start | None, iteration: int) -> tuple[Start, Claim]:
        """Claim an epoch for worker processes, in the process that starts them.

        Parameters
        ----------
        first
            The start of the first worker; None if this thread will start them next.
        iteration
            Number of this iteration of these workers, from 1.

        Returns
        -------
        The start of the first worker, and the claim.
        """
        if first is None:
            last = _this_process.last_start()
            first = replace(last, number=last.number + 1)
        with self._locked():
            return first, self._claim_together(first, iteration)

    def withdraw(self, first: Start, iteration: int, claim: Claim) -> None:
        """Withdraw a claim for workers that were not started; it becomes the next again."""
        with self._locked():
            claims = self._shared["claims"][0]
            claims["key"][(claims["key"] == (*astuple(first), iteration)).all(axis=1)] = 0
            self._set(self._count(first.process), claim)

    def _open(self, fd: int, *, counted_by: int) -> None:
        self._fd = fd
        self._closing = closed_with(fd)
        memory = mmap.mmap(fd, _MEMORY.itemsize)
        self._shared = np.frombuffer(memory, dtype=_MEMORY)
        self._counted_by = counted_by  # the process that used it last, this one or an ancestor
        self._iteration = 0
        self._spawned: tuple[int, Start] | None = None  # this process, and its start

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _this_process.lock:  # between threads
            fcntl.lockf(self._fd, fcntl.LOCK_EX)  # between processes; released if one dies
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _start(self) -> Start | None:
        """Return how this process was started; None if not with this counter."""
        if self._spawned is not None and self._spawned[0] == _this_process.number:
            return self._spawned[1]
        return _this_process.start

    def _iterating(self) -> int:
        """Return the process whose iterations are counted; for a worker, its parent."""
        start = self._start()
        if get_worker_info() is None or start is None:
            return _this_process.number
        return start.process

    def _claim_together(self, first: Start, iteration: int, wanted: Claim | None = None) -> Claim:
        key = (*astuple(first), iteration)
        claims = self._shared["claims"][0]
        (known,) = np.nonzero((claims["key"] == key).all(axis=1))
        if known.size:
            claim = claims[known[0]]
            return Claim(int(claim["epoch"]), bool(claim["goes_on"]))
        if wanted is not None:
            self._set(self._count(first.process), wanted)
        claimed = self._advance(first.process)
        row = int(self._shared["n_claims"][0]) % _N_CLAIMS
        claims[row] = key, claimed.epoch, claimed.goes_on
        self._shared["n_claims"] += 1
        return claimed

    def _advance(self, process: int) -> Claim:
        count = self._count(process)
        claimed = Claim(int(count["epoch"]), bool(count["goes_on"]))
        self._set(count, Claim(claimed.epoch + 1))
        return claimed

    @staticmethod
    def _set(count: Any, claim: Claim) -> None:
        count["epoch"], count["goes_on"] = claim.epoch, claim.goes_on

    def _count(self, process: int) -> Any:
        """Return the count of a process, which continues that of its ancestor."""
        counts = self._shared["counts"][0]
        (known,) = np.nonzero(counts["process"] == process)
        if not known.size:
            (ancestor,) = np.nonzero(counts["process"] == self._counted_by)
            epoch, goes_on = (
                counts[["epoch", "goes_on"]][ancestor[0]] if ancestor.size else (0, False)
            )
            known = np.array([counts["used"].argmin()])  # of those, the one that is longest unused
            counts[known[0]] = process, epoch, goes_on, 0
        self._shared["clock"] += 1
        counts["used"][known[0]] = self._shared["clock"][0]
        if process == _this_process.number:
            self._counted_by = process
        return counts[known[0]]

    def __getstate__(self) -> dict[str, Any]:
        popen = get_spawning_popen()
        if popen is None:
            return {"next": self.next}
        # A worker is being started: share the memory, and say which of the starts this is.
        _this_process.starts.count_spawn(popen)
        start = _this_process.last_start()
        return {"fd": DupFd(self._fd), "counted_by": self._counted_by, "start": start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "fd" in state:
            self._open(state["fd"].detach(), counted_by=state["counted_by"])
            self._spawned = _this_process.number, state["start"]
        else:
            self.__init__()  # type: ignore[misc]
            self.set_next(state["next"])


def require_epoch(epoch: Any) -> int:
    """Return the number of an epoch as a Python integer.

    Raises
    ------
    ParameterError
        It is not an integer, is negative or is too large.
    """
    if not 0 <= require_integer("epoch", epoch) < _EPOCH_LIMIT:
        msg = f"`0 <= epoch < {_EPOCH_LIMIT}` must hold, but got {epoch=}"
        raise ParameterError(msg)
    return int(epoch)


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # on Linux, it needs no folder that can be written
        return os.memfd_create("cellfeed-epochs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# Iterations that may be dropped at any moment, by any thread and at the exit of the process.
#
# An exception in a destructor is printed and ignored, and so is Ctrl-C if it arrives in one.
# Therefore no Python code may run when an iteration is dropped, least of all code that waits.

_Item = TypeVar("_Item")


class Iteration(Generic[_Item]):
    """Iterates over a generator, which a thread closes if the iteration is dropped.

    Parameters
    ----------
    items
        The generator, to which nothing else may refer; or a function that makes it when the first
        item is requested.
    begun
        Whether the generator must be closed even before the first item.

    Examples
    --------
    >>> list(Iteration(n * n for n in range(4)))
    [0, 1, 4, 9]
    """

    __slots__ = ("__weakref__", "_closing", "_items", "_make", "_process")

    def __init__(
        self,
        items: Generator[_Item, None, None] | Callable[[], Generator[_Item, None, None]],
        *,
        begun: bool = False,
    ) -> None:
        self._process = os.getpid()
        self._make = None if isinstance(items, Generator) else items
        self._items = items if isinstance(items, Generator) else None
        self._closing: _Closing | None = None
        if begun:
            self._begin()

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
        if self._items is None:  # making it has failed
            raise StopIteration
        if self._closing is None and not self._has_ended:
            self._begin()
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

    def release(self) -> None:
        """Leave the generator unchanged to other owners."""
        if self._closing is not None:
            self._closing.release()
            self._closing = None

    @property
    def _has_ended(self) -> bool:
        return self._items is None or inspect.getgeneratorstate(self._items) == inspect.GEN_CLOSED

    def _begin(self) -> None:
        assert self._items is not None  # noqa: S101 - asked before
        wait_for_dropped()
        self._closing = _Closing(self, self._items)
        self._closing.start()

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
        self._items: Generator[Any, None, None] | None = items

    @property
    def is_due(self) -> bool:
        """Whether the iteration is gone."""
        return self._iteration() is None

    def start(self) -> None:
        """Start the waiting thread."""
        _CLOSINGS.add(self)
        try:
            super().start()
        except BaseException:
            _CLOSINGS.discard(self)
            raise

    def run(self) -> None:
        """Wait for the iteration to be dropped, and close the generator."""
        self._told.get()
        items, self._items = self._items, None
        try:
            if items is not None:
                items.close()
        finally:
            del items
            _CLOSINGS.discard(self)

    def release(self) -> None:
        """Do not close the generator."""
        self._items = None
        self.end()

    def end(self) -> None:
        """Wait for the thread to finish."""
        self._told.put(None)
        self.join()


_CLOSINGS = set[_Closing]()  # adding and discarding are atomic


@atexit.register
def wait_for_dropped() -> None:
    """Wait until dropped iterations are closed, since two at a time take twice the memory."""
    for closing in list(_CLOSINGS):
        if closing.is_due and closing is not threading.current_thread():
            closing.join()


def end_without_parent() -> None:
    """Exit from a worker process whose parent was killed while it started.

    From here on, torch watches the parent, and would mistake the adopting process for it.
    """
    parent = parent_process()
    if parent is None:
        return
    process = current_process()
    if isinstance(process, ForkServerProcess) or (
        type(process) is Process and get_start_method() == "forkserver"
    ):  # the server has started it
        is_there = parent.is_alive()
    else:
        is_there = parent.pid == os.getppid()
    if not is_there:
        sys.exit(1)


# Fetches of the next epoch that were read ahead, kept until that or another epoch begins.


class ReadAhead(Protocol):
    """Fetches in progress, read by threads that stop when the generator is closed."""

    @property
    def groups(self) -> Generator[Any, None, None]: ...


F = TypeVar("F", bound=ReadAhead)


class NextEpoch(Generic[F]):
    """Keeps fetches of one epoch of one dataset that were read ahead.

    They are closed if other fetches are needed next, or if this is dropped; a thread closes them,
    since no Python code may run then. Pickled copies and forked processes have none.
    """

    def __init__(self) -> None:
        self._kept = deque["_Kept[F]"]()  # whose methods are atomic: any thread may begin an epoch

    def keep(self, fetches: F, share: Share, settings: tuple[object, ...]) -> None:
        """Keep fetches, and discard earlier ones.

        Parameters
        ----------
        fetches
            The fetches, which must not refer to this object, even indirectly.
        share
            The share that they begin with.
        settings
            The settings that they were read with.
        """
        self.let_go()
        waiting = Iteration(fetches.groups, begun=True)
        self._kept.append(_Kept(os.getpid(), fetches, share, settings, waiting))

    def take(self, share: Share, settings: tuple[object, ...]) -> F | None:
        """Return fetches that begin with a share, if there are any, and discard all others.

        Parameters
        ----------
        share, settings
            See `keep`; settings are compared by identity.
        """
        found = self._pop()
        if found is None or found.process != os.getpid():
            return None
        if are_same(found.share, share) and _are_identical(found.settings, settings):
            found.waiting.release()
            return found.fetches
        found.waiting.close()
        return None

    def let_go(self, *, unless: int | None = None) -> None:
        """Discard the kept fetches, unless they are of this epoch, and wait for their end."""
        found = self._pop()
        if found is not None and found.share.plan.epoch == unless:
            self._kept.append(found)
        elif found is not None:
            found.waiting.close()

    def _pop(self) -> "_Kept[F] | None":
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def __reduce__(self) -> "tuple[type[NextEpoch[F]], tuple[()]]":
        return NextEpoch, ()


@dataclass(frozen=True, slots=True, eq=False)
class _Kept(Generic[F]):
    process: int
    fetches: F
    share: Share
    settings: tuple[object, ...]
    waiting: Iteration[Any]


def are_same(one: Share, other: Share) -> bool:
    """Return whether shares are equal; strategies, which have arrays, are compared by identity."""
    return one.plan.strategy is other.plan.strategy and _sizes(one) == _sizes(other)


def _sizes(share: Share) -> tuple[object, ...]:
    names = [each.name for each in fields(EpochPlan) if each.compare and each.name != "strategy"]
    of_plan = [getattr(share.plan, name) for name in names]
    return share.worker, share.num_workers, share.n_delivered, *of_plan


def _are_identical(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
