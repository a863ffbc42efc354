"""Objects of a server that contain chunks.

The ranges of a fetch are known before it is read. Neighbouring ranges are joined into requests,
requests into batches that are awaited together, and each answer waits for the fetch that needs it.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._location import LastingIdentity, Location, digest_of
from cellfeed.bytes._remote._client import Version, stores_of
from cellfeed.bytes._remote._scheduler import (
    GAP,
    LARGEST_REQUEST,
    Batch,
    Object,
    Request,
    scheduler_of,
)
from cellfeed.bytes._store import Arrival, ByteStore, joined

Range = tuple[int, int, int]  # file, first byte and number of bytes
Content = bytes | memoryview | NDArray[np.uint8] | None

_REQUESTS_OF_A_BATCH = 32  # that are awaited, and decoded, together
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
        self._process = -1
        self._locations = locations
        self._versions = versions

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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": -1, "_pending": None}

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

    def _enter_process(self) -> None:
        """Forget the requests of another process."""
        stores_of(self._locations(0))  # fails in a fork, as it must
        process = os.getpid()
        if self._process != process:
            with _locks.setdefault(process, threading.Lock()):
                if self._process != process:
                    # Its methods that are used here are atomic, so that no lock is needed.
                    self._pending = weakref.WeakValueDictionary[int, Pending]()
                    self._process = process

    def _sources(
        self, ranges: Ranges
    ) -> Iterator[tuple[Pending, Mapping[Range, Place | bytes], Sequence[int]]]:
        """Iterate over requests that deliver some ranges, with their places, and their numbers.

        Ranges that were not requested are requested.
        """
        self._enter_process()
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
        order, bounds = joined(
            ranges.files[some], firsts[some], lengths[some], GAP, LARGEST_REQUEST
        )
        order, begins = some[order], bounds[:-1]
        objects = dict[int, Object]()
        for file in np.unique(ranges.files[some]).tolist():
            location = self._locations(file)
            objects[file] = Object(location, stores_of(location)[1], self._versions(file))
        requests = [
            Request(objects[file], first, stop, n_wanted, own)
            for file, first, stop, n_wanted, own in zip(
                ranges.files[order[begins]].tolist(),
                firsts[order[begins]].tolist(),
                np.maximum.reduceat((firsts + lengths)[order], begins).tolist(),
                np.add.reduceat(lengths[order], begins).tolist(),
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
