"""Objects of a server that contain chunks: ranges are announced first, and read when needed."""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._location import LastingIdentity, Location, digest_of
from cellfeed._bytes._remote._disk_cache import DiskCache, KeptObject
from cellfeed._bytes._remote._failures import given_up
from cellfeed._bytes._remote._opening import Version, disk_cache, stores_of
from cellfeed._bytes._remote._scheduler import (
    LARGEST_REQUEST,
    Batch,
    Counters,
    Request,
    scheduler_of,
)
from cellfeed._bytes._store import LOOK_UP_SECONDS, Arrival, ByteStore, is_awaited, joined
from cellfeed._errors import CellfeedError

_Range = tuple[int, int, int]
_Content = memoryview | bytes | None
_numbers = count()
_REQUESTS_OF_A_BATCH = 32  # that are awaited, and decoded, together
_HERE = Future[None]()
_HERE.set_result(None)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Where requested ranges come from.

    Parameters
    ----------
    kept
        The ranges in the cache on this machine's disk.
    batches
        Requests for the others.
    places
        Where each of the others lies in these.
    """

    kept: Mapping[_Range, bytes]
    batches: Sequence[Batch]
    places: Mapping[_Range, "_Place"]


class _Place(NamedTuple):
    """Where a range lies in the answers: in which request, from which byte, and its size."""

    batch: Batch
    request: int
    first: int
    n_bytes: int


class Expected:
    """Announced ranges, requested or already here; unread ones are dropped with this object.

    Parameters
    ----------
    wanted
        Object, first byte and number of bytes of each range.
    asked
        Where they come from, once that is known.
    location
        Location of one of the objects, for messages.
    """

    def __init__(
        self, wanted: Collection[_Range], asked: "Future[_Asked]", location: Location
    ) -> None:
        self.number = next(_numbers)
        self._location = location
        self._wanted = wanted
        self._asked = asked
        giving_up = weakref.finalize(self, _give_up, asked)
        giving_up.atexit = False

    def __contains__(self, wanted: _Range) -> bool:
        return wanted in self._wanted

    def read(self, wanted: _Range) -> tuple[_Content, bool]:
        """Wait for a range; return its bytes, and whether they were cached on this machine's disk.

        Raises
        ------
        CellfeedError
            The bytes cannot be read.
        """
        try:
            return self._read(wanted)
        except CellfeedError:
            self._wanted = frozenset()  # so that a retry requests it again
            raise

    def arrival(self, wanted: _Range) -> Future[None]:
        """Return a future that is done once `read` need not wait for a range."""
        place = self._where().places.get(wanted)
        return _HERE if place is None else place.batch.is_here

    def _read(self, wanted: _Range) -> tuple[_Content, bool]:
        asked = self._where()
        if wanted in asked.kept:
            return asked.kept[wanted], True
        if wanted not in asked.places:  # the object ends before it
            return b"", True
        batch, request, first, n_bytes = asked.places[wanted]
        answer = batch.result()[request]
        if isinstance(answer, CellfeedError):
            raise type(answer)(*answer.args)  # a copy, since other threads raise it too
        return (None if answer is None else answer[first : first + n_bytes]), False

    def _where(self) -> _Asked:
        """Return where ranges come from; waits only for this machine's disk."""
        # Called for each range, so it is cheap when there is nothing to wait for.
        while not self._asked.done() and not wait([self._asked], LOOK_UP_SECONDS).done:
            if not is_awaited():
                raise given_up(self._location)
        return self._asked.result()


def _give_up(asked: "Future[_Asked]") -> None:
    if not asked.cancel():
        asked.add_done_callback(_give_up_batches)


def _give_up_batches(asked: "Future[_Asked]") -> None:
    if asked.exception() is None:
        for batch in asked.result().batches:
            batch.give_up()


