"""Delaying Ctrl-C where it must not take effect immediately: in forks, writes and imports.

Commands start with this module, so it imports only modules that Python has already loaded.
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

__all__ = ["run_command"]

_INTERRUPTED = 130  # the exit code of shells after Ctrl-C
_SAID = "\nInterrupted.\n"


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, for example while it forks or writes.

    In the hooks that Python calls at a fork, `KeyboardInterrupt` would be printed and ignored, and
    the hook would not finish. Processes that are forked in the block leave Ctrl-C to this one.
    In threads other than the main thread, which get no `KeyboardInterrupt`, this has no effect.
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


def run_command(module: str, **options: Any) -> None:
    """Import a module and run its ``main``, so that Ctrl-C ends it with one line at any time.

    During imports, while no child process runs, nothing can be lost, so Ctrl-C ends the process
    immediately, with exit code 130. If it raised an exception, libraries that try several imports
    would take it for a failed import.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        importlib.import_module(module).main(**options)
    except KeyboardInterrupt:
        sys.stderr.write(_SAID)
        sys.exit(_INTERRUPTED)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    multiprocessing = sys.modules.get("multiprocessing")  # may be half imported
    if _is_importing(frame) and not getattr(multiprocessing, "active_children", list)():
        os.write(2, _SAID.encode())
        os._exit(_INTERRUPTED)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    from traceback import walk_stack  # noqa: PLC0415 - not loaded yet

    files = (each.f_code.co_filename for each, _ in walk_stack(frame))
    return any(each.startswith("<frozen importlib") for each in files)
