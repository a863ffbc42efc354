"""Reading local files with direct I/O (O_DIRECT), which bypasses the page cache, in threads."""

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import BufferPool
from cellfeed._bytes._location import LastingIdentity, Location
from cellfeed._bytes._store import Arrival, ByteStore, UnreadableRangeError, closed_with, joined
from cellfeed._errors import ParameterError, PathError

# Memory that a device may write to while the process forks.

_WIPE_ON_FORK = 18  # of Linux since 4.14; `mmap` has no name for it
_ROUNDED_TO = 1 << 20
_last: "weakref.ref[BufferPool] | None" = None


def pool_for_devices() -> BufferPool:
    """Return the pool shared by all direct reads, which is freed with the last of them."""
    global _last  # noqa: PLW0603 - it is that of the process
    pool = None if _last is None else _last()
    if pool is None:
        pool = BufferPool()
        _last = weakref.ref(pool)
    return pool


def memory_for_devices(pool: BufferPool, n_bytes: int) -> NDArray[np.uint8]:
    """Return page-aligned memory, uint8, shape (n,) where n is at least ``n_bytes``.

    After a fork, parent and child share the pages of private memory until one of them writes; what
    a device writes meanwhile may end up in either (see NOTES of open(2)). The child therefore
    does not inherit this memory: its pages are zero there.
    """
    n = -(-n_bytes // _ROUNDED_TO) * _ROUNDED_TO
    buffer = pool.acquire(n)
    if _madvise()(buffer.address, n, _WIPE_ON_FORK) == 0:
        return buffer.array(np.dtype(np.uint8), n)
    shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, n, flags=shared), np.uint8)


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return madvise


ALIGNMENT = 1 << 12
"""Alignment of offsets, lengths and memory in bytes, a multiple of what devices require."""

DIRECT = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)

_GAP = 1 << 14  # bytes read in vain cost less than another read
_LARGEST_READ = 1 << 20
_BYTES_OF_A_JOB = 1 << 21  # which arrive, and are decoded, together
_N_THREADS = 16  # reads that the device has at a time
_numbers = count()


