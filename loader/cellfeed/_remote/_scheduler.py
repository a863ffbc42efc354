"""Requests to one store: their order, how many are concurrent, and retries.

All of it runs in the thread of the event loop, so nothing needs a lock. Requests are sent in the
order in which they were submitted; answers come in any order.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from cellfeed._bytes import LOOK_UP_SECONDS, Location, is_awaited
from cellfeed._errors import CellfeedError
from cellfeed._remote._failures import ShortError, failure, given_up, is_missing, is_overload
from cellfeed._remote._link import Link, Window
from cellfeed._remote._loop import in_loop, is_forked
from cellfeed._remote._opening import Stores, Version, stores_of, version_of
from cellfeed._remote._retrying import Attempts

__all__ = ["Batch", "Counters", "Request", "Scheduler", "requests_under_way", "scheduler_of"]


@dataclass(slots=True)
class Counters:
    """Requests to a store since it was opened.

    Parameters
    ----------
    n_requests, n_bytes
        Answered requests, and their bytes, including gaps.
    n_wanted
        Bytes of these that were needed.
    n_repeated
        Requests that failed and were retried.
    """

    n_requests: int = 0
    n_bytes: int = 0
    n_wanted: int = 0
    n_repeated: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A range of bytes of one object.

    Parameters
    ----------
    location, path
        The object, and its path in the store.
    version
        The version that it must have; None if any is accepted.
    first, stop
        The bytes; an object whose version is not known may end before ``stop``.
    n_wanted
        Number of these bytes that are needed; the others are gaps.
    """

    location: Location
    path: str
    version: Version | None
    first: int
    stop: int
    n_wanted: int


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that are awaited together.

    Parameters
    ----------
    requests
        The requests.

    Attributes
    ----------
    is_here
        Done once each request is answered, or has failed.
    """

    requests: Sequence[Request]
    answers: list[memoryview | CellfeedError | None] = field(init=False)
    _left: int = field(init=False)
    _is_given_up: bool = field(init=False, default=False)
    is_here: Future[None] = field(init=False, default_factory=Future)
    _tasks: set["asyncio.Task[memoryview | None]"] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.requests)
        self._left = len(self.requests)
        if not self._left:
            self.is_here.set_result(None)

    def result(self) -> Sequence[memoryview | CellfeedError | None]:
        """Wait for all answers: the bytes, None if there is no such object, or the error.

        Each request ends in bounded time, so this does too, and immediately when the process exits,
        which must not wait for a server.

        Raises
        ------
        RemoteError
            The requests are no longer needed, as when the process exits.
        """
        while not self.is_here.done() and not wait([self.is_here], LOOK_UP_SECONDS).done:
            if self._is_given_up or not is_awaited():  # others may still be waiting for it
                raise given_up(self.requests[0].location)
        return self.answers

    def give_up(self) -> None:
        """Cancel the requests; from any thread, and without waiting."""
        if not self.is_here.done() and not is_forked():
            in_loop(self._give_up)

    def _give_up(self) -> None:
        self._is_given_up = True
        for task in list(self._tasks):
            task.cancel()

    def put(self, number: int, answer: memoryview | CellfeedError | None) -> None:
        """Store an answer."""
        self.answers[number] = answer
        self._left -= 1
        if not self._left:
            self.is_here.set_result(None)

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._is_given_up

    @property
    def tasks(self) -> set["asyncio.Task[memoryview | None]"]:
        """The running requests."""
        return self._tasks


class Scheduler:
    """Sends requests to one store.

    Parameters
    ----------
    store
        The store of obstore.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._waiting = deque[tuple[Batch, int]]()
        self._n_under_way = 0
        self._window = Window()
        self.link = Link()
        self.counters = Counters()

    @property
    def limit(self) -> int:
        """Limit of concurrent requests."""
        return self._window.limit

    def submit(self, batches: Sequence[Batch]) -> None:
        """Queue requests; from any thread, and without waiting."""
        if batches:
            in_loop(self._submit, batches)

    def _submit(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._waiting += ((batch, number) for number in range(len(batch.requests)))
        self._send()

    def _send(self) -> None:
        while self._waiting and self._n_under_way < self._window.limit:
            batch, number = self._waiting.popleft()
            if batch.is_given_up:
                continue
            self._n_under_way += 1
            task = asyncio.get_running_loop().create_task(self._bytes_of(batch.requests[number]))
            batch.tasks.add(task)
            # Also called for a task that was cancelled before it began.
            task.add_done_callback(partial(self._answered, batch, number))

    def _answered(self, batch: Batch, number: int, task: "asyncio.Task[memoryview | None]") -> None:
        self._n_under_way -= 1
        self._send_soon()
        batch.tasks.discard(task)
        location = batch.requests[number].location
        if task.cancelled():
            batch.put(number, given_up(location))
            return
        error = task.exception()
        if error is None:
            batch.put(number, task.result())
        elif isinstance(error, CellfeedError):
            batch.put(number, error.with_traceback(None))
        else:  # any error, since somebody waits for the result
            batch.put(number, failure(error, location))

    def _send_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._send)

    async def _bytes_of(self, request: Request) -> memoryview | None:
        """Return the bytes, None if the object does not exist and need not exist."""
        attempts = Attempts(request.location, request.first, request.stop)
        while True:
            try:
                return await self._ask(request)
            except Exception as error:  # noqa: BLE001 - whatever obstore raises
                if request.version is None and is_missing(error):
                    return None
                pause = attempts.pause_after(error)
                if is_overload(error):
                    self._window.overloaded(time.monotonic())
            self.counters.n_repeated += 1
            await asyncio.sleep(pause)

    async def _ask(self, request: Request) -> memoryview:
        began = time.monotonic()
        options = {"range": (request.first, request.stop)}
        got = await self._store.get_async(request.path, options=options)
        answered = time.monotonic()
        if request.version is not None:
            request.version.check(version_of(got.meta))
        content = memoryview(await got.bytes_async())
        now = time.monotonic()
        if request.version is not None and len(content) != request.stop - request.first:
            raise ShortError
        self.counters.n_requests += 1
        self.counters.n_bytes += len(content)
        self.counters.n_wanted += min(request.n_wanted, len(content))
        self.link.note(len(content), answered - began, now)
        self._window.note(began, now, is_full=bool(self._waiting))
        return content


_schedulers = WeakKeyDictionary[Stores, Scheduler]()
_lock = threading.Lock()


def requests_under_way() -> int:
    """Return the current limit of concurrent requests, the largest of any server; 0 without one."""
    with _lock:
        return max((each.limit for each in _schedulers.values()), default=0)


def scheduler_of(location: Location) -> Scheduler:
    """Return the scheduler of the store that contains an object."""
    stores, _ = stores_of(location)
    with _lock:
        return _schedulers.setdefault(stores, Scheduler(stores.store))
