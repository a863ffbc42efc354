"""What this process may use of the machine: processors, memory, and a folder to keep files in."""

import math
import os
import resource
import sys
from pathlib import Path, PurePosixPath

import psutil
from platformdirs import user_cache_path

from cellfeed._errors import PathError

__all__ = [
    "cache_folder",
    "local_world_size",
    "threads_per_process",
    "usable_cores",
    "usable_memory_bytes",
]


def cache_folder(name: str) -> Path:
    """Return a folder for files that can be rebuilt; it may not exist yet.

    It is in ``CELLFEED_CACHE_DIR`` if that is set, else in ``cellfeed`` in the user's cache folder:
    ``XDG_CACHE_HOME`` or ``~/.cache`` on Linux, ``~/Library/Caches`` on macOS.

    Parameters
    ----------
    name
        What it holds: ``autotune`` (results), ``tables`` (where rows and chunks lie), or ``bytes``
        (of remote files).

    Raises
    ------
    PathError
        The user's home folder is unknown, and no variable names another.

    Examples
    --------
    >>> cache_folder("tables").name
    'tables'
    """
    given = os.environ.get("CELLFEED_CACHE_DIR")
    if given:
        return Path(given) / name
    try:
        # Where the home folder is unknown, older versions of platformdirs leave a ~ in the path.
        return user_cache_path("cellfeed").expanduser() / name
    except RuntimeError as error:
        msg = "no cache folder, as the home folder is unknown; name one in CELLFEED_CACHE_DIR"
        raise PathError(msg) from error


def usable_cores() -> float:
    """Return how many cores' worth of time this process may use.

    The lower of its affinity and its control groups' quota, which may be a fraction.

    Examples
    --------
    >>> usable_cores() > 0
    True
    """
    cores = float(psutil.cpu_count(logical=True) or 1)
    if sys.platform == "linux":
        cores = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota()
    return cores if quota is None else min(cores, quota)


def usable_cpu_count() -> int:
    """Return how many whole cores this process may use, at least 1.

    Counts what affinity and control groups leave, unlike `os.cpu_count`.

    Examples
    --------
    >>> usable_cpu_count() >= 1
    True
    """
    return max(1, math.floor(usable_cores()))


