"""The files that contain the bytes of a disk cache, and which of them are evicted.

Bytes of all objects are appended to one segment after the other, and are evicted with it. A
segment has its full size from the beginning, as a sparse file, so that reserved space is counted.
"""

import errno
import os
import struct
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

from cellfeed._mapping import map_or_read

# Where a range of bytes lies in the disk cache: a hash table in a file, shared by processes.
#
# The table is memory-mapped, so its memory is that of the page cache, and a range that another
# process caches is found immediately. It is read without a lock and may be inconsistent: an entry
# counts only if the checksum of the bytes confirms it.

# One cached range. `tag` is a hash of object, offset and size; 0 if the slot is free. `segment`
# and `position` locate its bytes; `crc` is the CRC-32 of its key and its bytes. `url` is a hash
# of the object's URL, `identity` a hash of the URL with its ETag and size.
SLOT = np.dtype(
    [
        ("tag", "<u8"),
        ("segment", "<u4"),
        ("position", "<u4"),
        ("size", "<u4"),
        ("crc", "<u4"),
        ("url", "<u4"),
        ("identity", "<u4"),
    ]
)
Slots = NDArray[np.void]

_MARK = b"cfbytes1"
_HEAD = struct.Struct("<8sQQQ")  # mark, number of buckets, segment being filled, its bytes in use
_HEAD_BYTES = 256
_WAYS = 8  # slots of a bucket, where a range may be
_BUCKET_BYTES = _WAYS * SLOT.itemsize
_BYTES_PER_BUCKET = _WAYS * 4096  # of the cache; with smaller ranges the table is full first


def index_bytes(max_bytes: int) -> int:
    """Return the size of the table for a cache of this size; a little more than a 128th of it."""
    return _HEAD_BYTES + _n_buckets(max_bytes) * _BUCKET_BYTES


class KeptIndex:
    """An existing table.

    Methods that write are called by one process and thread at a time, the one that holds the lock
    of the cache.

    Raises
    ------
    OSError
        The table cannot be read, or does not exist.
    ValueError
        The table is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = _state(path)
        content = map_or_read(path)
        self._is_copy = content.base is None
        content.flags.writeable = self._is_copy
        mark, n_buckets, *_ = _HEAD.unpack_from(content[:_HEAD_BYTES].tobytes().ljust(_HEAD_BYTES))
        if mark != _MARK or content.size != _HEAD_BYTES + n_buckets * _BUCKET_BYTES:
            raise ValueError("the index of the cache is damaged")
        self._n_buckets = int(n_buckets)
        self._slots: Slots = content[_HEAD_BYTES:].view(SLOT).reshape(-1, _WAYS)
        self._tags: NDArray[np.uint64] = self._slots["tag"]

    @classmethod
    def create(cls, path: Path, max_bytes: int, earlier: "KeptIndex | None" = None) -> "KeptIndex":
        """Write a table for a cache of this size, with the entries of an earlier table."""
        n_buckets = _n_buckets(max_bytes)
        segment, taken = (0, 0) if earlier is None else earlier.filling()
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            file.write(_HEAD.pack(_MARK, n_buckets, segment, taken))
            file.truncate(_HEAD_BYTES + n_buckets * _BUCKET_BYTES)
        unfinished.replace(path)
        index = cls(path)
        if earlier is not None:
            index.put(earlier.kept())
        return index

    def is_current(self) -> bool:
        """Return whether this is still the table at its path."""
        try:
            return _state(self._path) == self._state
        except OSError:
            return False

    def fits(self, max_bytes: int) -> bool:
        """Return whether it is large enough for a cache of so many bytes."""
        return _n_buckets(max_bytes) <= 2 * self._n_buckets

    def filling(self) -> tuple[int, int]:
        """Return the number of the segment being filled, and how many of its bytes are in use."""
        with self._path.open("rb") as file:
            _, _, segment, taken = _HEAD.unpack(file.read(_HEAD.size))
        return segment, taken

    def fill(self, segment: int, taken: int) -> None:
        """Set what `filling` returns."""
        self._write([(0, _HEAD.pack(_MARK, self._n_buckets, segment, taken))])

    def find(self, tags: NDArray[np.uint64]) -> tuple[NDArray[np.int64], Slots]:
        """Return numbers of slots, -1 for tags that are not found, and copies of the slots."""
        buckets = self._buckets(tags)
        found = self._tags[buckets] == tags[:, None]
        where = np.where(found.any(axis=1), buckets * _WAYS + found.argmax(axis=1), -1)
        slots: Slots = self._slots.reshape(-1)[where]
        return np.where(slots["tag"] == tags, where, -1), slots

    def may_take(self, tags: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which tags are not found but have a slot available."""
        there = self._tags[self._buckets(tags)]
        is_there = (there == tags[:, None]).any(axis=1)
        return np.asarray((there == 0).any(axis=1) & ~is_there)

    def put(self, slots: Slots) -> None:
        """Write slots, except those that exist already and those whose bucket is full."""
        buckets = self._buckets(slots["tag"])
        tags = self._tags[buckets]  # and the slots that this call adds
        rank = {int(bucket): number for number, bucket in enumerate(buckets)}
        writes = list[tuple[int, bytes]]()
        for bucket, slot in zip(buckets.tolist(), slots, strict=True):
            there = tags[rank[bucket]]
            if (there == slot["tag"]).any() or there.all():
                continue
            way = int((there == 0).argmax())
            there[way] = slot["tag"]
            writes.append((bucket * _WAYS + way, slot.tobytes()))
        self._write_slots(writes)

    def forget(self, where: NDArray[np.int64], slots: Slots) -> None:
        """Free slots that have not changed since they were found."""
        unchanged = self._slots.reshape(-1)[where] == slots
        self._write_slots([(slot, bytes(SLOT.itemsize)) for slot in where[unchanged].tolist()])

    def forget_segments(self, segments: list[int]) -> None:
        """Free the slots of all ranges in some segments."""
        slots = self._slots.reshape(-1)
        doomed = np.flatnonzero((slots["tag"] != 0) & np.isin(slots["segment"], segments))
        self._write_slots([(slot, bytes(SLOT.itemsize)) for slot in doomed.tolist()])

    def kept(self) -> Slots:
        """Return all slots that are not free."""
        slots = self._slots.reshape(-1)
        found: Slots = slots[slots["tag"] != 0]
        return found

    def _buckets(self, tags: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (tags % np.uint64(self._n_buckets)).astype(np.int64)

    def _write_slots(self, writes: list[tuple[int, bytes]]) -> None:
        self._write([(_HEAD_BYTES + slot * SLOT.itemsize, content) for slot, content in writes])
        if self._is_copy:
            slots = self._slots.reshape(-1)
            for slot, content in writes:
                slots[slot] = np.frombuffer(content, SLOT)[0]

    def _write(self, writes: list[tuple[int, bytes]]) -> None:
        if not writes:
            return
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            for position, content in writes:
                os.pwrite(descriptor, content, position)
        finally:
            os.close(descriptor)


def _n_buckets(max_bytes: int) -> int:
    return -(-max_bytes // _BYTES_PER_BUCKET)


def _state(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size


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
