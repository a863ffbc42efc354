"""Processes and their descendants: memory, processor time, bytes read, and how to kill them."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "BytesRead", "ProcessorTime", "Progressed", "bytes_read", "end_of", "kill_tree",
    "processor_time_between", "reap", "thread_times", "tree_cpu_seconds", "tree_memory_bytes",
]  # fmt: skip

_SIGNALS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
}
_REAP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Progressed:
    """What requests that deliver minibatches report: so many have come by now.

    This is written to shared memory, which takes a microsecond, and is no event.
    """

    n_minibatches: int


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


def end_of(pid: int) -> tuple[str, bool] | None:
    """Return how a child ended, in words, and whether it was killed; None if it still runs.

    Its status is kept for `reap`.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it was reaped
        return "ended", False
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return f"exited with status {found.si_status}", False
    if found.si_status == signal.SIGKILL:
        return "was killed, perhaps for want of memory", True
    name = _SIGNALS.get(signal.Signals(found.si_status), signal.Signals(found.si_status).name)
    return f"crashed ({name})", False


def reap(pid: int, *, limit_seconds: float) -> None:
    """Wait for the end of a killed child; not for one that the kernel does not let end."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(_REAP_SECONDS)
                continue
        return


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