def local_world_size() -> int:
    """Return how many ranks torchrun started on this machine, this one among them, at least 1.

    It says so in the environment variable ``LOCAL_WORLD_SIZE``; 1 where that is not there or is
    no such number.

    Examples
    --------
    >>> local_world_size() >= 1
    True
    """
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def threads_per_process(n_processes: int) -> int:
    """Return how many threads read in each of so many processes, so that no core is shared.

    The processors that this process may use are divided among the processes of all ranks that
    torchrun started on this machine. Where each rank is bound to processors of its own, that is
    too few: give the number of threads.

    Parameters
    ----------
    n_processes
        Processes of this rank, at least 1.

    Examples
    --------
    >>> threads_per_process(10_000)
    1
    """
    return max(1, usable_cpu_count() // (n_processes * local_world_size()))


def usable_memory_bytes() -> int:
    """Return how many bytes of memory this process can take now, swap left out.

    The lower of what the machine has available and what the control groups leave.

    Examples
    --------
    >>> usable_memory_bytes() <= psutil.virtual_memory().total
    True
    """
    available = int(psutil.virtual_memory().available)
    headroom = memory_headroom()
    return available if headroom is None else min(available, headroom)


# Limits that Linux control groups (v1, v2 and hybrid) set for this process.
#
# Each function takes the root of a file tree with ``proc/self/cgroup`` and ``sys/fs/cgroup``. If
# the files are absent or name no limit, there is none. A limit may be set on the process's own
# group or on any group above it; all of these are read, and the tightest limit is returned.

_ROOT = Path("/")
_V2 = ""  # the name of the v2 hierarchy in /proc/self/cgroup, whose lines read "0::/path"
_UNLIMITED = 1 << 60  # v1 writes "no limit" as 2**63 rounded down to a page
# Of v1 and v2: files with limits, and with the usage, and rows of memory.stat with cached pages.
# Above memory.high the process is not killed but slowed until it is of no use.
_MEMORY = {
    "memory": (
        ["memory.limit_in_bytes"],
        "memory.usage_in_bytes",
        {"total_active_file", "total_inactive_file"},
    ),
    _V2: (["memory.max", "memory.high"], "memory.current", {"active_file", "inactive_file"}),
}


def share_of_descriptors(divisor: int, n_held: int) -> int:
    """Return a part of the descriptors that this process has left, and of ``n_held``."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        n_left = limit - len(os.listdir("/dev/fd"))  # noqa: PTH208 - names suffice
    except OSError:  # listing takes one, too
        return 0
    return (n_left + n_held) // divisor


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU time that the control groups grant, in cores.

    Parameters
    ----------
    root
        Folder with ``proc`` and ``sys``.

    Returns
    -------
    float or None
        Quota over period, in cores, such as 1.5; None without a limit.
    """
    quotas = [*map(_quota_v1, _levels(root, "cpu")), *map(_quota_v2, _levels(root, _V2))]
    return min((each for each in quotas if each is not None), default=None)


def memory_headroom(root: Path = _ROOT) -> int | None:
    """Return how much memory this process can still allocate below the limits of control groups.

    Cached file pages count as free, since the kernel drops them before it refuses memory:
    otherwise a process that has read a large file would seem to have none left.

    Parameters
    ----------
    root
        Folder with ``proc`` and ``sys``.

    Returns
    -------
    int or None
        Bytes, 0 if the limit is reached; None without a limit.
    """
    free = list[int]()
    for hierarchy, (limits, usage, cached) in _MEMORY.items():
        for folder in _levels(root, hierarchy):
            stated = (_integer(folder / name) for name in limits)
            limit = min((each for each in stated if each is not None), default=_UNLIMITED)
            if limit < _UNLIMITED:
                rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
                in_cache = sum(int(row[1]) for row in rows if row and row[0] in cached)
                held = max(0, (_integer(folder / usage) or 0) - in_cache)
                free.append(max(0, limit - held))
    return min(free, default=None)


def _levels(root: Path, hierarchy: str) -> list[Path]:
    """Return the folders of this process's group and of all groups above it, in one hierarchy."""
    path = _memberships(root).get(hierarchy)
    mount = _mount(root / "sys/fs/cgroup", hierarchy)
    if path is None or mount is None:
        return []
    own = PurePosixPath(path.lstrip("/"))
    # In a container the path may be the host's, and the mount root is then the container's group.
    if ".." in own.parts or not (mount / own).is_dir():
        own = PurePosixPath()
    return [mount / level for level in (own, *own.parents)]


def _memberships(root: Path) -> dict[str, str]:
    """Return the path of this process's group for each hierarchy: a v1 controller, or v2."""
    memberships = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        memberships.update(dict.fromkeys(controllers.split(","), path))
    return memberships


def _mount(cgroups: Path, hierarchy: str) -> Path | None:
    if hierarchy == _V2:
        # Beside v1 hierarchies, v2 is mounted one folder further down.
        alone = (cgroups / "cgroup.controllers").exists()
        return cgroups if alone else cgroups / "unified"
    # Controllers may share a mount, such as "cpu,cpuacct".
    mounts = sorted(cgroups.iterdir()) if cgroups.is_dir() else []
    return next((mount for mount in mounts if hierarchy in mount.name.split(",")), None)


def _quota_v1(folder: Path) -> float | None:
    quota = _integer(folder / "cpu.cfs_quota_us")
    period = _integer(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _integer(path: Path) -> int | None:
    """Return the number in a file; None if the file is absent or contains ``max``."""
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
