"""A remote object as a file for h5py: read in cached pages, many of them at a time.

HDF5 reads its metadata in small sequential reads, which would take a round trip each. So the pages
that a node refers to are fetched with one round trip before HDF5 reads them: all children of a node
of a B-tree, or all chunks of a column. Only HDF5 interprets the contents: a
wrong guess costs bytes, and nothing else.

While HDF5 is locked, requests are made in the calling thread, and no other Python code runs for
them: a thread that drops an object of h5py would wait for that lock.
"""

import io
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed.bytes._location import Location
from cellfeed.bytes._remote._client import (
    Version,
    answers_of,
    errors_named,
    open_object,
    stores_of,
)
from cellfeed.bytes._remote._objects import joined

# Reading several files with h5py concurrently, although h5py locks all of HDF5 while it reads.
#
# A read is tried with the pages that are present. If one is missing, the attempt ends, the page is
# fetched without the lock, and the read is tried again. So pages of many files are fetched
# concurrently.

_Read = TypeVar("_Read")


class _LockFreeRead:
    """The attempts at a read outside the lock.

    Attributes
    ----------
    files
        Files that an attempt opened, so that later ones find their pages.
    fetched
        Files of which pages were fetched. None is dropped before the read ends.
    """

    def __init__(self) -> None:
        self.files = dict[tuple[Location, int], PagedFile]()
        self.fetched = set[PagedFile]()


class _Local(threading.local):
    attempts: _LockFreeRead | None = None


_local = _Local()


class MissingError(BaseException):
    """Pages are missing; not an `Exception`, so that nobody mistakes it for damage.

    Parameters
    ----------
    fetch
        Fetches them.
    """

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__()
        self.fetch = fetch


def outside_lock(read: Callable[[], _Read]) -> _Read:
    """Read, and fetch missing pages without the lock of h5py.

    Parameters
    ----------
    read
        Called again after each time that pages were missing, so it must have no side effects then.
    """
    if _local.attempts is not None:
        return read()
    attempts = _local.attempts = _LockFreeRead()
    try:
        while True:
            try:
                return read()
            except MissingError as missing:
                missing.fetch()
    finally:
        _local.attempts = None
        for file in attempts.fetched:
            file.drop_many()


PAGE_BYTES = 1 << 14
_PAGES_OF_A_MISS = 16
_MOST_PREFETCHED = 256  # pages
_GAP = 1 << 18
_MOST_PAGES = 1 << 15  # 512 MiB
_MANY_PAGES = 1 << 10  # 16 MiB: of a file that has been read so far

_NODE_OF_CHUNKS = b"TREE\x01"
_NODE_HEAD = 24
_NODE_ENTRIES = 64  # B-tree parameter of chunk indexes; files may set another, but none do


def paged_file(location: Location, version: Version | None = None) -> "PagedFile":
    """Open an object as a file.

    Parameters
    ----------
    location
        The object.
    version
        The version that it must have; None to ask for it.

    Raises
    ------
    PathError
        The object does not exist.
    RemoteError
        The server cannot be reached, or refuses the request.
    """
    files = {} if _local.attempts is None else _local.attempts.files
    key = location, id(location.options)
    if key not in files:
        files[key] = PagedFile(location, version or open_object(location))
    return files[key]


