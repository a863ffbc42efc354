"""Where a range of bytes lies in the disk cache: a hash table in a file, shared by processes.

The table is memory-mapped, so its memory is that of the page cache, and a range that another
process caches is found immediately. It is read without a lock and may be inconsistent: an entry
counts only if the checksum of the bytes confirms it.
"""

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._mapping import map_or_read

__all__ = ["SLOT", "KeptIndex", "Slots", "index_bytes"]

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