class RemoteObjects(ByteStore):
    """Objects of one store, numbered from 0.

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
        self._locations = locations
        self._versions = versions
        self._expected = weakref.WeakSet[Expected]()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: each for name, each in self.__dict__.items() if name != "_lock"}
        return kept | {"_expected": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_expected": weakref.WeakSet(), "_lock": threading.Lock()}

    @property
    def counters(self) -> Counters:
        """Counters of the requests to the store that contains the objects."""
        return scheduler_of(self._locations(0)).counters

    def location_of(self, file: int) -> Location:
        """Return the location of an object, for messages."""
        return self._locations(file)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of objects in bytes, -1 for missing ones and unknown sizes."""
        found = {file: self._versions(file) for file in np.unique(files).tolist()}
        return np.array(
            [-1 if (one := found[file]) is None else one.size for file in files.tolist()], np.int64
        )

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the first object; None if there are several."""
        version = self._versions(0)
        if version is None or version.etag is None:
            return None
        return LastingIdentity(digest_of(str(self._locations(0)), version.etag), is_settled=True)

    def expect(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Expected | None:
        """Request ranges now; see `ByteStore`."""
        return self._expected_now(_Ranges(files, offsets, sizes)) if files.size else None

    def _expected_now(self, ranges: "_Ranges") -> Expected:
        asked = Future[_Asked]()
        if self._cache() is None:
            asked.set_result(self._ask(ranges))
        else:  # the disk is read in another thread, since this call must not block
            asked = _disk_threads().submit(self._ask, ranges)
        expected = Expected(set(ranges.listed), asked, self._locations(ranges.listed[0][0]))
        with self._lock:
            self._expected.add(expected)
        return expected

    def read_ranges(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[_Content]:
        """Return ranges; request those that were not announced; see `ByteStore`."""
        ranges = _Ranges(files, offsets, sizes)
        found, arrived = list[_Content](), list[int]()
        for k, (source, each) in enumerate(zip(self._sources(ranges), ranges.listed, strict=True)):
            content, was_kept = source.read(each)
            found.append(content)
            if not was_kept:
                arrived.append(k)
        self._keep(ranges, found, arrived)
        return found

    def arrivals(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[Arrival]:
        """Return futures of the ranges; see `ByteStore`."""
        ranges = _Ranges(files, offsets, sizes)
        together = dict[tuple[Expected, Future[None]], list[int]]()
        for k, (source, each) in enumerate(zip(self._sources(ranges), ranges.listed, strict=True)):
            together.setdefault((source, source.arrival(each)), []).append(k)
        return [
            Arrival(np.array(own, np.intp), is_here, source)
            for (source, is_here), own in together.items()
        ]

    def _sources(self, ranges: "_Ranges") -> Sequence[Expected]:
        """Return the announcement that delivers each range; request those not announced."""
        if not ranges.listed:
            return []
        stores_of(self._locations(ranges.listed[0][0]))  # fails in a fork, as it must
        with self._lock:  # several fetches may want one chunk: the oldest has it first
            expected = sorted(self._expected, key=lambda each: each.number)
        found = [next((one for one in expected if each in one), None) for each in ranges.listed]
        missing = np.array([k for k, each in enumerate(found) if each is None], np.intp)
        if not missing.size:
            return [each for each in found if each is not None]
        others = ranges.some(missing)
        asked = self._expected_now(others)
        return [asked if each is None else each for each in found]

    def _ask(self, ranges: "_Ranges") -> _Asked:
        """Look ranges up in this machine's disk cache, and request the others from the server."""
        versions = {file: self._versions(file) for file in np.unique(ranges.files).tolist()}
        kept = self._kept(ranges, versions)
        others = np.array([k for k, each in enumerate(ranges.listed) if each not in kept], np.intp)
        batches, places = self._batches(ranges.some(others), versions)
        if batches:
            scheduler_of(batches[0].requests[0].location).submit(batches)
        return _Asked(kept, batches, places)

    def _batches(
        self, ranges: "_Ranges", versions: Mapping[int, Version | None]
    ) -> tuple[list[Batch], dict[_Range, _Place]]:
        """Return requests for ranges, and where each range lies in them."""
        requests, members = list[Request](), list[tuple[int, int]]()
        files, offsets = ranges.files, ranges.offsets
        numbers, of_file = np.unique(files, return_inverse=True)
        unknown = np.iinfo(np.int64).max
        known = [versions[file] for file in numbers.tolist()]
        limits = np.array([unknown if each is None else each.size for each in known], np.int64)
        # A file may end before its range does; the size of the answer shows it.
        there = np.clip(limits[of_file] - offsets, 0, ranges.sizes)
        some = np.flatnonzero(there)
        if not some.size:
            return [], {}
        gap = scheduler_of(self._locations(int(files[0]))).link.worthwhile_gap
        order, bounds = joined(files[some], offsets[some], there[some], gap, LARGEST_REQUEST)
        order = some[order]
        for begin, end in pairwise(bounds.tolist()):
            own = order[begin:end]
            file, first = int(files[own[0]]), int(offsets[own[0]])
            stop = int((offsets[own] + there[own]).max())
            members += ((k, len(requests)) for k in own.tolist())
            location = self._locations(file)
            path, n_wanted = stores_of(location)[1], int(there[own].sum())
            requests.append(Request(location, path, versions[file], first, stop, n_wanted))
        n = _REQUESTS_OF_A_BATCH
        batches = [Batch(requests[begin : begin + n]) for begin in range(0, len(requests), n)]
        places = dict[_Range, _Place]()
        for k, number in members:
            batch, own_number = divmod(number, n)
            each, first = ranges.listed[k], requests[number].first
            places[each] = _Place(batches[batch], own_number, each[1] - first, int(there[k]))
        return batches, places

    def _cache(self) -> DiskCache | None:
        return disk_cache("bytes", self._locations(0).options.cache_bytes)

    def _kept_object(self, file: int, version: Version | None) -> KeptObject | None:
        cache = self._cache()
        if cache is None or version is None:
            return None
        return cache.object(str(self._locations(file)), version.strong_etag, version.size)

    def _kept(
        self, ranges: "_Ranges", versions: Mapping[int, Version | None]
    ) -> Mapping[_Range, bytes]:
        """Return the ranges that are cached on this machine's disk."""
        found = dict[_Range, bytes]()
        if self._cache() is None:
            return found
        for file, own in _by_file(ranges.files):
            kept = self._kept_object(file, versions[file])
            if kept is not None:
                contents = kept.read(ranges.offsets[own], ranges.sizes[own])
                for k, content in zip(own.tolist(), contents, strict=True):
                    if content is not None:
                        found[ranges.listed[k]] = content
        return found

    def _keep(self, ranges: "_Ranges", found: Sequence[_Content], arrived: Sequence[int]) -> None:
        """Cache ranges from the server on this machine's disk, if the user enabled that."""
        if not arrived or self._cache() is None:
            return
        numbers = np.array(arrived, np.intp)
        for file, own in _by_file(ranges.files[numbers]):
            kept = self._kept_object(file, self._versions(file))
            if kept is None:
                continue
            whole = [
                (k, content)
                for k in numbers[own].tolist()
                if (content := found[k]) is not None and len(content) == ranges.sizes[k]
            ]
            offsets = ranges.offsets[[k for k, _ in whole]]
            kept.write(offsets, [content for _, content in whole])


def _by_file(files: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Iterate over objects, each with its positions in ``files``."""
    order = np.argsort(files, kind="stable")
    numbers, begins = np.unique(files[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, begins[1:]), strict=True)


class _Ranges:
    """Byte ranges, as arrays and as a sequence."""

    def __init__(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        self.files, self.offsets, self.sizes = files, offsets, sizes
        self.listed = list(zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True))

    def some(self, numbers: NDArray[np.intp]) -> "_Ranges":
        """Return the ranges with these numbers."""
        return _Ranges(self.files[numbers], self.offsets[numbers], self.sizes[numbers])


@cache
def _disk_threads() -> ThreadPoolExecutor:
    """Return the threads that read from this machine's disk."""
    return ThreadPoolExecutor(2, thread_name_prefix="cellfeed-kept")