class DirectFiles(ByteStore):
    """Files whose ranges are read with direct I/O, and leave no pages in the cache.

    Ranges are widened to `ALIGNMENT`, and ranges that are near each other, or on one page, are
    read together. Since the system does not read ahead, many reads are in flight.

    Parameters
    ----------
    files
        The same files for compiled threads; their `handles` are opened again.
    """

    def __init__(self, files: ByteStore) -> None:
        self._files = files
        self._process = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"_files": self._files, "_process": -1}

    def location_of(self, file: int) -> Location:
        """Return the location of a file, for messages."""
        return self._files.location_of(file)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of files in bytes; see `ByteStore`."""
        return self._files.sizes(files)

    def identity(self) -> LastingIdentity | None:
        """Return an identifier of these files; see `ByteStore`."""
        return self._files.identity()

    def expect(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> object | None:
        """Start reading ranges; see `ByteStore`."""
        return self._begin(files, offsets, sizes)[0] if files.size else None

    def arrivals(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[Arrival]:
        """Return the arrivals of ranges; see `ByteStore`."""
        arrivals = list[Arrival]()
        for coming, ranges, extents in self._sources(files, offsets, sizes):
            jobs = coming.job_of[extents]
            order = np.argsort(jobs, kind="stable")
            distinct, begins = np.unique(jobs[order], return_index=True)
            for job, own in zip(distinct.tolist(), np.split(order, begins[1:]), strict=True):
                arrivals.append(Arrival(ranges[own], coming.jobs[job].is_read, coming))
        return arrivals

    def read_ranges(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[NDArray[np.uint8] | None]:
        """Return ranges that were expected, and read the others; see `ByteStore`."""
        found: list[NDArray[np.uint8] | None] = [None] * files.size
        for coming, ranges, extents in self._sources(files, offsets, sizes):
            starts, lengths = offsets[ranges].tolist(), sizes[ranges].tolist()
            for k, *where in zip(ranges.tolist(), extents.tolist(), starts, lengths, strict=True):
                try:
                    found[k] = coming.read(*where)
                except OSError as error:
                    raise UnreadableRangeError(k) from error
        return found

    def _sources(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Iterator[tuple["_Coming", NDArray[np.intp], NDArray[np.intp]]]:
        """Iterate over what some ranges come with: which they are, and the extent of each."""
        rest = np.arange(files.size)
        with _lock:
            self._enter_process()
            # A chunk may be wanted by several fetches: the oldest has it first.
            known = sorted(self._coming, key=lambda each: each.number)
        for coming in known:
            extents = coming.find(files[rest], offsets[rest], sizes[rest])
            is_there = extents >= 0
            if is_there.any():
                yield coming, rest[is_there], extents[is_there]
                rest = rest[~is_there]
        if rest.size:
            coming, extents = self._begin(files[rest], offsets[rest], sizes[rest])
            yield coming, rest, extents

    def _begin(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple["_Coming", NDArray[np.intp]]:
        """Let threads read ranges; return what they come with, and the extent of each."""
        firsts = offsets // ALIGNMENT * ALIGNMENT
        stops = -(-(offsets + sizes) // ALIGNMENT) * ALIGNMENT
        # A chunk that is all of its file says the most that it may have.
        ends = np.clip(self._files.sizes(files), firsts, stops)
        lengths = -(-ends // ALIGNMENT) * ALIGNMENT - firsts
        order, bounds = joined(files, firsts, lengths, _GAP, _LARGEST_READ)
        begins = bounds[:-1]
        extent_of = np.empty(files.size, np.intp)
        extent_of[order] = np.repeat(np.arange(begins.size), np.diff(bounds))
        leaders = order[begins]
        with _lock:
            self._enter_process()
            handles, owner = self._direct_handles(files[leaders])
            coming = _Coming(
                files=files[leaders],
                firsts=firsts[leaders],
                stops=np.maximum.reduceat(stops[order], begins),
                lengths=np.maximum.reduceat((firsts + lengths)[order], begins) - firsts[leaders],
                handles=handles,
                owner=owner,
                pool=self._pool,
            )
            self._coming.add(coming)
        return coming, extent_of

    def _enter_process(self) -> None:
        """Drop descriptors and reads of another process."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._coming = weakref.WeakSet[_Coming]()
            self._open = dict[int, tuple[int, object]]()
            self._pool = pool_for_devices()

    def _direct_handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return descriptors for direct I/O, or addresses of paths; see `ByteStore.handles`."""
        distinct, number_of = np.unique(files, return_inverse=True)
        found = self._files.handles(distinct)
        if found is None:
            raise TypeError(f"{type(self._files).__name__} has no `handles`")
        handles, owner = found
        for k in np.flatnonzero(handles >= 0).tolist():
            handles[k] = self._descriptor(int(distinct[k]), int(handles[k]))
        return handles[number_of], (owner, self._open)

    def _descriptor(self, file: int, buffered: int) -> int:
        if file not in self._open:
            try:
                # By its descriptor, so that it is the same file, whatever the path has become.
                descriptor = os.open(f"/proc/self/fd/{buffered}", DIRECT)
            except OSError as error:
                where = self.location_of(file)
                msg = f"{where}: cannot be opened for direct I/O ({error.strerror})"
                remedy = "allow more open files, for example with `ulimit -n 65536`, or"
                remedy = remedy if error.errno == errno.EMFILE else "check its permissions, or"
                raise PathError(f"{msg}; {remedy} open it without `direct_io`") from error
            self._open[file] = descriptor, closed_with(descriptor)
        return self._open[file][0]


class _Coming:
    """Extents of files that threads read; reads that have not begun are cancelled with this object.

    Parameters
    ----------
    files, firsts, stops
        File, first byte and end of each extent, sorted in this order, int64, shape (n,).
    lengths
        Number of bytes to read for each extent: whole pages, up to the end of the file.
    handles, owner
        Handle of each file, and the object that keeps them valid.
    pool
        Pool for memory.
    """

    def __init__(
        self,
        *,
        files: NDArray[np.int64],
        firsts: NDArray[np.int64],
        stops: NDArray[np.int64],
        lengths: NDArray[np.int64],
        handles: NDArray[np.int64],
        owner: object,
        pool: BufferPool,
    ) -> None:
        self.number = next(_numbers)
        self._files, self._firsts, self._stops = files, firsts, stops
        self._distinct = np.unique(files)
        self._keys = self._key(files, firsts)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        _, first_of_job, self.job_of = np.unique(
            begins // _BYTES_OF_A_JOB, return_index=True, return_inverse=True
        )
        self._places = begins - begins[first_of_job][self.job_of]
        self.jobs = list[_Job]()
        for first, stop in pairwise([*first_of_job.tolist(), len(files)]):
            job = _Job(
                first=first,
                handles=handles[first:stop].tolist(),
                offsets=firsts[first:stop].tolist(),
                places=[*self._places[first:stop].tolist(), int(ends[stop - 1] - begins[first])],
                owner=owner,
                pool=pool,
            )
            _threads().submit(job.read)
            self.jobs.append(job)
        giving_up = weakref.finalize(self, _give_up, self.jobs)
        giving_up.atexit = False

    def _key(self, files: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return numbers that ascend with files and bytes in them; of files that are known."""
        return (np.searchsorted(self._distinct, files) << 44) + offsets

    def find(
        self, files: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Return the extent that contains each range, -1 if there is none."""
        extents = np.searchsorted(self._keys, self._key(files, offsets), side="right") - 1
        is_there = (extents >= 0) & (self._files[extents] == files)
        is_there &= offsets + sizes <= self._stops[extents]
        return np.where(is_there, extents, -1)

    def read(self, extent: int, offset: int, size: int) -> NDArray[np.uint8] | None:
        """Wait for a range of an extent and return it, with fewer bytes if the file ends before.

        Raises
        ------
        OSError
            The range cannot be read.
        """
        job = self.jobs[self.job_of[extent]]
        job.is_read.result()
        found = job.found[extent - job.first]
        if isinstance(found, OSError):
            raise OSError(found.errno, found.strerror)  # one's own: others raise it, too
        if found is None:
            return None
        place, within = int(self._places[extent]), offset - int(self._firsts[extent])
        stop = place + max(within, min(within + size, found))
        content: NDArray[np.uint8] = job.memory[place + within : stop]
        return content


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """Extents that one thread reads, one after another.

    Parameters
    ----------
    first
        Number of the first extent.
    handles, offsets
        Handle of each extent's file, and its position there in bytes.
    places
        Start of each extent in the memory, and end of the last.
    owner
        Object that keeps the handles valid.
    pool
        Pool for memory.

    Attributes
    ----------
    memory
        The bytes, uint8.
    found
        Number of bytes of each extent, None if its file is missing, or the error.
    is_read
        Future that is done at the end.
    """

    first: int
    handles: list[int]
    offsets: list[int]
    places: list[int]
    owner: object
    pool: BufferPool
    memory: NDArray[np.uint8] = field(init=False)
    found: list[int | OSError | None] = field(init=False, default_factory=list)
    is_read: Future[None] = field(init=False, default_factory=Future)

    def read(self) -> None:
        if not self.is_read.set_running_or_notify_cancel():
            return
        try:
            self.memory = memory_for_devices(self.pool, max(self.places[-1], ALIGNMENT))
            view = self.memory.data
            for handle, offset, bounds in zip(
                self.handles, self.offsets, pairwise(self.places), strict=True
            ):
                self.found.append(_read(handle, offset, view[slice(*bounds)]))
        except BaseException as error:  # noqa: BLE001 - it is raised where the bytes are due
            self.is_read.set_exception(error)
        else:
            self.is_read.set_result(None)


def _give_up(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.is_read.cancel()


def _read(handle: int, offset: int, into: memoryview) -> int | OSError | None:
    """Read up to the end of the file; see `_Job.found`."""
    try:
        if handle >= 0:
            return _filled(handle, offset, into)
        descriptor = os.open(ctypes.string_at(-handle), DIRECT)
        try:
            return _filled(descriptor, offset, into)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        is_link = handle < 0 and os.path.islink(ctypes.string_at(-handle))  # noqa: PTH114 - bytes
        return error.with_traceback(None) if is_link else None
    except OSError as error:
        return error.with_traceback(None)


def _filled(descriptor: int, offset: int, into: memoryview) -> int:
    done = 0
    while done < len(into):
        n = os.preadv(descriptor, [into[done:]], offset + done)
        done += n
        if n == 0 or done % ALIGNMENT:  # the end of the file
            break
    return done


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that read, of this process."""
    return ThreadPoolExecutor(_N_THREADS, thread_name_prefix="cellfeed-direct")


_lock = threading.Lock()  # of all stores, while files are opened


def _enter_process() -> None:
    """Reset in a forked process, since a thread of the parent may hold the lock."""
    global _lock  # noqa: PLW0603 - a lock cannot be taken from a thread
    _lock = threading.Lock()
    _threads.cache_clear()


os.register_at_fork(after_in_child=_enter_process)


# Checking whether a file supports direct I/O, before it is used.

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # of which some only seem to take O_DIRECT
_MOUNTS = Path("/proc/self/mountinfo")
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def check_direct(path: Path) -> None:
    """Check that the system and the file system of a file support direct I/O.

    Parameters
    ----------
    path
        A readable file; errors of other files are reported when they are opened.

    Raises
    ------
    ParameterError
        They do not support it.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        msg = f"{path}: this system does not support direct I/O, which needs Linux"
        raise ParameterError(f"{msg}; open it without `direct_io`")
    kind = _file_system(path)
    if kind in _IN_MEMORY or not _takes_direct_reads(path):
        which = f"its file system ({kind})" if kind else "its file system"
        raise ParameterError(
            f"{path}: {which} does not support direct I/O; open it without `direct_io`"
        )


def _takes_direct_reads(path: Path) -> bool:
    try:
        descriptor = os.open(path, DIRECT)
    except OSError as error:
        return error.errno not in _REFUSED
    try:
        os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError as error:
        return error.errno not in _REFUSED
    finally:
        os.close(descriptor)
    return True


def _file_system(path: Path) -> str:
    """Return the type of a file's file system, such as "ext4"; empty if unknown."""
    try:
        device = path.stat().st_dev
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        # Such as "36 35 98:0 /root /mount rw,noatime master:1 - ext4 /dev/sda rw".
        mount, _, what = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            return what.partition(" ")[0]
    return ""
