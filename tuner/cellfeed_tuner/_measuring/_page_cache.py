"""The state of the page cache in which a measurement is made: prepared, kept, and inspected."""

import ctypes
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cellfeed import ParameterError
from cellfeed.machine import usable_memory_bytes
from cellfeed_tuner._constants import LOOKING_SHARE

if TYPE_CHECKING:  # it loads all storages
    from cellfeed import Collection

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


# Largest share of available memory that files may take to be measured warm. Chosen: the loader
# needs the rest.
WARM_SHARE_OF_MEMORY = 0.8


def bytes_on_disk(collection: "Collection") -> int:
    """Return the size of all files of a collection, on this machine or on servers."""
    return sum(source.file_bytes() for source in collection.sources)


def cache_state(collection: "Collection", requested: CacheState | None) -> CacheState:
    """Return the cache state to measure in: as requested, or else cold, or remote on servers.

    Caches of servers cannot be dropped or filled from here, so there is nothing to choose. An
    impossible state is a `ParameterError`, also if warm files do not fit in memory.
    """
    if not collection.is_remote:
        if requested == "remote":
            msg = (
                f"cache='remote' is for files on servers, but {collection.locations[0]} is on this "
                "machine; give 'cold' or 'warm'"
            )
            raise ParameterError(msg)
        size, available = bytes_on_disk(collection), usable_memory_bytes()
        if requested == "warm" and size > WARM_SHARE_OF_MEMORY * available:
            msg = (
                f"cache='warm' needs the files in memory, but they have {size / 1e9:.1f} GB "
                f"and {available / 1e9:.1f} GB are available; measure with cache='cold'"
            )
            raise ParameterError(msg)
        return requested or "cold"
    if requested in {"cold", "warm"}:
        first = next(each for each in collection.locations if each.is_remote)
        msg = (
            f"cache={requested!r} is for files of this machine, but {first} is read from a server, "
            "whose caches are not under control; leave `cache` out"
        )
        raise ParameterError(msg)
    return "remote"


# Share of pages that may be in the other cache state. Chosen: other processes may have mapped
# some.
STRAY_PAGES = 0.05


def prepare_cache(files: Sequence[Path], cache: CacheState) -> CacheState | Literal["unknown"]:
    """Bring the files' pages into a cache state, and return it.

    "unknown" if pages stayed, or the kernel does not report them.
    """
    if cache == "remote":
        return cache
    (drop_pages if cache == "cold" else load_pages)(files)
    resident = resident_fraction(files)
    if resident is None:
        return "unknown"
    as_wanted = resident <= STRAY_PAGES if cache == "cold" else resident >= 1 - STRAY_PAGES
    return cache if as_wanted else "unknown"


# Fetches that are read or planned while one is delivered. Source: `cellfeed.CellDataset`.
FETCHES_PREFETCHED = 2
# Fewest minibatches ahead whose pages are kept when caches are dropped. Chosen: more than the
# kernel reads ahead in a sequentially read file.
LEAST_MINIBATCHES_PREFETCHED = 8


def held_by_workers(loader: object) -> int:
    """Return how many minibatches workers of a `torch.utils.data.DataLoader` hold."""
    queued = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
    return int(getattr(loader, "n_sent_ahead", queued))


def rounds_prefetched(loader: object, minibatches_per_round: int) -> int:
    """Return after how many further rounds a loader has used everything it has read by now."""
    least = -(-LEAST_MINIBATCHES_PREFETCHED // minibatches_per_round)
    return max(FETCHES_PREFETCHED + -(-held_by_workers(loader) // minibatches_per_round), least)


class Dropping:
    """Drops pages of files after they were used, where ``cache`` is "cold".

    A cold measurement stands for files larger than memory: a page that a fetch has used is gone
    when a later fetch needs it again, which may be one of the same epoch if chunks are larger than
    blocks. Pages that were prefetched stay, since they would otherwise be read twice.

    Pages are told apart by age, for any loader and in all of its processes: pages that are cached
    at the end of a round are used by the end of the rounds that are prefetched, and dropped then.
    They stay if newer pages lie beside them: those belong to a running fetch, which may use a chunk
    that begins on an older page. If the kernel does not report cached pages, they are dropped
    before each epoch only.

    Parameters
    ----------
    mapped
        Whether this process may have mapped the files; cellfeed never maps those of a collection.
    looking_share
        Share of the time that listing cached pages may take; large files are listed less often.
    """

    def __init__(
        self,
        files: Sequence[Path],
        cache: CacheState,
        *,
        mapped: bool = False,
        looking_share: float = LOOKING_SHARE,
    ) -> None:
        self._paths = files if cache == "cold" else ()
        self._mapped = mapped
        self._looking_share = looking_share
        # Rounds, and the pages of each file that were cached at their ends.
        self._listed = deque[tuple[int, Sequence[PageRuns]]]()
        self._round = 0
        self._next = 0.0

    def before_epoch(self) -> None:
        """Drop all pages, since nothing has been read ahead."""
        drop_clean_pages(self._paths, mapped=self._mapped)
        self._listed.clear()
        self._round = 0

    def after_round(self, rounds_prefetched: int) -> None:
        """Drop pages that were cached so many rounds ago; see `rounds_prefetched`."""
        self._round += 1
        if not self._paths or time.perf_counter() < self._next:
            return
        begin = time.thread_time()
        runs = [resident_runs(path) for path in self._paths]
        known = [each for each in runs if each is not None]
        if len(known) == len(runs):
            used = self._used(rounds_prefetched)
            if used is not None:
                covered = [_covered(*each) for each in zip(known, used, strict=True)]
                drop_clean_pages(self._paths, covered, mapped=self._mapped)
            self._listed.append((self._round, known))
        taken = time.thread_time() - begin
        self._next = time.perf_counter() + taken / self._looking_share

    def _used(self, rounds_prefetched: int) -> Sequence[PageRuns] | None:
        """Return the latest listed pages that have been used since, and forget them."""
        used = None
        while self._listed and self._listed[0][0] + rounds_prefetched <= self._round:
            _, used = self._listed.popleft()
        return used


def _covered(runs: PageRuns, others: PageRuns) -> PageRuns:
    """Return the runs that lie within one of the others."""
    if not len(others):
        return others
    number = np.searchsorted(others[:, 0], runs[:, 0], side="right") - 1
    covered: PageRuns = runs[(number >= 0) & (runs[:, 1] <= others[number, 1])]
    return covered
