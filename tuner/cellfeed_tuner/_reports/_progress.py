"""What is being done, on stderr."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

_STAGES = {
    "machine": "Inspecting the machine",
    "entropy": "Computing label entropy",
    "start": "Preparing to measure",
    "compile": "Reading one fetch, before anything is timed",
    "throughput": "Measuring throughput",
    "profile": "Timing the grid",
    "explain": "Finding the bottleneck",
}
# How often the line in a terminal changes, and how often there is another without one. Chosen:
# nobody should wonder whether it hangs.
_SECONDS_OF_TERMINAL, _SECONDS_OF_LINE = 1.0, 15.0
_WIPE = "\r\x1b[K"  # to the start of the line, and clear it
# Longer times are given in minutes.
_MINUTES_FROM = 120.0


def _spent(stage: str, done: float, total: float) -> str:
    """Return how far a stage is that takes long."""
    if stage == "profile":
        left = total - done
        return f"{left:.0f} s left" if left < _MINUTES_FROM else f"{left / 60:.0f} min left"
    return f"{done:.0f} of {total:.0f} s" if stage == "throughput" else ""


class LiveDisplay:
    """What is being done, on stderr: in a terminal, a line that is overwritten once a second.

    Without a terminal, a line for each stage, and one every 15 s. It has no thread, and writes only
    when progress is reported, which never happens during a timed measurement.
    """

    def __init__(
        self, file: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._clock = file or sys.stderr, clock
        self._is_terminal = self._file.isatty()
        self._stage, self._drawn = "", 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._stage:
            self._file.write(_WIPE)

    def show(self, stage: str, done: float, total: float, doing: str = "") -> None:
        """Show the progress of a stage, and what is being done."""
        is_new, now = stage != self._stage, self._clock()
        seconds_apart = _SECONDS_OF_TERMINAL if self._is_terminal else _SECONDS_OF_LINE
        if not is_new and now < self._drawn + seconds_apart:
            return
        self._stage, self._drawn = stage, now
        said, spent = _STAGES.get(stage, stage), _spent(stage, done, total)
        if self._is_terminal:
            text = ": ".join(filter(None, [said, spent, doing]))
            self._file.write(_WIPE + text[: shutil.get_terminal_size().columns - 1])
        elif is_new:
            self._file.write(f"{said} ...\n")
        elif doing:
            self._file.write(f"  {spent}: {doing}\n")
        self._file.flush()
