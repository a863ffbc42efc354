"""Processes that are killed with all that they started."""

import contextlib

import psutil

__all__ = ["ChildKilledError", "kill_tree"]


class ChildKilledError(RuntimeError):
    """A process that a request needs was killed."""


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, those that are still there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
