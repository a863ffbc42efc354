"""Ctrl-C where it must not take effect at once: in a fork, in a write, while modules are imported.

Nothing but what Python has loaded anyway is imported here, as commands start with it.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["interrupts_held", "run_command"]

_INTERRUPTED = 130  # as shells say it
_SAID = "\nInterrupted.\n"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back to the end of the block, such as one that forks or writes.

    In the hooks that Python calls at a fork it would be printed and forgotten, and the hook
    left undone. Processes that are forked in the block leave Ctrl-C to this one. In threads
    other than the main one, where nothing is raised, the block is as any other.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = list[tuple[Any, ...]]()
    signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


def run_command(module: str) -> None:
    """Import a module and run its ``main``, so that Ctrl-C ends it in one line at any time.

    While something is imported and no process of ours runs, nothing can be lost: Ctrl-C ends the
    process there and then, with exit code 130. As an exception it would be taken for a failed
    import by libraries that try one after the other.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        importlib.import_module(module).main()
    except KeyboardInterrupt:
        sys.stderr.write(_SAID)
        sys.exit(_INTERRUPTED)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    if _is_importing(frame) and not _has_processes():
        os.write(2, _SAID.encode())
        os._exit(_INTERRUPTED)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _has_processes() -> bool:
    multiprocessing = sys.modules.get("multiprocessing")  # may be half imported
    return bool(getattr(multiprocessing, "active_children", list)())
