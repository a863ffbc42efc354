"""Cancelling threads that wait for bytes which may never arrive."""

import concurrent.futures.thread as futures_threads
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["LOOK_UP_SECONDS", "is_awaited", "threads_until_left", "until_left"]

LOOK_UP_SECONDS = 0.2  # between checks whether anybody still waits for the result


class _Own(threading.local):
    left: tuple[threading.Event, ...] = ()


_own = _Own()


def until_left(*left: threading.Event) -> None:
    """Cancel the waits of this thread once one of ``left`` is set."""
    _own.left = left


@contextmanager
def threads_until_left(n_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Provide threads that stop waiting when the block is left, or when this thread stops."""
    left = threading.Event()
    with ThreadPoolExecutor(
        n_threads, thread_name_prefix=name, initializer=until_left, initargs=(left, *_own.left)
    ) as threads:
        try:
            yield threads
        finally:
            left.set()


def is_awaited() -> bool:
    """Return whether this thread must still wait, which it must not once Python exits."""
    # Python joins the threads of executors before it marks the main thread as ended.
    is_ending = getattr(futures_threads, "_shutdown", False)
    is_left = any(each.is_set() for each in _own.left)
    return not (is_ending or is_left) and threading.main_thread().is_alive()
