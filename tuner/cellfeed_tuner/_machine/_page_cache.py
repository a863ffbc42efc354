"""Empty, fill and inspect the kernel's page cache for data files."""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CacheState", "PageRuns", "drop_clean_pages", "drop_pages", "load_pages", "resident_fraction",
    "resident_runs",
]  # fmt: skip

CacheState = Literal["cold", "warm", "remote"]
"""Whether a measurement starts with none or with all of its files in the page cache; "remote" for
files on a server, whose caches are not under control."""

PageRuns = NDArray[np.int64]
"""First page of each run of pages of a file, and the page after its last, shape (n_runs, 2)."""

_LINUX = sys.platform.startswith("linux")
_READ_BYTES = 8 << 20
_WINDOW_BYTES = 1 << 30  # mincore fills one byte per page: 256 KiB for each window of 4 KiB pages


def drop_pages(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the cached pages of some files, and write dirty ones to disk.

    This request needs no privilege. Pages that another process has mapped stay, and so do those of
    a file system in memory; pages that this process has mapped go. `resident_fraction` reports the
    result. Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        _release_mappings(paths)
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                runs = resident_runs(path)
                if runs is None or len(runs):
                    # Dirty pages cannot be dropped: a recently written file needs a flush.
                    os.fdatasync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_clean_pages(
    paths: Sequence[Path], runs: Sequence[PageRuns] | None = None, *, mapped: bool = False
) -> None:
    """Ask the kernel again to forget pages of files that `drop_pages` has flushed before.

    All pages, or some ``runs`` of each file. The kernel keeps pages in groups and forgets whole
    groups only, so runs should begin and end where those of `resident_runs` do. This takes
    microseconds for each file, since it does not inspect pages as `drop_pages` does; milliseconds
    if this process may have ``mapped`` the files.
    """
    if sys.platform == "linux":
        whole = np.zeros((1, 2), np.int64)  # a length of 0 reaches to the end
        of_paths = zip(paths, [whole] * len(paths) if runs is None else runs, strict=True)
        some = [(path, of_path) for path, of_path in of_paths if len(of_path)]
        if mapped and some:
            _release_mappings([path for path, _ in some])
        for path, of_path in some:
            with path.open("rb") as file:
                for start, stop in (of_path * mmap.PAGESIZE).tolist():
                    os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)


def _release_mappings(paths: Sequence[Path]) -> None:
    """Release mapped pages of files, which the kernel would otherwise keep.

    No other thread may unmap files meanwhile: their addresses might be reused.
    """
    names = {os.fsencode(path.resolve()) for path in paths}
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        # For example "7f01e000-7f02e000 r--s 00000000 fe:00 1234    /data/plate1.h5ad".
        addresses, permissions, *_, name = line.split(None, 5)
        if name in names and b"w" not in permissions:  # written pages may have no other copy
            start, stop = (int(each, 16) for each in addresses.split(b"-"))
            _libc_call("madvise", start, stop - start, mmap.MADV_DONTNEED)


def resident_fraction(paths: Sequence[Path]) -> float | None:
    """Return the share of the files' bytes that is in the page cache, 0 to 1.

    No page is read, and memory stays below 1 MiB for files of any size. None if it is unknown: on
    systems other than Linux, for empty files, and for files that this user neither owns nor may
    write, which the kernel always reports as resident.
    """
    resident = total = 0
    for path in paths:
        runs, size = resident_runs(path), path.stat().st_size
        if runs is None:
            return None
        ends = np.minimum(runs * mmap.PAGESIZE, size)  # the last page may be short
        resident += int(np.diff(ends).sum())
        total += size
    return min(resident / total, 1.0) if total else None


def resident_runs(path: Path) -> PageRuns | None:
    """Return which pages of a file are cached; None as for `resident_fraction`."""
    with path.open("rb") as file:
        fd = file.fileno()
        if not _LINUX or not _is_reported(path, fd):
            return None
        size = os.fstat(fd).st_size
        parts = [np.empty((0, 2), np.int64)]
        try:
            for offset in range(0, size, _WINDOW_BYTES):
                runs = _runs_in_window(fd, offset, min(_WINDOW_BYTES, size - offset))
                parts.append(runs + offset // mmap.PAGESIZE)
        except (OSError, ValueError):  # a file system without mappings; a file truncated meanwhile
            return None
    return np.concatenate(parts)


def load_pages(paths: Sequence[Path]) -> None:
    """Read some files from end to end, so that they are in the page cache.

    Files larger than the free memory do not stay; see `resident_fraction`.
    """
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _is_reported(path: Path, fd: int) -> bool:
    """Return whether mincore is truthful: since Linux 5.2 only to users who may write the file."""
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _runs_in_window(fd: int, offset: int, length: int) -> PageRuns:
    around = np.zeros(-(-length // mmap.PAGESIZE) + 2, dtype=np.uint8)  # a run ends at the ends
    with mmap.mmap(fd, length, access=mmap.ACCESS_READ, offset=offset) as window:
        # NumPy gives the address of a read-only mapping, ctypes only of a writable one. No element
        # is touched, since that would load its page.
        view = np.frombuffer(window, dtype=np.uint8)
        _libc_call("mincore", view.ctypes.data, length, around[1:].ctypes.data)
        del view  # a mapping with a live view cannot be closed
    around &= 1
    return np.flatnonzero(around[1:] != around[:-1]).reshape(-1, 2)


def _libc_call(name: str, address: int, length: int, last: int) -> None:
    """Call a function of the C library about a range of memory."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    function.restype = ctypes.c_int
    if function(address, length, last) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
