"""Requests for bytes of objects: which ranges are joined, and how many are in flight.

The ranges of a fetch are known before it is read. Neighbouring ranges are joined into requests,
requests into batches that are awaited together, and each answer waits for the fetch that needs it.
Requests are sent in the order in which they were submitted; answers come in any order. Sending runs
in the thread of the event loop, so it needs no lock.
"""

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import CellfeedError, PathError
from cellfeed.bytes._location import LastingIdentity, Location, digest_of
from cellfeed.bytes._remote._client import (
    Stores,
    Version,
    cancelled,
    errors_named,
    in_loop,
    is_forked,
    stores_of,
)
from cellfeed.bytes._store import LOOK_UP_SECONDS, Arrival, ByteStore, is_cancelled

# Bytes after which no further range begins: a larger request would arrive late, and occupy memory,
# as a whole.
LARGEST_REQUEST = 1 << 23
# A gap of so many bytes between two ranges is read, too. On the loopback interface, a request costs
# about the processor time of reading these; at 125 MB/s, they take 0.5 ms.
GAP = 1 << 16

# Joining byte ranges that lie near each other.

_FILE_BITS = 44  # keep the bytes of different objects apart


def joined(
    files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64], gap: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return which ranges are requested together.

    Parameters
    ----------
    files, offsets, sizes
        Number of the object, first byte and number of bytes of each range, int64, shape (n,).
    gap
        Maximum number of bytes between two joined ranges.

    Returns
    -------
    The order of ranges by object and first byte, and the start of each request in this order, with
    the end of the last, shape (n_requests + 1,).
    """
    order = np.lexsort((offsets, files))
    files, offsets, sizes = files[order], offsets[order], sizes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = files[1:] != files[:-1]
    apart = np.cumsum(is_first) << _FILE_BITS
    ends = np.maximum.accumulate(offsets + sizes + apart) - apart
    is_first[1:] |= offsets[1:] - ends[:-1] > gap
    begins = offsets[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    is_first[1:] |= np.diff((offsets - begins) // LARGEST_REQUEST) != 0
    return order, np.append(np.flatnonzero(is_first), len(order))


# The number of concurrent requests.

_FIRST, _LEAST, _MOST = 8, 4, 256
_GROWTH = 2
_RISE, _GAIN = 1.4, 1.1  # of throughput: to double again, and to keep the limit
_ROUNDS_ON_A_PLATEAU = 8


class Window:
    """The limit of concurrent requests: it grows as long as that raises throughput.

    Throughput is the number of concurrent requests divided by the duration of one, by Little's law.
    The duration is the median over requests that were sent at the present limit, once as many of
    them were answered as the limit allows. Requests that open a connection take longer, but are
    fewer than half. The limit doubles until doubling raises throughput by less than two fifths, and
    is reset if it raised it by less than a tenth; some rounds later doubling is tried again.

    Attributes
    ----------
    first
        Initial limit of new instances in this process.
    """

    first = _FIRST

    def __init__(self) -> None:
        self.limit = self.first
        self._before = self.first  # the limit before the last growth
        self._best = 0.0
        self._n_rounds = 0
        self._seconds = list[float]()
        self._since = 0.0

    def record(self, began: float, now: float, *, is_full: bool) -> None:
        """Record a request that was answered, and whether others are queued."""
        if began < self._since:
            return
        if not is_full:  # a limit that does not bind cannot be judged
            self._begin_round(now)
            return
        self._seconds.append(now - began)
        if len(self._seconds) >= self.limit:
            self._end_round(self.limit / max(median(self._seconds), 1e-6))
            self._begin_round(now)

    def _end_round(self, rate: float) -> None:
        self._n_rounds += 1
        if rate > self._best * _RISE or self._n_rounds > _ROUNDS_ON_A_PLATEAU:
            self._best, self._n_rounds, self._before = rate, 0, self.limit
            self.limit = min(self.limit * _GROWTH, _MOST)
        elif self._n_rounds == 1 and rate < self._best * _GAIN:
            self.limit = self._before  # the last growth brought nothing

    def _begin_round(self, now: float) -> None:
        self._since = now
        self._seconds.clear()


def begin_with_requests(n: int) -> None:
    """Set the initial number of concurrent requests to servers that this process has not used yet.

    Use it in short-lived processes, which would end before they have found how many requests a link
    sustains: pass the result of `requests_under_way` from an earlier process.

    Parameters
    ----------
    n
        Number of requests, clipped to [4, 256].
    """
    Window.first = max(_LEAST, min(n, _MOST))


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Bytes of one object that are requested together.

    Parameters
    ----------
    location, path
        The object, and its path in the store.
    version
        The version that it must have; None if any is accepted.
    first, stop
        The first byte, and the end.
    ranges
        Numbers of the ranges that lie in these bytes.
    """

    location: Location
    path: str
    version: Version | None
    first: int
    stop: int
    ranges: Sequence[int]


