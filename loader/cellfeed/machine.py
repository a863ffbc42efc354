"""What this process may use of the machine: processors, memory, and a folder to keep files in."""

import math
import os
import sys
from pathlib import Path

import psutil
from platformdirs import user_cache_path

from cellfeed._cgroup import cpu_quota, memory_headroom
from cellfeed._errors import PathError

__all__ = [
    "cache_folder",
    "local_world_size",
    "threads_per_process",
    "usable_cores",
    "usable_memory_bytes",
]

_DIGITS_OF_NONSENSE = 10


def cache_folder(name: str) -> Path:
    """Return a folder for files that can be rebuilt; it may not exist yet.

    It is in ``CELLFEED_CACHE_DIR`` if that is set, else in ``cellfeed`` in the user's cache folder:
    ``XDG_CACHE_HOME`` or ``~/.cache`` on Linux, ``~/Library/Caches`` on macOS.

    Parameters
    ----------
    name
        What it holds: ``autotune`` (results), ``tables`` (where rows and chunks lie), or ``bytes``
        and ``pages`` (of remote files).

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
    stated = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    # No machine runs a billion; longer numbers could not even be parsed.
    is_number = stated.isascii() and stated.isdecimal() and len(stated) < _DIGITS_OF_NONSENSE
    return max(1, int(stated)) if is_number else 1


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
