"""The epoch number of an iteration, on which all worker processes of a DataLoader agree.

A DataLoader copies the dataset into its workers, so a counter in the dataset would start again
in each of them, and every epoch would have the same order. The next epoch is therefore a number in
memory that a process shares with its DataLoader workers, and with nobody else: ranks that were
started with one dataset each count by themselves.

Workers of one iteration identify it by a ticket, which follows from how they were started: a
DataLoader starts them one after another in one thread, so the number of a start, less the worker's
number, is the same for all of them, and differs from that of any other iteration. (The base seed,
which a DataLoader draws for each iteration, repeats if a user seeds torch again.) The DataLoader of
`CellDataset.loader` claims the epoch for its workers; in any other DataLoader, the first worker
that begins claims it for all. Persistent worker processes count their iterations.

The next epoch may resume where it was stopped. The shared memory records this too, so that all
workers of that iteration resume, and no later ones.
"""

import atexit
import fcntl
import inspect
import mmap
import os
import secrets
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing import Process, current_process, get_start_method, parent_process
from multiprocessing.context import ForkServerProcess, get_spawning_popen
from multiprocessing.reduction import DupFd
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from cellfeed._bytes._store import closed_with
from cellfeed._errors import DeliveryError, ParameterError, require_integer
from cellfeed._torch import get_worker_info

_EPOCH_LIMIT = 1 << 62

_N_CLAIMS = 1024
_MEMORY = np.dtype(
    [
        ("next", np.int64, 2),  # the claim of the next iteration
        # Tickets and claims of iterations by worker processes; the oldest are forgotten.
        ("claims", np.int64, (_N_CLAIMS, 5)),
        ("n_claims", np.int64),
    ]
)


class Claim(NamedTuple):
    """The epoch of an iteration.

    Parameters
    ----------
    epoch
        Number of the epoch.
    resumes
        How often the run was resumed, if it resumes where it was stopped; 0 if it begins anew.
    """

    epoch: int
    resumes: int = 0


_FIRST = Claim(0)


class Ticket(NamedTuple):
    """Identifies an iteration by worker processes.

    Parameters
    ----------
    thread
        The thread that started the workers.
    first
        How many processes this thread had started when it had started the first worker.
    iteration
        Number of this iteration of these workers, from 1.
    """

    thread: int
    first: int
    iteration: int


class _Starts(threading.local):
    """How many processes this thread has started.

    Attributes
    ----------
    own
        The start of this process, for all its threads: the thread that started it, and its number.
    """

    own: ClassVar[tuple[int, int]] = (0, 0)

    def __init__(self) -> None:
        self.thread, self.n = secrets.randbits(62), 0

    def of(self, popen: Any) -> tuple[int, int]:
        """Count the start of a process that is not forked, once for any number of counters."""
        if not hasattr(popen, "cellfeed_start"):
            self.n += 1
            popen.cellfeed_start = self.thread, self.n
        start: tuple[int, int] = popen.cellfeed_start
        return start


_starts = _Starts()
_lock = threading.Lock()  # of all counters, between threads
_counters = list["weakref.ref[EpochCounter]"]()  # whose callbacks would run where one is dropped


