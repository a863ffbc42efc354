"""Bytes of remote files that are cached on the disks of this machine.

A cache is a folder: a lock, an index (`KeptIndex`) and segments (`Segments`). Ranges are first
appended to a segment, and then entered in the index with a checksum of their key and their bytes.
If a process is killed, ranges that it had not entered are missing; a range whose bytes differ from
what was entered is detected when it is read.
"""

import errno
import fcntl
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._remote._segments import SLOT, KeptIndex, Segments, Slots, index_bytes
from cellfeed.machine import cache_folder
from cellfeed.sampling._permutation import random_words

_logger = logging.getLogger(__name__)

_KEY = struct.Struct("<16sqq")  # digest of the object, first byte and number of bytes of a range
_MOST_BYTES = 2**32 - 1  # of a cached range, and of a segment
_FULL_SECONDS = 60.0  # during which a cache that was full is not tried again
_BUSY_SECONDS = 10.0  # during which nothing is cached after a timeout of the lock
_LOCK_SECONDS = 1.0  # to wait for the lock; after that the ranges are not cached

Buffer = bytes | memoryview | NDArray[np.uint8]


class DiskCache:
    """A bounded cache of ranges of remote objects, shared by the processes of this machine.

    If more is read than fits, the ranges that came first stay until they have not been read for
    hours, so that every epoch finds a part of its data. Ranges that were replaced on the server are
    evicted immediately.

    Only the mapped index is held. No descriptor stays open, and a process that was forked, or that
    unpickled the cache, continues with the same folder. A cache that cannot be used acts as empty,
    and logs this once, at the level INFO.

    Parameters
    ----------
    max_bytes
        Bound on the size of all its files.
    folder
        Parent of the cache's folder; `cache_folder` by default.
    name
        Name of the cache's folder: ``bytes``, or ``pages`` for metadata.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None, name: str = "bytes") -> None:
        self._path = cache_folder(name) if folder is None else folder / name
        self._max_bytes = max_bytes
        self._segments = Segments(self._path, max_bytes)
        self._current = dict[int, int]()  # hash of the identity by hash of the URL
        self._index: KeptIndex | None = None
        self._is_off = index_bytes(max_bytes) >= max_bytes
        self._busy_until = 0.0
        self._full_until = 0.0  # in seconds of `time.monotonic`
        if self._path.is_dir() and not self._is_off:
            try:
                with self._locked():
                    self._open()
            except (OSError, ValueError) as error:
                self._turn_off(error)

    def __reduce__(self) -> tuple[type["DiskCache"], tuple[int, Path, str]]:
        return DiskCache, (self._max_bytes, self._path.parent, self._path.name)

    def object(self, url: str, etag: str | None, size: int) -> "KeptObject | None":
        """Return the cached ranges of an object, None if nothing identifies its content.

        Parameters
        ----------
        url
            Its URL, without parts that change from one opening to the next, such as a signature.
        etag
            The server's ETag. Ranges that were cached with another ETag are not found.
        size
            Its number of bytes.
        """
        if etag is None:
            return None
        kept = KeptObject(self, url, etag, size)
        if self._current.get(kept.url_hash) != kept.identity_hash:
            self._current[kept.url_hash] = kept.identity_hash
            self._full_until = 0.0  # ranges of an earlier version may be evicted
        return kept

    def read(
        self, tags: NDArray[np.uint64], sizes: NDArray[np.int64], seeds: Sequence[int]
    ) -> list[bytes | None]:
        """Return the bytes of ranges, None for those that are not cached.

        Parameters
        ----------
        tags
            Hash of the key of each, shape (n,).
        sizes
            Number of bytes of each, above 0.
        seeds
            CRC-32 of the key of each.
        """
        found: list[bytes | None] = [None] * tags.size
        if self._index is None:
            with suppress(OSError, ValueError):
                self._index = KeptIndex(self._path / "index")
        if self._index is None:
            return found
        where, slots = self._index.find(tags)
        there = np.flatnonzero((where >= 0) & (slots["size"] == sizes)).tolist()
        contents = self._segments.read(slots[there], [seeds[each] for each in there])
        for each, content in zip(there, contents, strict=True):
            found[each] = content
        wrong = [each for each in there if found[each] is None]
        if wrong:
            with suppress(OSError, ValueError, LookupError), self._locked(0.0):
                index = self._open()
                index.forget(where[wrong], slots[wrong])
        return found

    def write(self, slots: Slots, seeds: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Cache all, some or none of the ranges; never raises an error.

        Parameters
        ----------
        slots
            The entries of the index, without positions and checksums of the bytes.
        seeds
            CRC-32 of the key of each.
        buffers
            Bytes of each, above 0.
        """
        if self._is_off or time.monotonic() < max(self._full_until, self._busy_until):
            return
        try:
            self._write(slots, seeds, buffers)
        except (OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError) as error:
            self._turn_off(error)

    def _write(self, slots: Slots, seeds: Sequence[int], buffers: Sequence[memoryview]) -> None:
        _, firsts = np.unique(slots["tag"], return_index=True)
        firsts = np.sort(firsts[slots["size"][firsts] < min(self._max_bytes, _MOST_BYTES)])
        if self._index is not None:
            firsts = firsts[self._index.may_take(slots["tag"][firsts])]
        if not firsts.size:
            return
        with self._locked():
            index = self._open()
            firsts = firsts[index.may_take(slots["tag"][firsts])]
            slots = slots[firsts]
            firsts = firsts[: self._reserve(index, slots)]
        slots, written = slots[: firsts.size], firsts.tolist()
        slots["crc"] = [zlib.crc32(buffers[each], seeds[each]) for each in written]
        is_written = np.zeros(slots.size, np.bool_)
        begins = np.flatnonzero(np.diff(slots["segment"].astype(np.int64), prepend=-1)).tolist()
        for begin, end in pairwise([*begins, slots.size]):
            is_written[begin:end] = self._segments.append(
                int(slots["segment"][begin]),
                int(slots["position"][begin]),
                [buffers[each] for each in written[begin:end]],
            )
        if is_written.any():
            with self._locked():
                self._open().put(slots[is_written])

    def _reserve(self, index: KeptIndex, slots: Slots) -> int:
        """Set the positions of the ranges' bytes; return how many of the ranges fit."""
        segment, taken = index.filling()
        end = self._segments.size(segment)
        n_bytes = slots["size"].astype(np.int64)
        ends = np.cumsum(n_bytes)
        first = 0
        while first < slots.size:
            before = int(ends[first] - n_bytes[first])
            fit = int(np.searchsorted(ends, before + end - taken, side="right"))
            if fit > first:
                slots["segment"][first:fit] = segment
                slots["position"][first:fit] = (ends - n_bytes)[first:fit] - before + taken
                taken += int(ends[fit - 1]) - before
                first = fit
            elif self._segments.add(segment + 1, int(n_bytes[first]), index, self._current):
                segment, taken, end = segment + 1, 0, self._segments.size(segment + 1)
            else:
                self._full_until = time.monotonic() + _FULL_SECONDS
                break
        index.fill(segment, taken)
        return first

    def _open(self) -> KeptIndex:
        """Return the current index, creating it if it does not exist; called under the lock."""
        index, path = self._index, self._path / "index"
        if index is not None and index.is_current():
            return index
        try:
            index = KeptIndex(path)
            if not index.fits(self._max_bytes):
                index = KeptIndex.create(path, self._max_bytes, index)
        except (FileNotFoundError, ValueError):
            index = KeptIndex.create(path, self._max_bytes)
        self._segments.shrink(index)
        self._index = index
        return index

    @contextmanager
    def _locked(self, seconds: float | None = None) -> Iterator[None]:
        """Prevent other processes and threads from changing the cache.

        Raises
        ------
        OSError
            The lock cannot be created, or not be acquired in this time.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            latest = time.monotonic() + (_LOCK_SECONDS if seconds is None else seconds)
            while not _lock(descriptor):
                if time.monotonic() >= latest:
                    raise TimeoutError(errno.ETIMEDOUT, "other processes are writing to the cache")
                time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may have copied the descriptor
        finally:
            os.close(descriptor)

    def _turn_off(self, error: Exception) -> None:
        if isinstance(error, TimeoutError):  # the lock may stay taken for long
            self._busy_until = time.monotonic() + _BUSY_SECONDS
        elif not self._is_off:
            self._is_off = True
            _logger.info("bytes from servers are not cached on disk: %s", error)


class KeptObject:
    """The cached ranges of one version of a remote object, identified by its ETag.

    Parameters
    ----------
    cache
        The cache.
    url, etag, size
        Identify the version.
    """

    def __init__(self, cache: DiskCache, url: str, etag: str, size: int) -> None:
        self._cache = cache
        self._key = url, etag, size
        identity = json.dumps(self._key).encode()
        self._digest = blake2b(identity, digest_size=16).digest()
        self._seeds: tuple[int, int] = struct.unpack("<QQ", self._digest)
        self.identity_hash = self._seeds[0] & 0xFFFFFFFF
        self.url_hash = int.from_bytes(blake2b(url.encode(), digest_size=4).digest(), "little")

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskCache.object, (self._cache, *self._key)

    def read(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[bytes | None]:
        """Return the bytes of ranges, None for those that are not cached.

        Parameters
        ----------
        offsets, sizes
            First byte and number of bytes of each, int64, shape (n,). A range is found if it was
            written with the same offset and size, and has not been evicted.
        """
        found = self._cache.read(self._tags(offsets, sizes), sizes, self._crcs(offsets, sizes))
        for empty in np.flatnonzero(sizes == 0).tolist():
            found[empty] = b""
        return found

    def write(self, offsets: NDArray[np.int64], buffers: Sequence[Buffer]) -> None:
        """Cache ranges, if there is room; never raises an error.

        Parameters
        ----------
        offsets
            First byte of each, int64, shape (n,).
        buffers
            Bytes of each. They are not referenced after the call.
        """
        all_views = [_view(each) for each in buffers]
        views = [each.cast("B") for each in all_views if each.nbytes]
        sizes = np.array([each.nbytes for each in all_views], np.int64)
        offsets, sizes = offsets[sizes > 0], sizes[sizes > 0]
        slots = np.zeros(sizes.size, SLOT)
        slots["tag"] = self._tags(offsets, sizes)
        slots["size"] = np.minimum(sizes, _MOST_BYTES)
        slots["url"] = self.url_hash
        slots["identity"] = self.identity_hash
        self._cache.write(slots, self._crcs(offsets, sizes), views)

    def _tags(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a hash of each range's key, never 0."""
        first, second = self._seeds
        tags = random_words(first, offsets.view(np.uint64) ^ random_words(second, sizes))
        return np.maximum(tags, np.uint64(1))

    def _crcs(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[int]:
        return [
            zlib.crc32(_KEY.pack(self._digest, offset, size))
            for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ]


def _view(buffer: Buffer) -> memoryview:
    return (
        np.ascontiguousarray(buffer).data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    )


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
