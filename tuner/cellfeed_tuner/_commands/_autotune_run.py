"""What the ``autotune`` command does, and its progress display on stderr."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import click
import psutil
import torch  # noqa: F401 - if missing, report that instead of the error that SciPy makes of it
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from cellfeed import ClassBalancedSampling, Collection
from cellfeed.console import interrupted
from cellfeed_tuner import _autotune
from cellfeed_tuner._constants import LEAST_SHARE_LEFT, MOST_START_SECONDS, WRITING_SECONDS
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._plain import replaced_file
from cellfeed_tuner._ranks import World
from cellfeed_tuner._reports._page import html_report
from cellfeed_tuner._reports._terminal import code_to_paste, print_report
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult
from cellfeed_tuner.plots import autotune_figure

__all__ = ["LiveDisplay", "run"]

_STAGES = {
    "machine": "Inspecting the machine",
    "entropy": "Computing label entropy",
    "start": "Starting the measuring process",
    "throughput": "Measuring throughput",
    "explain": "Finding the bottleneck",
}
# Drawing takes about 20 ms.
_LEAST_SECONDS_APART = 1.0


def run(
    collection: Collection,
    *,
    label: tuple[str, ...],
    given: str | None,
    where: str | None,
    balance: str | None,
    elements: tuple[str, ...],
    step_ms: float | None,
    cache: CacheState | None,
    output: Path,
    as_json: bool,
    budget: float,
    with_aligned: bool,
    ranks: int | None,
    **settings: Any,
) -> None:
    """Measure, report, and write files; see the command, which has checked what is given."""
    try:
        with LiveDisplay() as display:
            result = _autotune.autotune(
                collection,
                label=label,
                step_seconds=step_ms and step_ms / 1000,
                given=given,
                indices=where,
                strategy=ClassBalancedSampling(balance) if balance else None,
                align=(None, "chunks") if with_aligned else (),
                cache=cache,
                budget=_left_of(budget),
                ranks=ranks,
                on_progress=display.show,
                **settings,
            )
    except AutotuneInterrupted as interruption:
        result = interruption.result
    world = World.here() if ranks is None else None
    if world is not None and world.rank:  # rank 0 reports for all
        raise SystemExit(0 if result.recommended else 1)
    print_report(result, output / "autotune.json", elements=elements, to_stderr=as_json)
    if as_json:  # before the files, in case the disk is full
        click.echo(json.dumps(result.to_json(), indent=1, allow_nan=False))
    written = ", ".join(map(str, _write(result, output, elements)))
    click.echo(f"\nWrote {written}", err=as_json)
    if result.interrupted:
        interrupted(f"Interrupted. {output / 'autotune.json'} has what was measured so far.")
    if result.recommended is None:
        raise SystemExit(1)


def _left_of(budget: float) -> float:
    """Return what is left of a budget, less the time to start this program and write its files."""
    age = time.time() - psutil.Process().create_time()
    spent = (age if age < MOST_START_SECONDS else 0.0) + WRITING_SECONDS
    return max(budget - spent, LEAST_SHARE_LEFT * budget)


def _write(result: AutotuneResult, output: Path, elements: Sequence[str]) -> list[Path]:
    """Write the result as JSON, picture and page, and return the paths."""
    as_json, picture, page = (output / f"autotune.{kind}" for kind in ("json", "png", "html"))
    result.save(as_json)
    with replaced_file(picture) as file:
        autotune_figure(result).savefig(file, format="png")
    text = html_report(result, code=code_to_paste(result, as_json, elements=elements))
    with replaced_file(page) as file:
        file.write(text.encode())
    return [as_json, picture, page]


class LiveDisplay:
    """A progress bar; without a terminal, one line per stage.

    It has no thread and draws only when progress is reported, which never happens during a timed
    measurement, and at most once a second.
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
        """Show the progress of a stage."""
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