class PagedFile(io.RawIOBase):
    """A remote object as a read-only file.

    Parameters
    ----------
    location
        The object.
    version
        The version that it must have.
    """

    def __init__(self, location: Location, version: Version) -> None:
        super().__init__()
        self._location = location
        self.version = version
        self._stores, self._path = stores_of(location)
        self._position = 0
        self._pages = dict[int, bytes]()
        self._n_dimensions = 0
        self._prefetched_to, self._n_prefetched = -_MOST_PREFETCHED, _PAGES_OF_A_MISS

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.version.size}
        self._position = begin[whence] + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read until the buffer is full or the object ends; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        first = self._position
        stop = min(first + len(view), self.version.size)
        if stop <= first:
            return 0
        view[: stop - first] = self._read_pages(first, stop)
        if self._n_dimensions and bytes(view[: len(_NODE_OF_CHUNKS)]) == _NODE_OF_CHUNKS:
            self._fetch_children([bytes(view[: stop - first])])
        self._position = stop
        return stop - first

    def prefetch(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Fetch ranges that will be read, with one round trip for all of them."""
        stops = np.minimum(offsets + sizes, self.version.size)
        is_there = (offsets >= 0) & (stops > offsets)
        first, last = offsets[is_there] // PAGE_BYTES, (stops[is_there] - 1) // PAGE_BYTES
        pages = np.unique(
            np.concatenate([[0], *(np.arange(a, b + 1) for a, b in zip(first, last, strict=True))])
        ).astype(np.int64)
        self._make_room(len(pages))
        self._fetch([page for page in pages.tolist() if page not in self._pages])

    def index_of_chunks(self, n_dimensions: int) -> None:
        """Announce the listing of chunks of an array with so many dimensions; 0 once it is done."""
        self._n_dimensions = n_dimensions

    def _read_pages(self, first: int, stop: int) -> bytes:
        pages = range(first // PAGE_BYTES, (stop - 1) // PAGE_BYTES + 1)
        begin = first - pages.start * PAGE_BYTES
        while True:
            self._fetch_missing(pages)
            try:
                content = b"".join(self._pages[page] for page in pages)
            except KeyError:  # another thread evicted it meanwhile
                continue
            return content[begin : begin + stop - first]

    def _fetch_missing(self, pages: range) -> None:
        """Fetch pages that are being read, and some after them."""
        if not all(page in self._pages for page in pages):
            self._make_room(_PAGES_OF_A_MISS + len(pages))
            n_pages = -(-self.version.size // PAGE_BYTES)
            missing = next((page for page in pages if page not in self._pages), pages.start)
            # Sequential reads, such as of gene names, fetch ever larger ranges.
            is_next = 0 <= missing - self._prefetched_to < _PAGES_OF_A_MISS
            n = min(2 * self._n_prefetched, _MOST_PREFETCHED) if is_next else _PAGES_OF_A_MISS
            self._n_prefetched = n
            self._prefetched_to = min(max(pages.stop, missing + n), n_pages)
            wanted = range(missing, self._prefetched_to)
            self._fetch([page for page in wanted if page not in self._pages])

    def _make_room(self, n_pages: int) -> None:
        if _local.attempts is None and len(self._pages) + n_pages > _MOST_PAGES:
            self._pages.clear()

    def _fetch(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        if _local.attempts is not None:
            raise MissingError(partial(self._fetch_now, pages))
        self._fetch_now(pages)

    def _fetch_now(self, pages: Sequence[int]) -> None:
        attempts = _local.attempts
        if attempts is not None:
            attempts.fetched.add(self)
        offsets = np.array(pages, np.int64) * PAGE_BYTES
        sizes = np.minimum(PAGE_BYTES, self.version.size - offsets)
        order, bounds = joined(np.zeros_like(offsets), offsets, sizes, _GAP)
        requests = np.split(order, bounds[1:-1])
        firsts = [int(offsets[own[0]]) for own in requests]
        stops = [int(offsets[own[-1]] + sizes[own[-1]]) for own in requests]
        contents = (self._ask if attempts is None else self._ask_outside)(firsts, stops)
        fetched = dict[int, bytes]()
        for first, content, own in zip(firsts, contents, requests, strict=True):
            for k in own.tolist():
                start = int(offsets[k]) - first
                fetched[pages[k]] = bytes(content[start : start + int(sizes[k])])
        self._pages |= fetched

    def drop_many(self) -> None:
        """Drop pages if they are many."""
        if len(self._pages) > _MANY_PAGES:
            self._pages.clear()

    def _ask(self, firsts: Sequence[int], stops: Sequence[int]) -> Sequence[memoryview]:
        """Return ranges; the last is requested after the others, to check the version."""
        store, contents = self._stores.blocking, list[memoryview]()
        with errors_named(self._location, min(firsts), max(stops)):
            if len(firsts) > 1:
                many = store.get_ranges(self._path, starts=firsts[:-1], ends=stops[:-1], coalesce=0)
                contents += map(memoryview, many)
            last = store.get(self._path, options={"range": (firsts[-1], stops[-1])})
            contents.append(memoryview(last.bytes()))
            for content, first, stop in zip(contents, firsts, stops, strict=True):
                self.version.check(last, content, self._location, first, stop)
        return contents

    def _ask_outside(self, firsts: Sequence[int], stops: Sequence[int]) -> Sequence[memoryview]:
        """Return ranges, each checked to be of the version; waiting for them can be interrupted."""

        async def ask(first: int, stop: int) -> memoryview:
            store, options = self._stores.store, {"range": (first, stop)}
            with errors_named(self._location, first, stop):
                got = await store.get_async(self._path, options=options)
                content = memoryview(await got.bytes_async())
                self.version.check(got, content, self._location, first, stop)
            return content

        asking = [partial(ask, *each) for each in zip(firsts, stops, strict=True)]
        return answers_of(self._location, asking)

    def _fetch_children(self, nodes: Sequence[bytes]) -> None:
        """Fetch all descendants of nodes of a chunk index, level by level.

        Raises
        ------
        FormatError
            Levels do not fall by one, so that a node may refer to itself, which HDF5 would follow
            without end.
        """
        entry = np.dtype([("key", f"V{8 + 8 * (self._n_dimensions + 1)}"), ("child", "<i8")])
        node_bytes = _NODE_HEAD + _NODE_ENTRIES * entry.itemsize + entry["key"].itemsize
        for level in range(nodes[0][5], 0, -1):
            children = [np.empty(0, np.int64)]
            for node in nodes:
                n_there = (len(node) - _NODE_HEAD) // entry.itemsize
                n_entries = min(int.from_bytes(node[6:8], "little"), n_there)
                children.append(np.frombuffer(node, entry, n_entries, _NODE_HEAD)["child"])
            starts = np.unique(np.concatenate(children))
            starts = starts[(starts >= 0) & (starts <= self.version.size - node_bytes)]
            if not starts.size:
                return
            self.prefetch(starts, np.full(len(starts), node_bytes, np.int64))
            nodes = [self._read_pages(start, start + node_bytes) for start in starts.tolist()]
            if any(node[:5] != _NODE_OF_CHUNKS for node in nodes):
                return
            if any(node[5] != level - 1 for node in nodes):
                msg = f"{self._location}: the index of the chunks of an array is damaged"
                raise FormatError(f"{msg}; upload the file again")
