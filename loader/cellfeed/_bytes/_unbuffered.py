"""Reading local files with direct I/O (O_DIRECT), which bypasses the page cache, in threads."""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import BufferPool, mapped
from cellfeed._bytes._location import LastingIdentity, Location
from cellfeed._bytes._requests import Batch, Request, RequestingStore
from cellfeed._bytes._store import ByteStore, closed_with
from cellfeed._errors import ParameterError, PathError
from cellfeed._mapping import file_system

_ALIGNMENT = 1 << 12  # of offsets, lengths and memory; a multiple of what devices require
_UNBUFFERED = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
_GAP = 1 << 14  # bytes read in vain cost less than another read
_BYTES_OF_A_BATCH = 1 << 21
_N_THREADS = 16  # reads that the device has at a time
_WIPE_ON_FORK = 18  # of Linux since 4.14; `mmap` has no name for it


class _DeviceMemory(BufferPool):
    """Page-aligned memory that a device may write to while the process forks.

    After a fork, parent and child share the pages of private memory until one of them writes; what
    a device writes meanwhile may end up in either (see NOTES of open(2)). The child therefore
    does not inherit this memory: its pages are zero there.
    """

    def _map(self, capacity: int) -> NDArray[np.uint8]:
        memory = mapped(capacity)
        try:
            memory.madvise(_WIPE_ON_FORK)
        except OSError:
            memory = mapped(capacity, mmap.MAP_SHARED)
        return np.frombuffer(memory, np.uint8)


_memory = weakref.WeakValueDictionary[str, _DeviceMemory]()  # one for all files, while some are


class UnbufferedFiles(RequestingStore):
    """Files whose ranges are read with direct I/O, and leave no pages in the cache.

    Ranges are widened to whole pages, and ranges that are near each other, or on one page, are
    read together. Since the system does not read ahead, many reads are in flight.

    Parameters
    ----------
    files
        The same files for compiled threads; their `handles` are opened again.
    """

    alignment = _ALIGNMENT
    requests_empty = True

    def __init__(self, files: ByteStore) -> None:
        super().__init__()
        self._files = files

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

    def _reset(self) -> None:
        super()._reset()
        self._open = dict[int, tuple[int, object]]()
        self._memory = _memory.setdefault("", _DeviceMemory())

    def _gap(self) -> int:
        return _GAP

    def _send(self, requests: Sequence[Request]) -> Sequence[Batch]:
        """Let threads read; see `RequestingStore`."""
        handles, owner = self._handles(np.array([each.file for each in requests], np.int64))
        ends = np.cumsum([each.stop - each.first for each in requests])
        begins = np.flatnonzero(np.diff(ends // _BYTES_OF_A_BATCH, prepend=-1))
        batches = list[Batch]()
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(requests)], strict=True):
            location = self.location_of(requests[begin].file)
            batch = _Reading(requests[begin:end], location, handles[begin:end], owner, self._memory)
            _threads().submit(batch.read)
            batches.append(batch)
        return batches

    def _handles(self, files: NDArray[np.int64]) -> tuple[list[int], object]:
        """Return descriptors for direct I/O, or addresses of paths; see `ByteStore.handles`."""
        distinct, number_of = np.unique(files, return_inverse=True)
        found = self._files.handles(distinct)
        if found is None:
            raise TypeError(f"{type(self._files).__name__} has no `handles`")
        handles, owner = found
        for k in np.flatnonzero(handles >= 0).tolist():
            handles[k] = self._descriptor(int(distinct[k]), int(handles[k]))
        return handles[number_of].tolist(), (owner, self._open)

    def _descriptor(self, file: int, buffered: int) -> int:
        if file not in self._open:
            try:
                # By its descriptor, so that it is the same file, whatever the path has become.
                descriptor = os.open(f"/proc/self/fd/{buffered}", _UNBUFFERED)
            except OSError as error:
                where = self.location_of(file)
                msg = f"{where}: cannot be opened for direct I/O ({error.strerror})"
                remedy = "allow more open files, for example with `ulimit -n 65536`, or"
                remedy = remedy if error.errno == errno.EMFILE else "check its permissions, or"
                raise PathError(f"{msg}; {remedy} open it without `direct_io`") from error
            # If two threads open it at once, that of the first stays.
            self._open.setdefault(file, (descriptor, closed_with(descriptor)))
        return self._open[file][0]


class _Reading(Batch):
    """Requests that one thread reads, one after another.

    Parameters
    ----------
    requests, location
        See `Batch`.
    handles, owner
        Handle of each request's file, and the object that keeps them valid.
    memory
        Pool for memory.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        location: Location,
        handles: Sequence[int],
        owner: object,
        memory: BufferPool,
    ) -> None:
        super().__init__(requests, location)
        self._handles, self._owner, self._memory = handles, owner, memory

    def cancel(self) -> None:
        """Do not begin to read; see `Batch`."""
        self.is_here.cancel()

    def read(self) -> None:
        if not self.is_here.set_running_or_notify_cancel():
            return
        try:
            n_bytes = sum(each.stop - each.first for each in self.requests)
            memory = self._memory.acquire(n_bytes).array(np.dtype(np.uint8), n_bytes)
            begin = 0
            for k, (request, handle) in enumerate(zip(self.requests, self._handles, strict=True)):
                end = begin + request.stop - request.first
                self.answers[k] = _read(handle, request.first, memory[begin:end])
                begin = end
        except BaseException as error:  # noqa: BLE001 - it is raised where the bytes are due
            self.is_here.set_exception(error)
        else:
            self.is_here.set_result(None)


def _read(handle: int, offset: int, into: NDArray[np.uint8]) -> NDArray[np.uint8] | OSError | None:
    """Read up to the end of the file, and return the bytes; None if it is missing, or the error."""
    try:
        if handle >= 0:
            return _filled(handle, offset, into)
        descriptor = os.open(ctypes.string_at(-handle), _UNBUFFERED)
        try:
            return _filled(descriptor, offset, into)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        is_link = handle < 0 and os.path.islink(ctypes.string_at(-handle))  # noqa: PTH114 - bytes
        return error.with_traceback(None) if is_link else None
    except OSError as error:
        return error.with_traceback(None)


def _filled(descriptor: int, offset: int, into: NDArray[np.uint8]) -> NDArray[np.uint8]:
    done = 0
    while done < into.size:
        n = os.preadv(descriptor, [into.data[done:]], offset + done)
        done += n
        if n == 0 or done % _ALIGNMENT:  # the end of the file
            break
    return into[:done]


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that read, of this process."""
    return ThreadPoolExecutor(_N_THREADS, thread_name_prefix="cellfeed-unbuffered")


os.register_at_fork(after_in_child=_threads.cache_clear)


# Checking whether a file supports direct I/O, before it is used.

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # of which some only seem to take O_DIRECT
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def check_unbuffered(path: Path) -> None:
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
    kind = file_system(path)
    if kind in _IN_MEMORY or not _takes_unbuffered_reads(path):
        which = f"its file system ({kind})" if kind else "its file system"
        raise ParameterError(
            f"{path}: {which} does not support direct I/O; open it without `direct_io`"
        )


def _takes_unbuffered_reads(path: Path) -> bool:
    try:
        descriptor = os.open(path, _UNBUFFERED)
    except OSError as error:
        return error.errno not in _REFUSED
    try:
        os.preadv(descriptor, [mmap.mmap(-1, _ALIGNMENT)], 0)
    except OSError as error:
        return error.errno not in _REFUSED
    finally:
        os.close(descriptor)
    return True
