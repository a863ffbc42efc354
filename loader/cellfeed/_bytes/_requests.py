"""Byte ranges that are requested before they are read, many at a time.

The ranges of a fetch are known before it is read. Neighbouring ranges are joined into requests,
requests into batches that are awaited together, and each answer waits for the fetch that needs it.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._location import Location
from cellfeed._bytes._store import (
    LOOK_UP_SECONDS,
    Arrival,
    ByteStore,
    UnreadableRangeError,
    is_awaited,
)
from cellfeed._errors import CellfeedError, RemoteError

Range = tuple[int, int, int]  # file, first byte and number of bytes
Content = bytes | memoryview | NDArray[np.uint8] | None

_FILE_BITS = 44  # keep the bytes of different objects apart
_numbers = count()
_locks = dict[int, threading.Lock]()  # by process, since a fork copies a lock that is held
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


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Bytes of one file that are requested together.

    Parameters
    ----------
    file, first, stop
        The file, the first byte, and the end.
    n_wanted
        Number of these bytes that are needed; the others are gaps.
    ranges
        Numbers of the ranges that lie in these bytes.
    """

    file: int
    first: int
    stop: int
    n_wanted: int
    ranges: Sequence[int]


class Batch(ABC):
    """Requests that are awaited together.

    Parameters
    ----------
    requests
        The requests.
    location
        Location of one of the files, for messages.

    Attributes
    ----------
    answers
        For each request the bytes, None if there is no such file, or the error.
    is_here
        Done once each request is answered, or has failed.
    is_cancelled
        Whether the requests are no longer needed.
    """

    def __init__(self, requests: Sequence[Request], location: Location) -> None:
        self.requests = requests
        self.location = location
        self.answers: list[Content | Exception] = [None] * len(requests)
        self.is_here = Future[None]()
        self.is_cancelled = False

    def result(self) -> Sequence[Content | Exception]:
        """Wait for all answers.

        Each request ends in bounded time, so this does too, and immediately when the process exits,
        which must not wait for a server.

        Raises
        ------
        RemoteError
            The requests are no longer needed, as when the process exits.
        """
        while not self.is_here.done() and not wait([self.is_here], LOOK_UP_SECONDS).done:
            if self.is_cancelled or not is_awaited():  # others may still be waiting for it
                raise cancelled(self.location)
        self.is_here.result()
        return self.answers

    @abstractmethod
    def cancel(self) -> None:
        """Cancel requests that have not been answered; from any thread, and without waiting."""


class Place(NamedTuple):
    """The request of a range, and its first byte in the answer."""

    batch: Batch
    request: int
    first: int


class Pending:
    """Ranges that were requested; requests are cancelled when this object is dropped.

    Parameters
    ----------
    ranges
        The ranges.
    places
        Where each of them comes from, or its bytes, once that is known.
    location
        Location of one of the files, for messages.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        places: Future[Mapping[Range, Place | Content]],
        location: Location,
    ) -> None:
        self.ranges = set(ranges)
        self._places = places
        self._location = location
        weakref.finalize(self, _cancel, places).atexit = False

    def places(self) -> Mapping[Range, Place | Content]:
        """Return where ranges come from; waits only for this machine's disk."""
        while not self._places.done() and not wait([self._places], LOOK_UP_SECONDS).done:
            if not is_awaited():
                raise cancelled(self._location)
        return self._places.result()


def _cancel(places: Future[Mapping[Range, Place | Content]]) -> None:
    if not places.cancel():
        places.add_done_callback(_cancel_batches)


def _cancel_batches(places: Future[Mapping[Range, Place | Content]]) -> None:
    if places.exception() is None:
        for batch in {each.batch for each in places.result().values() if isinstance(each, Place)}:
            batch.cancel()


