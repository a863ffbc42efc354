"""Ctrl-C while ``autotune`` works: what was found by then, and what must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cellfeed_tuner._result import AutotuneResult

__all__ = ["AutotuneInterrupted", "interrupts_held_back"]


class AutotuneInterrupted(KeyboardInterrupt):
    """`autotune` was interrupted after it had measured something.

    A `KeyboardInterrupt` as any other, so that what calls `autotune` stops too, unless it wants
    to go on with ``result``.

    Parameters
    ----------
    result
        What was found by then; its ``interrupted`` is true.
    """

    def __init__(self, result: AutotuneResult) -> None:
        super().__init__("what was measured by then is in this exception's `result`")
        self.result = result


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C take effect when the block is done, and not inside of it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # nothing is raised in this thread
        return
    caught = list[int]()
    signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        signal.raise_signal(signal.SIGINT)
