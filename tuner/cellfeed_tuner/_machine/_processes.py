"""Processes and their descendants: memory, processor time, bytes read, and how to kill them."""

import contextlib
import multiprocessing
import os
import signal
from dataclasses import dataclass

import psutil

__all__ = [
    "BytesRead", "bytes_read", "kill_tree", "tree_cpu_seconds", "tree_memory_bytes",
]  # fmt: skip


def kill_tree(pid: int) -> None:
    """Kill a process, its descendants and the process groups that these lead.

    Each is stopped before its children are listed, so that it starts no more of them meanwhile.
    Descendants whose parent has ended are found by their group.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process, members = psutil.Process(pid), set[psutil.Process]()
        new = {process}
        while new:
            for each in new:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    each.suspend()
            members |= new
            new = {*process.children(recursive=True)} - members
        for each in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads no group
                os.killpg(each.pid, signal.SIGKILL)
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                each.kill()


def tree_memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants now; 0 if the process is gone.

    The resident memory of the process, plus the unshared memory of each descendant: a forked worker
    shares most of its memory until it writes to it.
    """
    try:
        process = psutil.Process(pid)
        total = int(process.memory_info().rss)
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += int(child.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0
    return total


def tree_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, with ended ones; 0 if gone."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
        # User and system time, of itself and of its ended children.
        return float(sum(sum(each.cpu_times()[:4]) for each in tree))
    except psutil.Error:
        return 0.0


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
