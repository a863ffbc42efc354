"""What a caller sees and does meanwhile: how far the work has come, and Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Progress", "interrupts_held_back", "silent"]


class Progress(Protocol):
    """Who is told how far the work has come."""

    def __call__(self, stage: str, done: float, total: float) -> object:
        """Be told that ``done`` of ``total`` of a stage is done."""


def silent(stage: str, done: float, total: float) -> None:
    """Tell nobody."""
    del stage, done, total


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
