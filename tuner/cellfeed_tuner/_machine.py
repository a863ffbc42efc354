"""What runs the loader: processor, memory, storage, and the page cache between."""

import contextlib
import multiprocessing
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from cellfeed.machine import usable_cores, usable_memory_bytes
from cellfeed_tuner._constants import LEAST_BUSY_SHARE

# Processes and their descendants: memory, processor time, bytes read, and how to kill them.


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds that threads ran on a processor, and that they were ready and waited for one."""

    running: float
    waiting: float

    def __add__(self, other: "ProcessorTime") -> "ProcessorTime":
        return ProcessorTime(self.running + other.running, self.waiting + other.waiting)


ThreadTimes = Mapping[tuple[int, str], tuple[int, int]]
"""Nanoseconds run and waited by process and thread."""


def thread_times() -> ThreadTimes | None:
    """Return the times of all threads of this process and its workers; None if not counted."""
    found = dict[tuple[int, str], tuple[int, int]]()
    for pid in [os.getpid(), *(each.pid or 0 for each in multiprocessing.active_children())]:
        with contextlib.suppress(OSError):  # it has ended, or this is another system
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    ran, waited, _ = (thread / "schedstat").read_bytes().split()
                    found[pid, thread.name] = int(ran), int(waited)
    return found or None


def processor_time_between(
    before: ThreadTimes | None, after: ThreadTimes | None
) -> ProcessorTime | None:
    """Return what threads that are still there took since; None if it was not counted."""
    if before is None or after is None:
        return None
    nothing = (0, 0)
    ran, waited = (
        sum(times[kind] - before.get(thread, nothing)[kind] for thread, times in after.items())
        for kind in (0, 1)
    )
    return ProcessorTime(ran / 1e9, waited / 1e9)


@dataclass(frozen=True, slots=True)
class BytesRead:
    """Bytes requested from the system, and bytes that it read from storage."""

    asked: float
    from_storage: float

    def __add__(self, other: "BytesRead") -> "BytesRead":
        return BytesRead(self.asked + other.asked, self.from_storage + other.from_storage)

    def __sub__(self, earlier: "BytesRead") -> "BytesRead":
        return BytesRead(self.asked - earlier.asked, self.from_storage - earlier.from_storage)


def bytes_read() -> BytesRead | None:
    """Return the bytes that this process and its workers have read so far; None if not counted.

    The kernel adds the bytes of a worker to its parent's when it has ended.
    """
    asked = from_storage = 0
    for pid in [None, *(worker.pid for worker in multiprocessing.active_children())]:
        try:
            counters = psutil.Process(pid).io_counters()
            asked += counters.read_chars
            from_storage += counters.read_bytes
        except (AttributeError, NotImplementedError, OSError, psutil.Error):
            return None
    return BytesRead(asked, from_storage)


# How much processor time other programs took during a measurement.

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as user time already


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Processor seconds that programs other than the measured ones took in so many seconds.

    Summed over all processors that this process may run on; in a virtual machine, with the time
    that the host gave to others.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __add__(self, other: "OtherPrograms") -> "OtherPrograms":
        return OtherPrograms(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """How busy other programs kept the machine while throughput was measured.

    Parameters
    ----------
    other_cores
        How many processors they kept busy, on average.
    share
        The share of this process's usable processors that they took, 0 to 1.
    """

    other_cores: float
    share: float

    @classmethod
    def of(
        cls, others: OtherPrograms, *, n_cores: int | None = None, usable: float | None = None
    ) -> "Busy | None":
        """Return how busy they kept it; None if nothing was measured.

        This process may run on ``n_cores``, and use ``usable`` at a time, which is less under the
        quota of a control group.
        """
        if not others.seconds:
            return None
        n_cores = len(_processors()) if n_cores is None else n_cores
        usable = usable_cores() if usable is None else usable
        other_cores = max(0.0, others.cpu_seconds / others.seconds)
        left = n_cores - other_cores
        return cls(other_cores=other_cores, share=min(max(1 - left / usable, 0.0), 1.0))

    @property
    def sentence(self) -> str:
        """A warning; empty if it does not matter."""
        if self.share < LEAST_BUSY_SHARE:
            return ""
        return (
            f"Other programs took {self.share:.0%} of the processors while throughput was "
            "measured; figures may be too low."
        )


def undisturbed_share(
    seconds: float, processor: ProcessorTime | None, other_cores: float, *, cores: float
) -> float:
    """Return the share of a time that the same work would have taken without other programs.

    While ``p = (running + waiting) / seconds`` threads could run, on average, waiting for a
    processor delayed the work by ``waiting / p``, or by ``waiting`` if p < 1. Threads also wait for
    each other, so that no more counts than other programs took of the processors that the threads
    could have used. What remains is at least the processor time divided by the cores.

    Parameters
    ----------
    seconds
        Duration by the clock.
    processor
        Processor time of all threads meanwhile; None if unknown, so that nothing is corrected.
    other_cores
        Processors that other programs kept busy, on average.
    cores
        Usable processors.

    Examples
    --------
    Two threads on two processors, one of which another program took:

    >>> undisturbed_share(10.0, ProcessorTime(10.0, 10.0), 1.0, cores=2)
    0.5

    A thread that waits for the disk leaves processors to others:

    >>> undisturbed_share(10.0, ProcessorTime(1.0, 0.0), 1.5, cores=2)
    1.0
    """
    if processor is None or seconds <= 0:
        return 1.0
    runnable = max(1.0, (processor.running + processor.waiting) / seconds)
    taken = other_cores * seconds / min(runnable, cores)
    delay = min(processor.waiting / runnable, taken)
    return min(1.0, max(1 - delay / seconds, processor.running / cores / seconds))


class ProcessorClock:
    """Measures the processor time of other programs from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = _busy_cpu_seconds()
        self._own = time.process_time()

    def others(self, measured_cpu_seconds: float) -> OtherPrograms:
        """Return the time of all programs but this process and the measured ones."""
        own = time.process_time() - self._own + measured_cpu_seconds
        seconds = time.monotonic() - self._began
        return OtherPrograms(seconds, max(0.0, _busy_cpu_seconds() - self._busy - own))


