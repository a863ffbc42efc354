"""What is shown on stderr while ``autotune`` works."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cellfeed_tuner._interval import interval
from cellfeed_tuner._progress import RaceState, Standing, Standings

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
_BAR_WIDTH = 30
# Lines around the rows of the table, and the fewest rows that are worth showing.
_OTHER_LINES, _LEAST_ROWS = 6, 3
_STYLES: dict[RaceState, str] = {"racing": "", "left": "dim", "below floor": "dim"}


class LiveDisplay:
    """A progress bar and, while it races, a table; one line for each stage outside of a terminal.

    It has no thread, and draws only when it is told of progress, which happens while nothing is
    being timed; then at most once a second, so that it takes little time from measuring either.

    Parameters
    ----------
    console
        Where it is shown; stderr if None.
    clock
        A clock, in seconds.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._stage = ""
        self._drawn = -math.inf
        self._standings: Standings | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, stage: str, done: float, total: float) -> None:
        """Show how far a stage has come."""
        is_new = stage != self._stage
        self._stage = stage
        if not self._console.is_terminal:
            if is_new:
                self._console.print(f"{_STAGES.get(stage, stage)} ...")
            return
        now = self._clock()
        if is_new or now >= self._drawn + _LEAST_SECONDS_APART:
            self._drawn = now
            self._live.update(self._drawing(done, total), refresh=True)

    def watch(self, standings: Standings) -> None:
        """Show from now on how the race stands, too."""
        self._standings = standings

    def _drawing(self, done: float, total: float) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        spent = f"{done:.0f} of {total:.0f} s" if self._stage == "throughput" else ""
        line.add_row(
            _STAGES.get(self._stage, self._stage),
            ProgressBar(total, done, width=_BAR_WIDTH),
            Text(spent),
        )
        standings = self._standings() if self._standings is not None else ()
        if not standings:
            return line
        return Group(line, "", _race(standings, self._console.height - _OTHER_LINES))


def _race(standings: Sequence[Standing], n_rows: int) -> RenderableType:
    """Return a table with what may still be the best at its top, and the fastest first."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("block", "fetch", "workers", "cells/s [95 % interval]", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    ranked = sorted(
        standings, key=lambda each: (each.state != "racing", -each.rough_cells_per_second)
    )
    shown = ranked[: max(_LEAST_ROWS, n_rows)]
    for each in shown:
        table.add_row(*_row(each), style=_STYLES[each.state])
    n_racing = sum(each.state == "racing" for each in standings)
    said = f"{n_racing} of {len(standings)} measured configurations may be the best"
    if len(shown) < len(standings):
        said += f"; {len(standings) - len(shown)} more are not shown"
    return Group(table, Text(said, style="dim"))


def _row(each: Standing) -> list[str]:
    settings, speed = each.configuration, each.cells_per_second
    shown = "no round yet"
    if speed is not None:
        shown = interval(speed)
    elif each.rough_cells_per_second:
        shown = f"about {each.rough_cells_per_second:,.0f}"
    return [
        str(settings.block_size),
        str(settings.fetch_factor),
        ", ".join(filter(None, [str(settings.num_workers), settings.others_in_words])),
        shown,
        str(each.n_rounds),
        each.state,
    ]
