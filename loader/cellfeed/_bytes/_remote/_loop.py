"""The thread that runs requests, many at a time.

It runs one event loop for the process. When the process exits, pending requests are cancelled
instead of waiting for a server.
"""

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from typing import Any, TypeVar

from cellfeed._bytes._store import LOOK_UP_SECONDS, is_awaited

_END_SECONDS, _END_STEP_SECONDS = 2.0, 0.005

_Result = TypeVar("_Result")


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows the futures which obstore's threads still refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.held = weakref.WeakSet[asyncio.Future[Any]]()

    def create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = super().create_future()
        self.held.add(future)
        return future


_lock = threading.Lock()
_loop: _Loop | None = None
_thread: threading.Thread | None = None
_process = -1


class GivenUpError(Exception):
    """The awaited result is no longer needed."""


class ForkedError(RuntimeError):
    """The process was forked from one that had already read from servers."""


def check_process() -> None:
    """Check that this process may use the network client, whose threads do not survive a fork.

    Raises
    ------
    ForkedError
        This process was forked from one that used it.
    """
    global _process  # noqa: PLW0603 - one client for the process
    if _process == -1:
        _process = os.getpid()
    elif is_forked():
        raise ForkedError


def is_forked() -> bool:
    """Return whether the process was forked from one that used the network client."""
    return _process not in (-1, os.getpid())


async def from_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in this loop, and await its result from a coroutine of another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, _started()))


def result_of(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in the loop and wait for its result; Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _started())
    try:
        while not wait([future], LOOK_UP_SECONDS).done:
            if not is_awaited():
                raise GivenUpError
        return future.result()
    except CancelledError:  # the process is exiting
        raise GivenUpError from None
    finally:
        future.cancel()


def in_loop(call: Callable[..., object], *arguments: Any) -> None:
    """Schedule a call in the thread of the loop; returns immediately."""
    loop = _started()
    if not loop.is_closed():  # as it is when the process exits
        loop.call_soon_threadsafe(call, *arguments)


def _started() -> _Loop:
    global _loop, _thread  # noqa: PLW0603 - one loop for the process
    if _loop is not None:  # without the lock, which this thread may hold when a destructor calls
        return _loop
    with _lock:
        if _loop is None:
            loop = _Loop()
            _thread = threading.Thread(
                target=loop.run_forever, name="cellfeed-requests", daemon=True
            )
            _thread.start()
            _loop = loop
        return _loop


@atexit.register
def _end() -> None:
    """Cancel pending requests, before Python stops the thread at an arbitrary point."""
    loop, thread = _loop, _thread
    if loop is None or thread is None or _process != os.getpid():
        return

    latest = time.monotonic() + _END_SECONDS

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(stop)

    def stop() -> None:
        # Threads of obstore that return to a finalized interpreter would print errors.
        if loop.held and time.monotonic() < latest:
            loop.call_later(_END_STEP_SECONDS, stop)
        else:
            loop.stop()

    loop.call_soon_threadsafe(cancel)
    thread.join(timeout=5)
    if not thread.is_alive():
        loop.close()
