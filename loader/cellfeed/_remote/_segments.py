"""The files that contain the bytes of a disk cache, and which of them are evicted.

Bytes of all objects are appended to one segment after the other, and are evicted with it. A
segment has its full size from the beginning, as a sparse file, so that reserved space is counted.
"""

import errno
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from shutil import disk_usage

import numpy as np
from numpy.typing import NDArray

from cellfeed._remote._kept_index import KeptIndex, Slots

__all__ = ["Segments"]

_SUFFIX = ".segment"
_SEGMENTS = 256  # of a large cache: one in this many parts is evicted at a time
_FEWEST_SEGMENTS, _LEAST_BYTES = 8, 64 * 2**20  # of a small cache; enough for large chunks
_MOST_BYTES = 2**30
_IN_USE_SECONDS = 6 * 3600  # a sequential epoch over more than the cache holds can be long
_BEING_WRITTEN_SECONDS = 60
_USED_EVERY_SECONDS = 30  # resolution of the time when a segment was last used
_MOST_BUFFERS, _MOST_BYTES_AT_ONCE = 512, 2**30  # of one write; systems accept 1024, and 2 GiB


@dataclass(frozen=True, slots=True)
class _Segment:
    number: int
    n_bytes: int
    used: float  # time of the last use, in seconds as of `time.time`


class Segments:
    """The segments of a cache.

    `size`, `add` and `shrink` are called by one process and thread at a time, the one that holds
    the lock of the cache.

    Parameters
    ----------
    folder
        The folder that contains them.
    max_bytes
        Bound on the size of all files in the folder.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        usual = max(max_bytes // _SEGMENTS, min(_LEAST_BYTES, max_bytes // _FEWEST_SEGMENTS))
        self._usual_bytes = min(usual, _MOST_BYTES)

    def size(self, number: int) -> int:
        """Return the size of a segment, 0 if it does not exist."""
        try:
            return self._path(number).stat().st_size
        except FileNotFoundError:
            return 0

    def add(self, number: int, n_bytes: int, index: KeptIndex, current: dict[int, int]) -> bool:
        """Create a segment for at least this many bytes; return whether there was room for it.

        Segments may be evicted if at least half of their contents belong to objects that have been
        replaced, or if they have not been used for hours. Others stay: if more is read than the
        cache holds, its contents are worth as much as what would replace them.

        Parameters
        ----------
        number
            The segment, to which nothing has been written.
        n_bytes
            Minimum size.
        index
            The index of the segments' ranges.
        current
            Hash of the identity of each open object, by the hash of its URL.
        """
        self._path(number).unlink(missing_ok=True)  # left by a process that was killed here
        wanted = max(n_bytes, self._usual_bytes)
        room = self._make_room(wanted, index, current)
        size = min(room, wanted)
        if size < n_bytes or size > disk_usage(self._folder).free:
            return False
        with self._path(number).open("wb") as file:
            file.truncate(size)
        return True

    def shrink(self, index: KeptIndex) -> None:
        """Remove segments, least recently used first, until the bound holds."""
        found, taken = self._found()
        for each in sorted(found, key=lambda each: each.used):
            if taken <= self._max_bytes:
                break
            self._remove([each], index)
            taken -= each.n_bytes

    def read(self, slots: Slots, seeds: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of ranges, None for those that are missing or damaged.

        Parameters
        ----------
        slots
            Where they are, shape (n,).
        seeds
            CRC-32 of the key of each.
        """
        found: list[bytes | None] = [None] * slots.size
        segments, positions, sizes, crcs = (
            slots[name].tolist() for name in ("segment", "position", "size", "crc")
        )
        order = np.lexsort((slots["position"], slots["segment"])).tolist()
        for segment, group in groupby(order, segments.__getitem__):
            try:
                descriptor = os.open(self._path(segment), os.O_RDONLY)
            except OSError:
                continue
            try:
                for each in group:
                    content = os.pread(descriptor, sizes[each], positions[each])
                    if zlib.crc32(content, seeds[each]) == crcs[each]:
                        found[each] = content
                self._note_use(descriptor, segment)
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return found

    def append(self, number: int, position: int, buffers: Sequence[memoryview]) -> bool:
        """Write buffers one after the other, starting at a position of a segment.

        Returns
        -------
        Whether the segment exists. It may have been evicted.

        Raises
        ------
        OSError
            The buffers cannot be written completely.
        """
        try:
            descriptor = os.open(self._path(number), os.O_WRONLY)
        except FileNotFoundError:
            return False
        try:
            for some in _batches(buffers):
                n_bytes = sum(each.nbytes for each in some)
                if os.pwritev(descriptor, some, position) != n_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                position += n_bytes
        finally:
            os.close(descriptor)
        return True

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08x}{_SUFFIX}"

    def _note_use(self, descriptor: int, number: int) -> None:
        if time.time() - os.fstat(descriptor).st_mtime > _USED_EVERY_SECONDS:
            with suppress(OSError):
                os.utime(self._path(number))

    def _make_room(self, wanted: int, index: KeptIndex, current: dict[int, int]) -> int:
        """Evict segments if needed, and return the number of free bytes."""
        found, taken = self._found()
        if taken + wanted > self._max_bytes:
            newest, _ = index.filling()
            for each in _expendable(found, newest, index.kept(), current):
                self._remove([each], index)
                taken -= each.n_bytes
                if taken + wanted <= self._max_bytes:
                    break
        return self._max_bytes - taken

    def _remove(self, segments: list[_Segment], index: KeptIndex) -> None:
        index.forget_segments([each.number for each in segments])
        for each in segments:
            self._path(each.number).unlink(missing_ok=True)

    def _found(self) -> tuple[list[_Segment], int]:
        """Return the segments, and the total size of all files."""
        found, taken = list[_Segment](), 0
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                state = path.stat()
                taken += state.st_size
                with suppress(ValueError):
                    if path.suffix == _SUFFIX:
                        number = int(path.stem, 16)
                        found.append(_Segment(number, state.st_size, state.st_mtime))
        return found, taken