class RequestingStore(ByteStore):
    """Files whose ranges are requested before they are read.

    Attributes
    ----------
    largest_request
        Maximum number of bytes of a request, unless a single range has more.
    """

    largest_request = 1 << 20

    def __init__(self) -> None:
        self._process = -1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": -1, "_pending": None}

    @abstractmethod
    def _gap(self) -> int:
        """Return up to how many bytes between ranges are requested with them."""

    @abstractmethod
    def _send(self, requests: Sequence[Request]) -> Sequence[Batch]:
        """Send requests, without waiting; return the batches that contain them in this order."""

    def _limits(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of files, -1 for missing ones, the largest number for unknown sizes."""
        return self.sizes(files)

    def _enter_process(self) -> None:
        """Forget the requests of another process."""
        process = os.getpid()
        if self._process != process:
            with _locks.setdefault(process, threading.Lock()):
                if self._process != process:
                    self._reset()
                    self._process = process

    def _reset(self) -> None:
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
        self._enter_process()
        return self._request(Ranges(files, offsets, sizes))

    def arrivals(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[Arrival]:
        """Return the arrivals of ranges; see `ByteStore`."""
        ranges, arrivals = Ranges(files, offsets, sizes), list[Arrival]()
        for pending, numbers in self._sources(ranges):
            places, together = pending.places(), dict[Future[None], list[int]]()
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
        answered = list[int]()
        for pending, numbers in self._sources(ranges):
            places = pending.places()
            for k in numbers:
                place = places[ranges.listed[k]]
                if not isinstance(place, Place):
                    found[k] = place
                    continue
                try:
                    found[k] = _content(place, ranges.listed[k][2])
                except CellfeedError:
                    pending.ranges.clear()  # so that a retry requests them again
                    raise
                except OSError as error:
                    raise UnreadableRangeError(k) from error
                answered.append(k)
        self._received(ranges, found, answered)
        return found

    def _received(self, ranges: Ranges, found: Sequence[Content], answered: Sequence[int]) -> None:
        """Handle ranges that were read, ``answered`` of them by requests."""

    def _sources(self, ranges: Ranges) -> Iterator[tuple[Pending, Sequence[int]]]:
        """Iterate over requests that deliver some ranges, with the numbers of these.

        Ranges that were not requested are requested.
        """
        self._enter_process()
        remaining: Sequence[int] = range(len(ranges.listed))
        for reference in self._pending.valuerefs():  # the oldest fetch is read first
            pending = reference()
            if pending is not None and remaining:
                own, others = list[int](), list[int]()
                for k in remaining:
                    (own if ranges.listed[k] in pending.ranges else others).append(k)
                remaining = others
                if own:
                    yield pending, own
        if remaining:
            yield self._request(ranges[remaining]), remaining

    def _request(self, ranges: Ranges) -> Pending:
        location = self.location_of(ranges.listed[0][0])
        pending = Pending(ranges.listed, self._start(ranges), location)
        self._pending[next(_numbers)] = pending
        return pending

    def _start(self, ranges: Ranges) -> Future[Mapping[Range, Place | Content]]:
        """Request ranges; return where they come from, once that is known."""
        places = Future[Mapping[Range, Place | Content]]()
        places.set_result(self._places(ranges))
        return places

    def _places(self, ranges: Ranges) -> dict[Range, Place | Content]:
        """Request ranges; return where each comes from, or its bytes."""
        limits = self._limits(ranges.files)
        stops = np.minimum(ranges.offsets + ranges.sizes, limits)
        firsts, lengths = ranges.offsets, np.maximum(stops - ranges.offsets, 0)
        is_empty = lengths == 0  # a file may end before its range does
        some = np.flatnonzero(~is_empty)
        places: dict[Range, Place | Content]
        places = {ranges.listed[k]: b"" for k in np.flatnonzero(is_empty).tolist()}
        if not some.size:
            return places
        order, bounds = joined(
            ranges.files[some], firsts[some], lengths[some], self._gap(), self.largest_request
        )
        order, begins = some[order], bounds[:-1]
        sent = self._send(
            [
                Request(file, first, stop, n_wanted, own)
                for file, first, stop, n_wanted, own in zip(
                    ranges.files[order[begins]].tolist(),
                    firsts[order[begins]].tolist(),
                    np.maximum.reduceat((firsts + lengths)[order], begins).tolist(),
                    np.add.reduceat(lengths[order], begins).tolist(),
                    (order[slice(*each)].tolist() for each in pairwise(bounds.tolist())),
                    strict=True,
                )
            ]
        )
        for batch in sent:
            for number, request in enumerate(batch.requests):
                for k in request.ranges:
                    each = ranges.listed[k]
                    places[each] = Place(batch, number, each[1] - request.first)
        return places


def _content(place: Place, size: int) -> Content:
    """Wait for the bytes of a range, and return them."""
    answer = place.batch.result()[place.request]
    if isinstance(answer, CellfeedError):
        raise type(answer)(*answer.args)  # a copy, since other threads raise it too
    if isinstance(answer, OSError):
        raise OSError(answer.errno, answer.strerror)
    if isinstance(answer, Exception):
        raise answer
    return None if answer is None else answer[place.first : place.first + size]


def cancelled(location: Location) -> RemoteError:
    """Return the exception that is raised if reading is cancelled."""
    return RemoteError(
        f"{location}: reading was cancelled, since nothing waits for it; read it again"
    )


def joined(
    files: NDArray[np.int64],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    gap: int,
    largest: int,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return which ranges are requested together.

    Parameters
    ----------
    files, offsets, sizes
        Number of the object, first byte and number of bytes of each range, int64, shape (n,).
    gap
        Maximum number of bytes between two joined ranges.
    largest
        Maximum number of bytes of a request, unless a single range has more.

    Returns
    -------
    The order of ranges by object and first byte, and the start of each request in this order, with
    the end of the last, shape (n_requests + 1,).
    """
    if not len(files):
        return np.empty(0, np.intp), np.zeros(1, np.intp)
    order = np.lexsort((offsets, files))
    files, offsets, sizes = files[order], offsets[order], sizes[order]
    apart = np.cumsum(np.diff(files, prepend=files[0]) != 0) << _FILE_BITS
    ends = np.maximum.accumulate(offsets + sizes + apart) - apart
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (files[1:] != files[:-1]) | (offsets[1:] - ends[:-1] > gap)
    starts = np.flatnonzero(is_first)
    bounds = [0]
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        # What became too large is divided again, between ranges.
        while ends[end - 1] - offsets[begin] > largest and end - begin > 1:
            fits = ends[begin:end] - offsets[begin] <= largest
            begin += max(1, int(np.count_nonzero(fits)))  # noqa: PLW2901 - what is left of it
            if begin < end:
                bounds.append(begin)
            else:
                break
        bounds.append(end)
    return order, np.unique(np.array(bounds, np.intp))
