"""The thread that serves the connections of a process: one event loop, started when needed."""

import asyncio
import atexit
import os
import threading

__all__ = ["loop"]

_END_SECONDS = 2.0

_lock = threading.Lock()
_started: tuple[int, asyncio.AbstractEventLoop, threading.Thread] | None = None


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; a fork starts its own."""
    global _started, _lock  # noqa: PLW0603 - one loop for the process
    if _started is not None and _started[0] == os.getpid():
        return _started[1]
    if _started is not None:
        _lock = threading.Lock()  # another thread may have held the old lock at the fork
    with _lock:
        if _started is None or _started[0] != os.getpid():
            made = asyncio.SelectorEventLoop()
            thread = threading.Thread(
                target=made.run_forever, name="cellfeed-postgres", daemon=True
            )
            thread.start()
            _started = os.getpid(), made, thread
        return _started[1]


@atexit.register
def _end() -> None:
    """Stop the thread before Python stops it at an arbitrary point."""
    if _started is None or _started[0] != os.getpid():
        return
    _, made, thread = _started

    def cancel() -> None:
        for task in asyncio.all_tasks(made):
            task.cancel()
        made.call_soon(made.stop)

    made.call_soon_threadsafe(cancel)
    thread.join(_END_SECONDS)
    if not thread.is_alive():
        made.close()
