"""The file systems under the data: what they are, and how fast they read."""

import contextlib
import os
import stat
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from cellfeed_tuner._machine._page_cache import drop_pages, resident_fraction

__all__ = ["ReadSpeed", "Storage", "StorageKind", "describe_storage"]

StorageKind = Literal["local", "network", "memory"]
"""Where a file system keeps its data. FUSE counts as network, since it hides what is below."""

_SYS = Path("/sys")

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# fmt: off
_NETWORK = frozenset({
    "9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "fhgfs", "fuse", "glusterfs", "gpfs", "lustre",
    "macfuse", "nfs", "nfs4", "orangefs", "osxfuse", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs",
    "webdav", "wekafs",
})
# fmt: on
_CACHE_OF_ITS_OWN = frozenset({"zfs"})

_SEED = 0
_SLOT_BYTES = 64 << 10
_SEQUENTIAL_BYTES = 8 << 20
_LEAST_BYTES = 4 << 20
_MOST_FILES = 64
_MOST_RANDOM_READS = 1 << 16
_RESIDENT_AT_MOST = 0.01  # pages that another process has mapped cannot be dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpeed:
    """A measured read speed, one read at a time, from pages that were not cached.

    Only this machine's page cache was emptied: what a server, a disk or the host of a virtual
    machine caches is beyond the reach of a process.

    Attributes
    ----------
    bytes_per_second
        Bytes read over time taken.
    bytes_read
        Bytes the figure rests on.
    seconds
        Time the reads took.
    """

    bytes_per_second: float
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The file system under some of the data, None in each field that cannot be had.

    Attributes
    ----------
    mount_point
        Folder on which the file system is mounted.
    file_system
        Its type, such as ``ext4`` or ``lustre``.
    kind
        Whether the data lie on this machine's disks, behind a network, or in memory.
    device
        What is mounted: a device, or an export of a server.
    rotational
        Whether the kernel takes the device for a spinning disk. Virtual disks often say so
        whatever lies below them.
    model
        Model name of the device.
    sequential
        Speed of reads of 8 MiB one after the other.
    random
        Speed of reads of 64 KiB at random aligned offsets, no region twice.
    note
        Why the speeds are absent; empty if they are not.
    """

    mount_point: str | None
    file_system: str | None
    kind: StorageKind | None
    device: str | None
    rotational: bool | None
    model: str | None
    sequential: ReadSpeed | None
    random: ReadSpeed | None
    note: str


def describe_storage(paths: Sequence[Path], seconds: float) -> tuple[Storage, ...]:
    """Describe each file system under some files, and measure its speed on the files themselves.

    Random reads go to one half of their bytes and sequential ones to the other, after their pages
    are dropped from the page cache.

    Parameters
    ----------
    paths
        The user's data files.
    seconds
        Seconds for each of the two measurements per file system; 0 measures nothing.

    Returns
    -------
    One description per file system, in the order in which the paths first lie on it.
    """
    return tuple(
        _describe(mount, files, seconds)
        for mount, files in _files_by_mount(paths, _mounts()).items()
    )


# File systems


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A row of the table of mounted file systems."""

    mount_point: str
    file_system: str
    device: str


def _mounts() -> list[_Mount]:
    with contextlib.suppress(OSError):
        return [
            _Mount(mount_point=row.mountpoint, file_system=row.fstype, device=row.device)
            for row in psutil.disk_partitions(all=True)
        ]
    return []


def _files_by_mount(
    paths: Sequence[Path], mounts: Sequence[_Mount]
) -> dict[_Mount | None, list[Path]]:
    groups: dict[_Mount | None, list[Path]] = {}
    for path in (path.resolve() for path in paths):
        groups.setdefault(_mount_of(path, mounts), []).append(path)
    return groups


def _mount_of(path: Path, mounts: Sequence[_Mount]) -> _Mount | None:
    """Return the innermost mount above a path; the last of several on one folder hides the rest."""
    above = [mount for mount in reversed(mounts) if path.is_relative_to(mount.mount_point)]
    return max(above, key=lambda mount: len(Path(mount.mount_point).parts), default=None)


def _kind(file_system: str) -> StorageKind:
    family = file_system.lower().partition(".")[0]  # "fuse.sshfs" is of the family "fuse"
    if family in _MEMORY:
        return "memory"
    return "network" if family in _NETWORK else "local"


def _describe(mount: _Mount | None, files: list[Path], seconds: float) -> Storage:
    disk = _disk_folder(files[0], mount.device if mount else "", _SYS)
    sequential, random, note = _measure(mount, files, seconds)
    return Storage(
        mount_point=mount.mount_point if mount else None,
        file_system=mount.file_system if mount else None,
        kind=_kind(mount.file_system) if mount else None,
        device=(mount.device or None) if mount else None,
        rotational=_flag(disk / "queue/rotational") if disk else None,
        model=_text(disk / "device/model") if disk else None,
        sequential=sequential,
        random=random,
        note=note,
    )


def _disk_folder(path: Path, device: str, sys_root: Path) -> Path | None:
    """Return the folder in which /sys describes the disk below a file."""
    for number in _device_numbers(path, device):
        folder = sys_root / f"dev/block/{os.major(number)}:{os.minor(number)}"
        if folder.exists():
            return _whole_disk(folder.resolve())
    return None