class Batch:
    """Requests to a store that are awaited together.

    Parameters
    ----------
    requests
        The requests. An object whose version is not known may end before them.

    Attributes
    ----------
    location
        Location of one of the objects, for messages.
    is_here
        Done once each request is answered, or has failed.
    is_cancelled
        Whether the requests are no longer needed.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests, self.location = requests, requests[0].location
        self._answers: list[memoryview | BaseException | None] = [None] * len(requests)
        self.is_here = Future[None]()
        self.is_cancelled = False
        self.tasks = set[asyncio.Task[memoryview | None]]()
        self._n_left = len(requests)

    def result(self, number: int) -> memoryview | None:
        """Wait for all answers; return that of one request, None if there is no such object.

        Each request ends in bounded time, so this does too, and immediately when the process exits,
        which must not wait for a server.

        Raises
        ------
        RemoteError
            The requests are no longer needed, as when the process exits.
        CellfeedError
            The request failed.
        """
        while not self.is_here.done() and not wait([self.is_here], LOOK_UP_SECONDS).done:
            if self.is_cancelled or is_cancelled():  # others may still be waiting for it
                raise cancelled(self.location)
        answer = self._answers[number]
        if isinstance(answer, CellfeedError):
            raise type(answer)(*answer.args)  # a copy, as other threads raise it too
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def cancel(self) -> None:
        """Cancel requests that have not been answered; from any thread, and without waiting."""
        if not self.is_here.done() and not is_forked():
            in_loop(self._cancel)

    def _cancel(self) -> None:
        self.is_cancelled = True
        for task in list(self.tasks):
            task.cancel()

    def put(self, number: int, answer: memoryview | BaseException | None) -> None:
        """Store an answer."""
        self._answers[number] = answer
        self._n_left -= 1
        if not self._n_left:
            self.is_here.set_result(None)


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
        self._n_in_flight = 0
        self.window = Window()

    def submit(self, batches: Sequence[Batch]) -> None:
        """Queue requests; from any thread, and without waiting."""
        in_loop(self._submit, batches)

    def _submit(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._waiting += ((batch, number) for number in range(len(batch.requests)))
        self._send()

    def _send(self) -> None:
        while self._waiting and self._n_in_flight < self.window.limit:
            batch, number = self._waiting.popleft()
            if batch.is_cancelled:
                continue
            self._n_in_flight += 1
            request = batch.requests[number]
            receiving = self._receive(request)
            task = asyncio.get_running_loop().create_task(receiving)
            batch.tasks.add(task)
            # Also called for a task that was cancelled before it began.
            task.add_done_callback(partial(self._answered, batch, number))

    def _answered(self, batch: Batch, number: int, task: "asyncio.Task[memoryview | None]") -> None:
        self._n_in_flight -= 1
        asyncio.get_running_loop().call_soon(self._send)
        batch.tasks.discard(task)
        if task.cancelled():
            batch.put(number, cancelled(batch.requests[number].location))
            return
        error = task.exception()
        if error is None:
            batch.put(number, task.result())
        elif isinstance(error, CellfeedError):
            batch.put(number, error.with_traceback(None))
        else:  # of our own code, since somebody waits for the result
            batch.put(number, error)

    async def _receive(self, request: Request) -> memoryview | None:
        """Return the bytes, None if the object does not exist and need not exist."""
        where, began = (request.location, request.first, request.stop), time.monotonic()
        try:
            with errors_named(*where):
                got = await self._store.get_async(request.path, options={"range": where[1:]})
                content = memoryview(await got.bytes_async())
                if request.version is not None:
                    request.version.check(got, content, *where)
        except PathError:
            if request.version is None:
                return None
            raise
        self.window.record(began, time.monotonic(), is_full=bool(self._waiting))
        return content


_schedulers = WeakKeyDictionary[Stores, Scheduler]()
_lock = threading.Lock()


def requests_under_way() -> int:
    """Return the current limit of concurrent requests, the largest of any server; 0 without one."""
    with _lock:
        return max((each.window.limit for each in _schedulers.values()), default=0)


def scheduler_of(location: Location) -> Scheduler:
    """Return the scheduler of the store that contains an object."""
    stores, _ = stores_of(location)
    with _lock:
        return _schedulers.setdefault(stores, Scheduler(stores.store))


# The objects of an array, and the requests for their ranges.

Range = tuple[int, int, int]  # file, first byte and number of bytes
Content = bytes | memoryview | NDArray[np.uint8] | None

_REQUESTS_OF_A_BATCH = 32  # that are awaited, and decoded, together
_numbers = count()
_HERE = Future[None]()
_HERE.set_result(None)


class Ranges:
    """Byte ranges, as arrays and as a list."""

    def __init__(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        self.files, self.offsets, self.sizes = files, offsets, sizes
        self.listed = list[Range](
            zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        )

    def __getitem__(self, numbers: Sequence[int]) -> "Ranges":
        own = np.array(numbers, np.intp)
        return Ranges(self.files[own], self.offsets[own], self.sizes[own])


class Place(NamedTuple):
    """The request of a range, and its first byte in the answer."""

    batch: Batch
    request: int
    first: int


class Pending:
    """Ranges that were requested; requests are cancelled when this object is dropped.

    Parameters
    ----------
    places
        The request of each range, or its bytes if there are none.
    """

    def __init__(self, places: Mapping[Range, Place | bytes]) -> None:
        self.places = places
        batches = {each.batch for each in places.values() if isinstance(each, Place)}
        weakref.finalize(self, _cancel, batches).atexit = False


def _cancel(batches: Iterable[Batch]) -> None:
    for each in batches:
        each.cancel()


_State = tuple[Callable[[int], Location], Callable[[int], Version | None]]


class RemoteObjects(ByteStore):
    """Objects of one store, numbered from 0, whose ranges are requested before they are read.

    Parameters
    ----------
    locations
        Returns the location of each object by number.
    versions
        Returns the version that each object must have, None if any version is accepted.
    """

    def __init__(
        self,
        locations: Callable[[int], Location],
        versions: Callable[[int], Version | None],
    ) -> None:
        self.__setstate__((locations, versions))

    def location_of(self, file: int) -> Location:
        """Return the location of an object, for messages."""
        return self._locations(file)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of objects in bytes, -1 for missing ones and unknown sizes."""
        return self._sizes(files, -1)

    def _sizes(self, files: NDArray[np.int64], unknown: int) -> NDArray[np.int64]:
        distinct, number_of = np.unique(files, return_inverse=True)
        versions = [self._versions(file) for file in distinct.tolist()]
        sizes = [unknown if each is None else each.size for each in versions]
        return np.array(sizes, np.int64)[number_of]

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the first object; None if its server gives no ETag."""
        version = self._versions(0)
        if version is None or version.etag is None:
            return None
        return LastingIdentity(digest_of(str(self._locations(0)), version.etag), is_settled=True)

    def __getstate__(self) -> _State:
        return self._locations, self._versions

    def __setstate__(self, state: _State) -> None:
        self._locations, self._versions = state
        # Its methods that are used here are atomic, so that no lock is needed.
        self._pending = weakref.WeakValueDictionary[int, Pending]()

    def expect(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Pending | None:
        """Request ranges now; see `ByteStore`."""
        if not files.size:
            return None
        return self._request(Ranges(files, offsets, sizes))

    def arrivals(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[Arrival]:
        """Return the arrivals of ranges; see `ByteStore`."""
        ranges, arrivals = Ranges(files, offsets, sizes), list[Arrival]()
        for pending, places, numbers in self._sources(ranges):
            together = dict[Future[None], list[int]]()
            for k in numbers:
                place = places[ranges.listed[k]]
                is_here = place.batch.is_here if isinstance(place, Place) else _HERE
                together.setdefault(is_here, []).append(k)
            arrivals += [
                Arrival(np.array(own, np.intp), is_here, pending)
                for is_here, own in together.items()
            ]
        return arrivals

    def read_ranges(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[Content]:
        """Return ranges; request those that were not expected; see `ByteStore`."""
        ranges = Ranges(files, offsets, sizes)
        found: list[Content] = [None] * files.size
        for pending, places, numbers in self._sources(ranges):
            for k in numbers:
                place = places[ranges.listed[k]]
                if not isinstance(place, Place):
                    found[k] = place
                    continue
                try:
                    answer = place.batch.result(place.request)
                except Exception:
                    pending.places = {}  # so that a retry requests them again
                    raise
                if answer is not None:
                    found[k] = answer[place.first : place.first + ranges.listed[k][2]]
        return found

    def _sources(
        self, ranges: Ranges
    ) -> Iterator[tuple[Pending, Mapping[Range, Place | bytes], Sequence[int]]]:
        """Iterate over requests that deliver some ranges, with their places, and their numbers.

        Ranges that were not requested are requested.
        """
        stores_of(self._locations(0))  # fails in a fork, where nothing that is pending arrives
        remaining: Sequence[int] = range(len(ranges.listed))
        for reference in self._pending.valuerefs():  # the oldest fetch is read first
            pending = reference()
            if pending is not None and remaining:
                places, own, others = pending.places, list[int](), list[int]()
                for k in remaining:
                    (own if ranges.listed[k] in places else others).append(k)
                remaining = others
                if own:
                    yield pending, places, own
        if remaining:
            pending = self._request(ranges[remaining])
            yield pending, pending.places, remaining

    def _request(self, ranges: Ranges) -> Pending:
        """Request ranges, without waiting."""
        limits = self._sizes(ranges.files, np.iinfo(np.int64).max)
        stops = np.minimum(ranges.offsets + ranges.sizes, limits)
        firsts, lengths = ranges.offsets, np.maximum(stops - ranges.offsets, 0)
        is_empty = lengths == 0  # a file may end before its range does
        some = np.flatnonzero(~is_empty)
        places: dict[Range, Place | bytes]
        places = {ranges.listed[k]: b"" for k in np.flatnonzero(is_empty).tolist()}
        order, bounds = joined(ranges.files[some], firsts[some], lengths[some], GAP)
        order, begins = some[order], bounds[:-1]
        objects = dict[int, tuple[Location, str, Version | None]]()
        for file in np.unique(ranges.files[some]).tolist():
            location = self._locations(file)
            objects[file] = location, stores_of(location)[1], self._versions(file)
        requests = [
            Request(*objects[file], first, stop, own)
            for file, first, stop, own in zip(
                ranges.files[order[begins]].tolist(),
                firsts[order[begins]].tolist(),
                np.maximum.reduceat((firsts + lengths)[order], begins).tolist(),
                (order[slice(*each)].tolist() for each in pairwise(bounds.tolist())),
                strict=True,
            )
        ]
        n = _REQUESTS_OF_A_BATCH
        batches = [Batch(requests[k : k + n]) for k in range(0, len(requests), n)]
        scheduler_of(self._locations(0)).submit(batches)
        for batch in batches:
            for number, request in enumerate(batch.requests):
                for k in request.ranges:
                    each = ranges.listed[k]
                    places[each] = Place(batch, number, each[1] - request.first)
        pending = Pending(places)
        self._pending[next(_numbers)] = pending
        return pending
