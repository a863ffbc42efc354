"""Objects of a server, in which chunks lie: ranges are expected first, and read when due."""

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

from cellfeed._bytes import (
    LOOK_UP_SECONDS,
    Arrival,
    ByteStore,
    LastingIdentity,
    Location,
    digest_of,
    is_awaited,
)
from cellfeed._bytes._joining import joined
from cellfeed._errors import CellfeedError
from cellfeed._remote._disk_cache import DiskCache, KeptObject
from cellfeed._remote._failures import given_up
from cellfeed._remote._link import LARGEST_REQUEST
from cellfeed._remote._opening import Version, disk_cache, stores_of
from cellfeed._remote._scheduler import Batch, Counters, Request, scheduler_of

__all__ = ["Expected", "RemoteObjects"]

_Range = tuple[int, int, int]
_Content = memoryview | bytes | None
_numbers = count()
_REQUESTS_OF_A_BATCH = 32  # which are waited for, and decoded, together
_HERE = Future[None]()
_HERE.set_result(None)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Where ranges come from.

    Parameters
    ----------
    kept
        Those that this machine's disk has.
    batches
        Requests for the others.
    places
        Where in these each of the others is.
    """

    kept: Mapping[_Range, bytes]
    batches: Sequence[Batch]
    places: Mapping[_Range, "_Place"]


class _Place(NamedTuple):
    """Where a range is in answers: of which request, and its first byte and number of bytes."""

    batch: Batch
    request: int
    first: int
    n_bytes: int


class Expected:
    """Ranges that are on their way, or here; what nobody reads is given up with this object.

    Parameters
    ----------
    wanted
        The ranges: object, first byte and number of bytes.
    asked
        Where they come from, once that is known.
    location
        Of one of the objects, for messages.
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
        """Return the bytes of a range, and whether this machine's disk had them; waits for them.

        Raises
        ------
        CellfeedError
            They cannot be had.
        """
        try:
            return self._read(wanted)
        except CellfeedError:
            self._wanted = frozenset()  # who tries again asks again
            raise

    def arrival(self, wanted: _Range) -> Future[None]:
        """Return what is done once `read` need not wait for a range."""
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
            raise type(answer)(*answer.args)  # one's own: others raise it in other threads
        return (None if answer is None else answer[first : first + n_bytes]), False

    def _where(self) -> _Asked:
        """Return where ranges come from; waits for no more than this machine's disk."""
        # Asked for each range, so that it costs little where nothing is waited for.
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
        Returns the location of each object.
    versions
        Returns the version that each must have, None if any will do.
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
        """What was asked of the server that the objects are on."""
        return scheduler_of(self._locations(0)).counters

    def location_of(self, file: int) -> Location:
        """Return where an object is, for messages."""
        return self._locations(file)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of objects, -1 where there is none or it is not known."""
        found = {file: self._versions(file) for file in np.unique(files).tolist()}
        return np.array(
            [-1 if (one := found[file]) is None else one.size for file in files.tolist()], np.int64
        )

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the first object; of several, `RemoteObjects` knows none."""
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
        """Ask for ranges now; see `ByteStore`."""
        return self._expected_now(_Ranges(files, offsets, sizes)) if files.size else None

    def _expected_now(self, ranges: "_Ranges") -> Expected:
        asked = Future[_Asked]()
        if self._cache() is None:
            asked.set_result(self._ask(ranges))
        else:  # which is read in a thread, as nobody may wait for that here
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
        """Return ranges that were expected, and ask for the others; see `ByteStore`."""
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
        """Return how ranges arrive; see `ByteStore`."""
        ranges = _Ranges(files, offsets, sizes)
        together = dict[tuple[Expected, Future[None]], list[int]]()
        for k, (source, each) in enumerate(zip(self._sources(ranges), ranges.listed, strict=True)):
            together.setdefault((source, source.arrival(each)), []).append(k)
        return [
            Arrival(np.array(own, np.intp), is_here, source)
            for (source, is_here), own in together.items()
        ]

    def _sources(self, ranges: "_Ranges") -> Sequence[Expected]:
        """Return what each range comes with; ask for those that were not expected."""
        if not ranges.listed:
            return []
        stores_of(self._locations(ranges.listed[0][0]))  # what was expected is of no use in a fork
        with self._lock:  # a chunk may be wanted by several fetches: the oldest has it first
            expected = sorted(self._expected, key=lambda each: each.number)
        found = [next((one for one in expected if each in one), None) for each in ranges.listed]
        missing = np.array([k for k, each in enumerate(found) if each is None], np.intp)
        if not missing.size:
            return [each for each in found if each is not None]
        others = ranges.some(missing)
        asked = self._expected_now(others)
        return [asked if each is None else each for each in found]

    def _ask(self, ranges: "_Ranges") -> _Asked:
        """Look for ranges on this machine's disk, and ask the server for the others."""
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
        """Return requests for ranges, and where each range is in them."""
        requests, members = list[Request](), list[tuple[int, int]]()
        files, offsets = ranges.files, ranges.offsets
        numbers, of_file = np.unique(files, return_inverse=True)
        unknown = np.iinfo(np.int64).max
        known = [versions[file] for file in numbers.tolist()]
        limits = np.array([unknown if each is None else each.size for each in known], np.int64)
        # Fewer where a file ends before its range does, which is noticed from what is there.
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
        """Return those ranges that this machine's disk has."""
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
        """Keep what the server sent on this machine's disk, if the user wants that."""
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
    """Iterate over objects, each with the positions at which it is."""
    order = np.argsort(files, kind="stable")
    numbers, begins = np.unique(files[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, begins[1:]), strict=True)


class _Ranges:
    """Byte ranges, as arrays and one by one."""

    def __init__(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        self.files, self.offsets, self.sizes = files, offsets, sizes
        self.listed = list(zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True))

    def some(self, numbers: NDArray[np.intp]) -> "_Ranges":
        """Return those of some numbers."""
        return _Ranges(self.files[numbers], self.offsets[numbers], self.sizes[numbers])


@cache
def _disk_threads() -> ThreadPoolExecutor:
    """Return the threads that read from this machine's disk."""
    return ThreadPoolExecutor(2, thread_name_prefix="cellfeed-kept")