def _device_numbers(path: Path, device: str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield path.stat().st_dev
    # A file of btrfs, for one, has a device number that belongs to no disk.
    with contextlib.suppress(OSError):
        status = Path(device).stat()
        if stat.S_ISBLK(status.st_mode):
            yield status.st_rdev


def _whole_disk(folder: Path) -> Path:
    """Go from a partition, or a mapped device with one disk below it, to the disk."""
    if (folder / "partition").exists():
        return _whole_disk(folder.parent)
    slaves = folder / "slaves"
    below = list(slaves.iterdir()) if slaves.is_dir() else []
    return _whole_disk(below[0].resolve()) if len(below) == 1 else folder


def _flag(path: Path) -> bool | None:
    return {"0": False, "1": True}.get(_text(path) or "")


def _text(path: Path) -> str | None:
    """Return a file's text without blanks around it, None if it is absent or empty."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


# Read speed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    fd: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """The whole slots of 64 KiB in some open files, numbered through from the first file on."""

    fds: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def middle(self) -> int:
        """The slot where the sequential half ends and the random one begins."""
        return self.ends[-1] // 2

    def read(self, slot: int) -> _Read:
        file = bisect_right(self.ends, slot)
        start = self.ends[file - 1] if file else 0
        return _Read(fd=self.fds[file], offset=(slot - start) * _SLOT_BYTES, length=_SLOT_BYTES)


def _measure(
    mount: _Mount | None, files: list[Path], seconds: float
) -> tuple[ReadSpeed | None, ReadSpeed | None, str]:
    """Return the sequential and the random speed, or the reason why there are none."""
    try:
        largest = _largest(files)
        note = _obstacle(mount, largest, seconds)
        if note:
            return None, None, note
        with contextlib.ExitStack() as stack:
            fds = tuple(stack.enter_context(path.open("rb")).fileno() for path in largest)
            slots = _number_slots(fds)
            # Random first: sequential reads make the kernel read ahead into the other half.
            _expect_random(fds, expected=True)
            random = _timed(_random_reads(slots), seconds)
            _expect_random(fds, expected=False)
            return _timed(_sequential_reads(slots), seconds), random, ""
    except OSError as error:
        return None, None, f"the files cannot be read: {error.strerror}"


def _largest(files: list[Path]) -> list[Path]:
    """Return files to measure on, few enough to be open at once."""
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    return sorted(sizes, key=lambda path: (-sizes[path], path))[:_MOST_FILES]


def _obstacle(mount: _Mount | None, files: list[Path], seconds: float) -> str:
    """Drop the files from the page cache, and return what stands against measuring, if anything."""
    if seconds == 0:
        return "not measured, as asked"
    if sum(path.stat().st_size // _SLOT_BYTES for path in files) * _SLOT_BYTES < _LEAST_BYTES:
        return f"the files hold less than {_LEAST_BYTES >> 20} MiB"
    if mount and mount.file_system in _CACHE_OF_ITS_OWN:
        return f"{mount.file_system} has a cache of its own, which cannot be emptied"
    drop_pages(files)
    resident = resident_fraction(files)
    if resident is None:
        return "the system does not tell this user whether the page cache holds the files"
    if resident > _RESIDENT_AT_MOST:
        return f"{resident:.0%} of the files' bytes could not be dropped from the page cache"
    return ""


def _number_slots(fds: tuple[int, ...]) -> _Slots:
    counts = (os.fstat(fd).st_size // _SLOT_BYTES for fd in fds)
    return _Slots(fds=fds, ends=tuple(accumulate(counts)))


def _expect_random(fds: tuple[int, ...], *, expected: bool) -> None:
    """Keep the kernel from reading ahead of random reads, into what a later one asks for."""
    if sys.platform == "linux":
        advice = os.POSIX_FADV_RANDOM if expected else os.POSIX_FADV_NORMAL
        for fd in fds:
            os.posix_fadvise(fd, 0, 0, advice)


def _random_reads(slots: _Slots) -> Iterator[_Read]:
    """Return reads of distinct slots of the second half, in an order that the seed fixes."""
    count = slots.ends[-1] - slots.middle
    draws = np.random.default_rng(_SEED).choice(
        count, size=min(count, _MOST_RANDOM_READS), replace=False
    )
    return (slots.read(slots.middle + draw) for draw in draws.tolist())


def _sequential_reads(slots: _Slots) -> Iterator[_Read]:
    """Yield reads that cover the first half, file after file."""
    start = 0
    for fd, end in zip(slots.fds, slots.ends, strict=True):
        size = (min(end, slots.middle) - start) * _SLOT_BYTES
        for offset in range(0, size, _SEQUENTIAL_BYTES):
            yield _Read(fd=fd, offset=offset, length=min(_SEQUENTIAL_BYTES, size - offset))
        start = end


def _timed(reads: Iterable[_Read], seconds: float) -> ReadSpeed:
    """Read until the time is over or the reads are; the read under way is finished."""
    buffer = memoryview(bytearray(_SEQUENTIAL_BYTES))
    bytes_read = 0
    elapsed = 0.0
    started = time.perf_counter()
    for read in reads:
        bytes_read += os.preadv(read.fd, [buffer[: read.length]], read.offset)
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            break
    return ReadSpeed(bytes_per_second=bytes_read / elapsed, bytes_read=bytes_read, seconds=elapsed)
