"""Objects of a server, in which chunks lie: ranges are expected first, and read when due."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore, LastingIdentity, Location, digest_of
from cellfeed._errors import CellfeedError
from cellfeed._remote._joining import joined
from cellfeed._remote._opening import Version, object_store
from cellfeed._remote._scheduler import Batch, Counters, Request, scheduler_of

__all__ = ["Expected", "RemoteObjects"]

_Range = tuple[int, int, int]
_Content = memoryview | bytes | None


class Expected:
    """Ranges that are on their way, or here; what nobody reads is given up with this object.

    Parameters
    ----------
    batch
        The requests.
    places
        For each range the request that it is in, and its first byte and number of bytes there.
    """

    def __init__(self, batch: Batch, places: dict[_Range, tuple[int, int, int]]) -> None:
        self._batch = batch
        self._places = places
        self._giving_up = weakref.finalize(self, batch.give_up)
        self._giving_up.atexit = False

    def __contains__(self, wanted: _Range) -> bool:
        return wanted in self._places

    def read(self, wanted: _Range) -> _Content:
        """Return the bytes of a range; waits for all of them.

        Raises
        ------
        CellfeedError
            They cannot be had.
        """
        number, first, n_bytes = self._places[wanted]
        answer = self._batch.result()[number]
        if isinstance(answer, CellfeedError):
            raise answer
        return None if answer is None else answer[first : first + n_bytes]


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
        if not files.size:
            return None
        scheduler = scheduler_of(self._locations(int(files[0])))
        versions = {file: self._versions(file) for file in np.unique(files).tolist()}
        ends = offsets + sizes
        for file, version in versions.items():
            if version is not None:  # a file that is too short is noticed from what is there
                ends = np.where(files == file, np.minimum(ends, version.size), ends)
        there = np.maximum(ends - offsets, 0)
        order, bounds = joined(files, offsets, there, scheduler.link.worthwhile_gap)
        requests, places = list[Request](), dict[_Range, tuple[int, int, int]]()
        columns = (files.tolist(), offsets.tolist(), sizes.tolist(), there.tolist())
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            own = order[begin:end].tolist()
            file, first = columns[0][own[0]], columns[1][own[0]]
            stop = max(columns[1][k] + columns[3][k] for k in own)
            location, version = self._locations(file), versions[file]
            for k in own:
                wanted = columns[0][k], columns[1][k], columns[2][k]
                places[wanted] = len(requests), columns[1][k] - first, columns[3][k]
            requests.append(
                Request(
                    location,
                    object_store(location)[1],
                    version,
                    first,
                    stop,
                    sum(columns[3][k] for k in own),
                )
            )
        batch = Batch(requests)
        scheduler.submit(batch)
        expected = Expected(batch, places)
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
        wanted = list(zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True))
        with self._lock:
            expected = list(self._expected)
        sources = [next((one for one in expected if each in one), None) for each in wanted]
        missing = np.array([k for k, each in enumerate(sources) if each is None], np.intp)
        asked = self.expect(files[missing], offsets[missing], sizes[missing])
        found = [
            (asked if source is None else source, each)
            for source, each in zip(sources, wanted, strict=True)
        ]
        return [None if source is None else source.read(each) for source, each in found]
