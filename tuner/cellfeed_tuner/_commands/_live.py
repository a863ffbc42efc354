"""What is shown on stderr while ``autotune`` works."""

import math
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["LiveDisplay"]

_STAGES = {
    "machine": "Looking at the machine",
    "entropy": "Computing label entropy",
    "start": "Starting the measuring process",
    "throughput": "Measuring throughput",
    "explain": "Finding the bottleneck",
}
# Drawing takes about 20 ms of the budget.
_LEAST_SECONDS_APART = 1.0


class LiveDisplay:
    """A progress bar; one line for each stage outside of a terminal.

    It has no thread, and draws only when it is told of progress, which happens while nothing is
    being timed; then at most once a second, so that it takes little time from measuring either.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(30),
            TextColumn("{task.fields[spent]}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task("", spent="")
        self._stage = ""
        self._drawn = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, stage: str, done: float, total: float) -> None:
        """Show how far a stage has come."""
        is_new, said, now = stage != self._stage, _STAGES.get(stage, stage), self._clock()
        self._stage = stage
        if not self._console.is_terminal:
            if is_new:
                self._console.print(f"{said} ...")
        elif is_new or now >= self._drawn + _LEAST_SECONDS_APART:
            self._drawn = now
            spent = f"{done:.0f} of {total:.0f} s" if stage == "throughput" else ""
            self._bar.update(
                self._task, description=said, completed=done, total=total, spent=spent, refresh=True
            )