def _expendable(
    found: list[_Segment], newest: int, kept: Slots, current: dict[int, int]
) -> list[_Segment]:
    """Return the segments that may be evicted, in this order.

    Other processes may be writing to the segments from ``newest`` on, and to those without entries
    in the index; these stay for a minute.
    """
    is_replaced = _is_replaced(kept, current)
    segments, of_segment = np.unique(kept["segment"], return_inverse=True)
    n_bytes = np.bincount(of_segment, kept["size"], segments.size)
    n_replaced = np.bincount(of_segment, kept["size"] * is_replaced, segments.size)
    held = dict(zip(segments.tolist(), zip(n_bytes, n_replaced, strict=True), strict=True))
    now, replaced, unused = time.time(), list[_Segment](), list[_Segment]()
    for each in sorted(found, key=lambda each: each.used):
        there, gone = held.get(each.number, (0, 0))
        may_be_written = each.number >= newest or not there
        if may_be_written and now - each.used < _BEING_WRITTEN_SECONDS:
            continue
        if 2 * gone >= there:
            replaced.append(each)
        elif now - each.used > _IN_USE_SECONDS:
            unused.append(each)
    return replaced + unused


def _is_replaced(kept: Slots, current: dict[int, int]) -> NDArray[np.bool_]:
    """Return which ranges belong to objects that are open under another identity."""
    urls, of_slot = np.unique(kept["url"], return_inverse=True)
    newest = np.array([current.get(url, -1) for url in urls.tolist()], np.int64)[of_slot]
    return np.asarray((newest >= 0) & (newest != kept["identity"]))


def _batches(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield as many buffers at a time as one write accepts."""
    some, n_bytes = list[memoryview](), 0
    for each in buffers:
        if some and (len(some) == _MOST_BUFFERS or n_bytes + each.nbytes > _MOST_BYTES_AT_ONCE):
            yield some
            some, n_bytes = [], 0
        some.append(each)
        n_bytes += each.nbytes
    if some:
        yield some