def _busy_cpu_seconds() -> float:
    """Return the busy time of the processors that this process may run on."""
    per_cpu = psutil.cpu_times(percpu=True)
    processors = _processors()
    ours = per_cpu if len(per_cpu) <= max(processors) else [per_cpu[each] for each in processors]
    return float(sum(sum(each) - sum(getattr(each, n, 0.0) for n in _NOT_BUSY) for each in ours))


def _processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


# The machine as this process sees it: cores, memory, storage under the data, versions.

StorageKind = Literal["local", "network", "memory"]
"""Where a file system keeps its data. FUSE counts as network, since it may hide one."""

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# fmt: off
_NETWORK = frozenset({
    "9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "fhgfs", "fuse", "glusterfs", "gpfs", "lustre",
    "macfuse", "nfs", "nfs4", "orangefs", "osxfuse", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs",
    "webdav", "wekafs",
})
# fmt: on


_PACKAGES = ("cellfeed", "anndata", "h5py", "numpy", "scipy", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The file system under some of the data, with None for an unknown field.

    ``file_system`` is its type, such as ``ext4``; ``kind`` says whether it is on this machine's
    disks, on a network or in memory; ``device`` is a device, or an export of a server.
    """

    mount_point: str | None
    file_system: str | None
    kind: StorageKind | None
    device: str | None


_UNKNOWN = Storage(mount_point=None, file_system=None, kind=None, device=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor; what the system does not report is None.

    ``usable_cores`` is the lower of this process's affinity and its control group's quota, which
    may be fractional.
    """

    model: str | None
    logical_cores: int
    usable_cores: float
    frequency_governor: str | None = None
    numa_nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Main memory of the machine, and how much this process can take now.

    That is without swapping or reaching its control group's limit.
    """

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The operating system, its kernel, Python, and the packages that affect speed.

    ``system`` is None if unknown, and so is the version of a package that is not installed.
    """

    system: str | None
    kernel: str
    architecture: str
    python: str
    packages: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All properties of a machine that measured throughput depends on.

    Attributes
    ----------
    cpu
        Processor and usable cores.
    memory
        Total and available memory.
    storage
        Each file system under the data.
    platform
        Operating system and versions.
    """

    cpu: Cpu
    memory: Memory
    storage: tuple[Storage, ...]
    platform: Platform


def describe_machine(paths: Sequence[Path]) -> Machine:
    """Describe the machine, and the file systems under some files.

    Returns
    -------
    Machine
        With None for whatever this system does not report.

    Examples
    --------
    >>> machine = describe_machine([])
    >>> 0 < machine.cpu.usable_cores <= machine.cpu.logical_cores
    True
    """
    import h5py  # noqa: PLC0415 - showing results needs none

    return Machine(
        cpu=Cpu(
            model=_cpu_model(),
            logical_cores=psutil.cpu_count(logical=True) or 1,
            usable_cores=usable_cores(),
            frequency_governor=_frequency_governor(),
            numa_nodes=_numa_nodes(),
        ),
        memory=Memory(
            total_bytes=psutil.virtual_memory().total, available_bytes=usable_memory_bytes()
        ),
        storage=describe_storage(paths),
        platform=Platform(
            system=_system(),
            kernel=f"{platform.system()} {platform.release()}",
            architecture=platform.machine(),
            python=platform.python_version(),
            packages={name: package_version(name) for name in _PACKAGES}
            | {"hdf5": h5py.version.hdf5_version},
        ),
    )


_SYSTEM_FILES = Path("/sys/devices/system")


def _frequency_governor() -> str | None:
    """Return how Linux sets frequencies, such as "performance" or "powersave"; None if unknown."""
    with contextlib.suppress(OSError):
        return (_SYSTEM_FILES / "cpu/cpu0/cpufreq/scaling_governor").read_text().strip() or None
    return None


def _numa_nodes() -> int | None:
    return sum(1 for _ in _SYSTEM_FILES.glob("node/node[0-9]*")) or None


def _cpu_model() -> str | None:
    if platform.system() != "Linux":
        return platform.processor() or None
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def _system() -> str | None:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def package_version(distribution: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_storage(paths: Sequence[Path]) -> tuple[Storage, ...]:
    """Describe each file system under some files, in the order of the files."""
    mounts = _mounts()
    return tuple(dict.fromkeys(_storage_of(path.resolve(), mounts) for path in paths))


def _mounts() -> list[Storage]:
    with contextlib.suppress(OSError):
        return [
            Storage(
                mount_point=row.mountpoint,
                file_system=row.fstype,
                kind=_kind(row.fstype),
                device=row.device or None,
            )
            for row in psutil.disk_partitions(all=True)
        ]
    return []


def _storage_of(path: Path, mounts: Sequence[Storage]) -> Storage:
    """Return the innermost mount above a path; the last of several on one folder hides the rest."""
    above = [each for each in reversed(mounts) if path.is_relative_to(each.mount_point or "")]
    return max(above, key=lambda each: len(Path(each.mount_point or "").parts), default=_UNKNOWN)


def _kind(file_system: str) -> StorageKind:
    family = file_system.lower().partition(".")[0]  # "fuse.sshfs" is of the family "fuse"
    if family in _MEMORY:
        return "memory"
    return "network" if family in _NETWORK else "local"


# Empty, fill and inspect the kernel's page cache for data files.
