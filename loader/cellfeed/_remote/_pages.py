"""An object as a file that h5py reads: in pages, which are kept, and many of them at once.

HDF5 asks for its metadata piece by piece, one after the other, which would take a round trip
each. So what a piece refers to is brought with one round trip before HDF5 asks for it: all
children of a node of a B-tree, or all chunks of a column. It is interpreted by HDF5 alone: a wrong
guess costs bytes, and nothing else.

Requests are made in the calling thread, and no other Python code runs for them: HDF5 is locked
meanwhile, and a thread that let go of an object of h5py would wait for that.
"""

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._remote._asking import ask_in_thread
from cellfeed._remote._failures import ShortError
from cellfeed._remote._joining import joined
from cellfeed._remote._opening import Version, stores_of, version_of

__all__ = ["PagedFile"]

PAGE_BYTES = 1 << 14
_PAGES_OF_A_MISS = 16
_GAP = 1 << 18
_PIECE = 1 << 20  # of a large read, which is asked for in pieces side by side
_MOST_PAGES = 1 << 15  # 512 MiB

_NODE_OF_CHUNKS = b"TREE\x01"
_NODE_HEAD = 24
_NODE_ENTRIES = 64  # of chunk indexes, unless the file says otherwise, which nobody does
_ADDRESS = 8


class PagedFile(io.RawIOBase):
    """An object of a server, for reading.

    Parameters
    ----------
    location
        The object.
    version
        That it must have.
    """

    def __init__(self, location: Location, version: Version) -> None:
        super().__init__()
        self._location = location
        self._version = version
        stores, self._path = stores_of(location)
        self._store = stores.blocking
        self._position = 0
        self._pages = dict[int, bytes]()
        self._n_dimensions = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that one can go to any byte of it."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._version.size}
        self._position = begin[whence] + offset
        return self._position

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read as many bytes as the buffer takes, or as there are."""
        view = memoryview(buffer).cast("B")
        first = self._position
        stop = min(first + len(view), self._version.size)
        if stop <= first:
            return 0
        if stop - first > _PIECE:
            self._read_large(view[: stop - first], first)
        else:
            view[: stop - first] = self._piece(first, stop)
            if self._n_dimensions and bytes(view[: len(_NODE_OF_CHUNKS)]) == _NODE_OF_CHUNKS:
                self._bring_children([bytes(view[: stop - first])])
        self._position = stop
        return stop - first

    def bring(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Bring ranges that will be read, with one round trip for all of them."""
        stops = np.minimum(offsets + sizes, self._version.size)
        is_there = (offsets >= 0) & (stops > offsets)
        first, last = offsets[is_there] // PAGE_BYTES, (stops[is_there] - 1) // PAGE_BYTES
        pages = np.unique(
            np.concatenate([[0], *(np.arange(a, b + 1) for a, b in zip(first, last, strict=True))])
        ).astype(np.int64)
        self._make_room(len(pages))
        self._bring_pages([page for page in pages.tolist() if page not in self._pages])

    def index_of_chunks(self, n_dimensions: int) -> None:
        """Say that the chunks of an array of so many dimensions will be listed; 0 once they are."""
        self._n_dimensions = n_dimensions

    def _piece(self, first: int, stop: int) -> bytes:
        pages = range(first // PAGE_BYTES, (stop - 1) // PAGE_BYTES + 1)
        if not all(page in self._pages for page in pages):
            self._make_room(_PAGES_OF_A_MISS + len(pages))
            n_pages = -(-self._version.size // PAGE_BYTES)
            end = min(max(pages.stop, pages.start + _PAGES_OF_A_MISS), n_pages)
            self._bring_pages([k for k in range(pages.start, end) if k not in self._pages])
        content = b"".join(self._pages[page] for page in pages)
        begin = first - pages.start * PAGE_BYTES
        return content[begin : begin + stop - first]

    def _make_room(self, n_pages: int) -> None:
        if len(self._pages) + n_pages > _MOST_PAGES:
            self._pages.clear()

    def _bring_pages(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        numbers = np.array(pages, np.int64)
        offsets = numbers * PAGE_BYTES
        sizes = np.minimum(PAGE_BYTES, self._version.size - offsets)
        order, bounds = joined(np.zeros(len(pages), np.int64), offsets, sizes, _GAP)
        firsts = offsets[order[bounds[:-1]]]
        lasts = order[bounds[1:] - 1]
        contents = self._ask(firsts.tolist(), (offsets[lasts] + sizes[lasts]).tolist())
        for first, content, begin, end in zip(
            firsts.tolist(), contents, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
        ):
            for k in order[begin:end].tolist():
                start = int(offsets[k]) - first
                self._pages[pages[k]] = bytes(content[start : start + int(sizes[k])])

    def _read_large(self, view: memoryview, first: int) -> None:
        starts = range(first, first + len(view), _PIECE)
        stops = [min(start + _PIECE, first + len(view)) for start in starts]
        for start, content in zip(starts, self._ask(list(starts), stops), strict=True):
            view[start - first : start - first + len(content)] = content

    def _ask(self, firsts: Sequence[int], stops: Sequence[int]) -> list[memoryview]:
        """Return ranges; the last is asked for after the others, with the version it is of."""

        def ask() -> list[memoryview]:
            contents = list[memoryview]()
            if len(firsts) > 1:
                many = self._store.get_ranges(
                    self._path, starts=firsts[:-1], ends=stops[:-1], coalesce=0
                )
                contents += map(memoryview, many)
            last = self._store.get(self._path, options={"range": (firsts[-1], stops[-1])})
            self._version.check(version_of(last.meta))
            contents.append(memoryview(last.bytes()))
            for content, a, b in zip(contents, firsts, stops, strict=True):
                if len(content) != b - a:
                    raise ShortError
            return contents

        return ask_in_thread(self._location, ask, min(firsts), max(stops))

    def _bring_children(self, nodes: Sequence[bytes]) -> None:
        """Bring all nodes below nodes of a chunk index, level by level."""
        key = 8 + 8 * (self._n_dimensions + 1)
        node_bytes = _NODE_HEAD + (_NODE_ENTRIES + 1) * key + _NODE_ENTRIES * _ADDRESS
        while nodes and nodes[0][5] > 0:
            addresses = list[int]()
            for node in nodes:
                (n_entries,) = struct.unpack_from("<H", node, 6)
                places = (_NODE_HEAD + (k + 1) * key + k * _ADDRESS for k in range(n_entries))
                addresses += (
                    struct.unpack_from("<Q", node, place)[0]
                    for place in places
                    if place + _ADDRESS <= len(node)
                )
            inside = [each for each in addresses if each + node_bytes <= self._version.size]
            if not inside:
                return
            starts = np.array(inside, np.int64)
            self.bring(starts, np.full(len(starts), node_bytes, np.int64))
            nodes = [self._piece(start, start + node_bytes) for start in inside]
            if any(node[:5] != _NODE_OF_CHUNKS for node in nodes):
                return
