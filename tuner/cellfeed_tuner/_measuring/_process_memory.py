"""Memory of a process and its workers."""

import psutil

__all__ = ["tree_memory_bytes"]


def tree_memory_bytes(pid: int) -> int:
    """Return the memory that a process and its descendants hold now, in bytes.

    The resident memory of the process, and what each descendant does not share with it: a worker
    that was forked shares most of its memory until it writes to it. 0 if the process is gone.
    """
    try:
        process = psutil.Process(pid)
        total = int(process.memory_info().rss)
        for child in process.children(recursive=True):
            total += _private_bytes(child)
    except psutil.NoSuchProcess:
        return 0
    return total


def _private_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
