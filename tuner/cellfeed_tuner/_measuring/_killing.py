"""Processes that are killed with all that they started."""

import contextlib
import os
import signal

import psutil

__all__ = ["ChildKilledError", "kill_tree"]


class ChildKilledError(RuntimeError):
    """A process that a request needs was killed."""


def kill_tree(pid: int) -> None:
    """Kill a process, its descendants and the process groups that these lead.

    Each is stopped before it is asked for its children, so that it starts no more of them
    meanwhile. In a group, those are found whose parent has ended.
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
