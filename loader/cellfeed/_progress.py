"""A progress line in the terminal."""

import sys
import time
from collections.abc import Callable
from typing import Self

_QUIET_SECONDS = 2.0  # what takes no longer needs no explanation
_REDRAW_SECONDS = 0.1
_MINUTE, _HOUR = 60, 3600
_WIPE = "\r\x1b[K"  # to the start of the line, and clear it


class ProgressLine:
    """A line on stderr that is overwritten by updates, and erased at the end.

    Nothing is written in the first two seconds, or if stderr is not a terminal.

    Parameters
    ----------
    clock
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._drawn = clock()
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._write("")

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""
        is_due = self._clock() - self._began >= _QUIET_SECONDS
        if is_due and text != self._shown and sys.stderr is not None and sys.stderr.isatty():
            self._write(text)

    def show_share(self, what: str, done: float, total: float) -> None:
        """Write how much is done, and the remaining time at the speed so far."""
        now = self._clock()
        if now - self._drawn < _REDRAW_SECONDS and done < total:
            return
        self._drawn, share = now, done / total if total else 1.0
        left = (now - self._began) * (1 / share - 1) if share else None
        rest = "" if left is None else f", {_duration(left)} left"
        self.show(f"{what}: {done:,.0f} of {total:,.0f} ({share:.0%}{rest})")

    def _write(self, text: str) -> None:
        self._shown = text
        sys.stderr.write(f"{_WIPE}{text}")
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h"
