"""What the ``autotune`` command does, and its progress display on stderr."""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import click
import psutil
import torch  # noqa: F401 - if missing, report that instead of the error that SciPy makes of it
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from cellfeed import ClassBalancedSampling, FormatError, PathError, open_collection
from cellfeed.console import interrupted
from cellfeed_tuner import _autotune
from cellfeed_tuner._commands._entry_point import OF_THIS_PROCESS
from cellfeed_tuner._constants import WRITING_SECONDS, WRITING_SHARE
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._plain import replaced_file
from cellfeed_tuner._ranks import World
from cellfeed_tuner._reports._page import html_report
from cellfeed_tuner._reports._terminal import code_to_paste, print_report
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult
from cellfeed_tuner._searching._time_budget import TimeBudget
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
    paths: tuple[str, ...],
    *,
    label: tuple[str, ...],
    given: str | None,
    where: str | None,
    balance: str | None,
    elements: tuple[str, ...],
    step_ms: float | None,
    cache: CacheState | None,
    storage_options: Path | None,
    direct_io: bool,
    output: Path,
    as_json: bool,
    budget: float,
    with_aligned: bool,
    ranks: int | None,
    **settings: Any,
) -> None:
    """Measure, report, and write files; see the command."""
    obs = dict.fromkeys(each for each in (*label, given, balance) if each)
    options = None if storage_options is None else _storage_options(storage_options)
    collection = open_collection(
        paths, obs=list(obs), elements=elements, storage_options=options, direct_io=direct_io
    )
    _require_writable(output)  # before spending time on measurements
    try:
        with LiveDisplay() as display:
            result = _autotune.tuned(
                collection,
                label=label,
                step_seconds=step_ms and step_ms / 1000,
                given=given,
                indices=where,
                strategy=ClassBalancedSampling(balance) if balance else None,
                align=(None, "chunks") if with_aligned else (),
                cache=cache,
                budget=_since_the_start(budget),
                ranks=ranks,
                on_progress=display.show,
                **settings,
            )
    except AutotuneInterrupted as interruption:
        result = interruption.result
    world = World.here() if ranks is None else None
    if world is not None and world.rank:  # rank 0 reports for all
        raise SystemExit(0 if result.recommended else 1)
    saved = output / "autotune.json"
    try:
        written = _write(result, output, elements)
    except OSError:  # the disk is full: what was found is printed at least
        _print(result, saved, elements, as_json=as_json)
        raise
    try:
        _print(result, saved, elements, as_json=as_json)
        click.echo(f"\nWrote {', '.join(map(str, written))}", err=as_json)
    except KeyboardInterrupt:
        interrupted(f"Interrupted while printing. {saved} has the result.")
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if result.interrupted:
        interrupted(f"Interrupted. {saved} has what was measured so far.")
    if result.recommended is None:
        raise SystemExit(1)


def _print(result: AutotuneResult, saved: Path, elements: Sequence[str], *, as_json: bool) -> None:
    print_report(result, saved, elements=elements, to_stderr=as_json)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1, allow_nan=False))
    sys.stdout.flush()


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        msg = f"{folder}: not writable ({error.strerror}); choose another folder with --output"
        raise PathError(msg) from error


def _since_the_start(seconds: float) -> TimeBudget:
    """Return the budget, which began with the command, less the time to write its files."""
    age = 0.0
    if click.get_current_context().find_root().obj == OF_THIS_PROCESS:
        age = max(0.0, time.time() - psutil.Process().create_time())
    writing_seconds = max(WRITING_SECONDS, WRITING_SHARE * age)
    return TimeBudget(seconds, started=time.monotonic() - age, writing_seconds=writing_seconds)


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


def _storage_options(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; errors must not quote its contents."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror}); give a JSON file of storage options"
        raise PathError(msg) from None
    except ValueError:  # neither UTF-8 nor JSON
        found = None
    if not isinstance(found, dict):
        msg = f'{path}: not a JSON object; write storage options such as {{"region": "eu-west-1"}}'
        raise FormatError(msg)
    return found


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
