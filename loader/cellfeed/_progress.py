"""Progress on one line of the terminal."""

import sys
import time
from collections.abc import Callable
from typing import Self

__all__ = ["ProgressLine"]

_QUIET_SECONDS = 2.0  # what takes no longer needs no explanation
_WIPE = "\r\x1b[K"  # to the begin of the line, and clear it


class ProgressLine:
    """A line on stderr that is written over, and wiped at the end.

    Nothing is written in the first two seconds, nor where stderr is no terminal.

    Parameters
    ----------
    clock
        Says what time it is, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._write("")

    def show(self, text: str) -> None:
        """Write ``text`` in place of what was there."""
        is_due = self._clock() - self._began >= _QUIET_SECONDS
        if is_due and text != self._shown and sys.stderr is not None and sys.stderr.isatty():
            self._write(text)

    def _write(self, text: str) -> None:
        self._shown = text
        sys.stderr.write(f"{_WIPE}{text}")
        sys.stderr.flush()
