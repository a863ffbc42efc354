"""Objects of a server that contain chunks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._location import LastingIdentity, Location, digest_of
from cellfeed._bytes._remote._client import Version, disk_cache, stores_of
from cellfeed._bytes._remote._disk_cache import DiskCache, ObjectVersion
from cellfeed._bytes._remote._scheduler import LARGEST_REQUEST, Object, RemoteBatch, scheduler_of
from cellfeed._bytes._requests import Batch, Content, Place, Range, Ranges, Request, RequestingStore

_REQUESTS_OF_A_BATCH = 32  # that are awaited, and decoded, together


class RemoteObjects(RequestingStore):
    """Objects of one store, numbered from 0.

    Parameters
    ----------
    locations
        Returns the location of each object by number.
    versions
        Returns the version that each object must have, None if any version is accepted.
    """

    largest_request = LARGEST_REQUEST

    def __init__(
        self,
        locations: Callable[[int], Location],
        versions: Callable[[int], Version | None],
    ) -> None:
        super().__init__()
        self._locations = locations
        self._versions = versions

    def location_of(self, file: int) -> Location:
        """Return the location of an object, for messages."""
        return self._locations(file)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of objects in bytes, -1 for missing ones and unknown sizes."""
        return self._sizes(files, -1)

    def _limits(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._sizes(files, np.iinfo(np.int64).max)

    def _sizes(self, files: NDArray[np.int64], unknown: int) -> NDArray[np.int64]:
        distinct, number_of = np.unique(files, return_inverse=True)
        versions = [self._versions(file) for file in distinct.tolist()]
        sizes = [unknown if each is None else each.size for each in versions]
        return np.array(sizes, np.int64)[number_of]

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the first object; None if there are several."""
        version = self._versions(0)
        if version is None or version.etag is None:
            return None
        return LastingIdentity(digest_of(str(self._locations(0)), version.etag), is_settled=True)

    def _enter_process(self) -> None:
        stores_of(self._locations(0))  # fails in a fork, as it must
        super()._enter_process()

    def _gap(self) -> int:
        return scheduler_of(self._locations(0)).link.worthwhile_gap

    def _send(self, requests: Sequence[Request]) -> Sequence[Batch]:
        objects = dict[int, Object]()
        for file in {each.file for each in requests}:
            location = self._locations(file)
            objects[file] = Object(location, stores_of(location)[1], self._versions(file))
        n = _REQUESTS_OF_A_BATCH
        batches = [
            RemoteBatch(requests[begin : begin + n], objects)
            for begin in range(0, len(requests), n)
        ]
        scheduler_of(batches[0].location).submit(batches)
        return batches

    def _start(self, ranges: Ranges) -> Future[Mapping[Range, Place | Content]]:
        if self._cache() is None:
            return super()._start(ranges)
        # The disk is read in another thread, since this call must not block.
        return _disk_threads().submit(self._places, ranges)

    def _places(self, ranges: Ranges) -> dict[Range, Place | Content]:
        """Look ranges up in this machine's disk cache, and request the others from the server."""
        cache = self._cache()
        if cache is None:
            return super()._places(ranges)
        versions = self._cached_versions(ranges)
        known = [each for each in ranges.listed if each[0] in versions]
        contents = cache.read([(versions[file], first, size) for file, first, size in known])
        found: dict[Range, Place | Content] = {
            each: content
            for each, content in zip(known, contents, strict=True)
            if content is not None
        }
        others = [k for k, each in enumerate(ranges.listed) if each not in found]
        return found | super()._places(ranges[others])

    def _received(self, ranges: Ranges, found: Sequence[Content], answered: Sequence[int]) -> None:
        """Cache ranges from the server on this machine's disk, if the user enabled that."""
        cache = self._cache()
        if cache is None or not answered:
            return
        versions = self._cached_versions(ranges)
        cache.write(
            [
                (versions[file], first, content)
                for (file, first, size), content in ((ranges.listed[k], found[k]) for k in answered)
                if file in versions and isinstance(content, memoryview) and len(content) == size
            ]
        )

    def _cache(self) -> DiskCache | None:
        return disk_cache("bytes", self._locations(0).options.cache_bytes)

    def _cached_versions(self, ranges: Ranges) -> Mapping[int, ObjectVersion]:
        """Return what identifies the objects of ranges, without those that cannot be cached."""
        found = dict[int, ObjectVersion]()
        for file in np.unique(ranges.files).tolist():
            version = self._versions(file)
            if version is not None and version.strong_etag is not None:
                url = str(self._locations(file))
                found[file] = ObjectVersion(url, version.strong_etag, version.size)
        return found


@cache
def _disk_threads() -> ThreadPoolExecutor:
    """Return the threads that read from this machine's disk."""
    return ThreadPoolExecutor(2, thread_name_prefix="cellfeed-cached")