def _before_fork() -> None:
    _starts.n += 1
    for each in _counters:
        counter = each()
        if counter is None:
            continue
        if counter.is_inherited:
            with counter.locked():  # in memory that is this process's from now on
                pass
        counter.note_start()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - a thread of the parent may hold it
    _lock = threading.Lock()
    _Starts.own = _starts.thread, _starts.n


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class EpochCounter:
    """Assigns epoch numbers 0, 1, 2, ..., one per iteration.

    It survives fork and spawn, keeps counting with persistent workers, and can be pickled (a
    pickled copy starts its own count at the next epoch). The memory is an unnamed file, which is
    freed with the last process, however that ends.

    Parameters
    ----------
    upcoming
        The claim of the first iteration.
    """

    _owner: int | None  # the process in whose memory it counts, if that is known

    def __init__(self, upcoming: Claim = _FIRST) -> None:
        self._n_iterations = 0  # of this process, if it is a worker
        self._at_start = upcoming
        self._create(upcoming)
        with _lock:
            _counters[:] = [each for each in _counters if each() is not None]
            _counters.append(weakref.ref(self))

    @property
    def is_inherited(self) -> bool:
        """Whether this process was started with it, is no worker, and has not used it yet."""
        return self._owner != os.getpid() and get_worker_info() is None

    @property
    def next(self) -> Claim:
        """The claim of the next iteration."""
        with self.locked() as shared:
            return _claim(shared["next"])

    def set_next(self, claim: Claim) -> None:
        """Set the epoch of the next iteration.

        Raises
        ------
        ParameterError
            The epoch is not an integer, is negative or is too large.
        """
        require_epoch(claim.epoch)
        with self.locked() as shared:
            shared["next"] = claim

    def claim(self, wanted: Claim | None = None) -> Claim:
        """Return the claim of the iteration that starts now in this process.

        Parameters
        ----------
        wanted
            The claim that this worker process was given; all workers of the same iteration were
            given the same.
        """
        worker = get_worker_info()
        with self.locked() as shared:
            if worker is None:
                return self._advance()
            self._n_iterations += 1
            thread, n = _Starts.own
            ticket = Ticket(thread, n - worker.id, self._n_iterations)
            (known,) = np.nonzero(self._is_of(ticket))
            if known.size:
                return _claim(shared["claims"][known[0], 3:])
            if wanted is not None:
                shared["next"] = wanted
            return self._advance(ticket)

    def claim_for_workers(self, latest: Ticket | None) -> tuple[Ticket, Claim]:
        """Claim an epoch for worker processes, in the process that starts them.

        Parameters
        ----------
        latest
            The ticket of the previous iteration by the same workers; None if this thread will start
            them next.

        Returns
        -------
        The ticket of the iteration, and its claim.
        """
        if latest is None:
            ticket = Ticket(_starts.thread, _starts.n + 1, 1)
        else:
            ticket = latest._replace(iteration=latest.iteration + 1)
        with self.locked() as shared:
            shared["claims"][self._is_of(ticket)] = 0  # of workers that could not be started
            return ticket, self._advance(ticket)

    def withdraw(self, claim: Claim, ticket: Ticket | None) -> None:
        """Make the claim of an iteration that did not begin the next one again."""
        with self.locked() as shared:
            if ticket is not None:
                shared["claims"][self._is_of(ticket)] = 0
            shared["next"] = claim

    def note_start(self) -> None:
        """Note where a process begins that is forked now, if it is no worker."""
        self._at_start = _claim(self._shared["next"])

    def _create(self, upcoming: Claim) -> None:
        if hasattr(os, "memfd_create"):  # on Linux, it needs no folder that can be written
            descriptor = os.memfd_create("cellfeed-epochs")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _MEMORY.itemsize)
        self._open(descriptor)
        self._owner, self._shared["next"] = os.getpid(), upcoming

    def _open(self, descriptor: int) -> None:
        self._owner = None
        self._descriptor, self._closing = descriptor, closed_with(descriptor)
        self._shared = np.frombuffer(mmap.mmap(descriptor, _MEMORY.itemsize), dtype=_MEMORY)[0]

    @contextmanager
    def locked(self) -> Iterator[Any]:
        """Provide the memory of this process, or of the one whose worker this is.

        A process that was started with the counter of another, and is no worker, gets memory of its
        own first, which begins where the process was started.
        """
        with _lock:  # between threads
            descriptor, open_until_unlocked = self._descriptor, self._closing
            fcntl.lockf(descriptor, fcntl.LOCK_EX)  # between processes; released if one dies
            try:
                if self.is_inherited:
                    self._create(self._at_start)
                yield self._shared
            finally:
                fcntl.lockf(descriptor, fcntl.LOCK_UN)
                del open_until_unlocked

    def _is_of(self, ticket: Ticket) -> Any:
        """Return which claims are of a ticket, bool, shape (n_claims,)."""
        return (self._shared["claims"][:, :3] == ticket).all(axis=1)

    def _advance(self, ticket: Ticket | None = None) -> Claim:
        shared, claimed = self._shared, _claim(self._shared["next"])
        shared["next"] = claimed.epoch + 1, 0
        if ticket is not None:
            shared["claims"][shared["n_claims"] % _N_CLAIMS] = *ticket, *claimed
            shared["n_claims"] += 1
        return claimed

    def __getstate__(self) -> dict[str, Any]:
        popen = get_spawning_popen()
        if popen is None:
            return {"next": self.next}
        # A process is being started: share the memory, and say which of the starts this is.
        with self.locked() as shared:
            return {
                "next": _claim(shared["next"]),
                "descriptor": DupFd(self._descriptor),
                "start": _starts.of(popen),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.get("next", _FIRST))  # type: ignore[misc]
        if "descriptor" in state:
            self._open(state["descriptor"].detach())
            _Starts.own = state["start"]


def _claim(shared: Any) -> Claim:
    return Claim(*shared.tolist())


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


# Iterations that may be dropped at any moment, by any thread and at the exit of the process.
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
