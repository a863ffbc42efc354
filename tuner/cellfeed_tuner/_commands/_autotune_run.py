"""What the ``autotune`` command does, and its progress display on stderr."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch  # noqa: F401 - if missing, report that instead of the error that SciPy makes of it

from cellfeed import CellfeedError, Collection, SamplingStrategy
from cellfeed.console import interrupted
from cellfeed_tuner import _autotune
from cellfeed_tuner._profile import profiled
from cellfeed_tuner._ranks import World
from cellfeed_tuner._reports._progress import LiveDisplay
from cellfeed_tuner._reports._text import code_to_paste, print_report
from cellfeed_tuner._request import Request
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult, replaced_file
from cellfeed_tuner._time_budget import TimeBudget

# Seconds that the command reserves for the picture and the page, or this share of what its start
# took, whichever is more. Measured: what these take, also on a busy machine.
WRITING_SECONDS, WRITING_SHARE = 3.0, 0.7


def run(
    collection: Collection,
    *,
    output: Path,
    as_json: bool,
    budget: TimeBudget,
    ranks: Sequence[int] | None,
    **settings: Any,
) -> None:
    """Measure, report, and write files; ``settings`` are those of `tuned`."""
    budget.writing_seconds = max(WRITING_SECONDS, WRITING_SHARE * budget.spent)
    try:
        with LiveDisplay() as display:
            result = _autotune.tuned(
                collection,
                budget=budget,
                ranks=ranks,
                on_progress=partial(_progress, display, budget),
                **settings,
            )
    except AutotuneInterrupted as interruption:
        result = interruption.result
    world = World.here() if ranks is None else None
    if world is not None and world.rank:  # rank 0 reports for all
        raise SystemExit(0 if result.recommended else 1)
    saved = output / "autotune.json"
    replaced = _of_other_data(saved, result)
    try:
        written = _write(result, saved, "autotune_figure", is_late=not budget.affords_writing)
    except OSError:  # the disk is full: what was found is printed at least
        _print(result, saved, as_json=as_json)
        raise
    try:
        _print(result, saved, as_json=as_json)
        late = "" if len(written) > 1 else "; there was no time left for a picture and a page"
        click.echo(f"\nWrote {', '.join(map(str, written))}{replaced}{late}", err=as_json)
    except KeyboardInterrupt:
        interrupted(f"Interrupted while printing. {saved} has the result.")
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if result.interrupted:
        interrupted(f"Interrupted. {saved} has what was measured so far.")
    if result.recommended is None:
        raise SystemExit(1)


def run_profile(
    request: Request, *, output: Path, rounds: int, strategy: SamplingStrategy | None
) -> None:
    """Time the whole grid, report, and write files; see the command."""
    kept = output / "profile.jsonl"
    try:
        with LiveDisplay() as display:
            result = profiled(
                request, rounds=rounds, journal=kept, strategy=strategy, on_progress=display.show
            )
    except KeyboardInterrupt:
        interrupted(f"Interrupted. {kept} has what was timed; the same command goes on from there.")
    saved = output / "profile.json"
    result.table().to_csv(saved.with_suffix(".csv"), index=False)
    written = [saved.with_suffix(".csv"), *_write(result, saved, "throughput_figure")]
    _print(result, saved, as_json=False)
    click.echo(f"\nWrote {', '.join(map(str, written))}; {kept} has each timing")
    if result.recommended is None:
        raise SystemExit(1)


def _of_other_data(saved: Path, result: AutotuneResult) -> str:
    """Return that a result of other data is replaced, if there is one."""
    try:
        paths = AutotuneResult.load(saved).dataset.paths
    except (CellfeedError, OSError):
        return ""
    if paths == result.dataset.paths:
        return ""
    return f"; this replaced the result of {paths[0]} (--output chooses another folder)"


def _print(result: AutotuneResult, saved: Path, *, as_json: bool) -> None:
    print_report(result, saved, to_stderr=as_json)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1, allow_nan=False))
    sys.stdout.flush()


def _progress(
    display: LiveDisplay,
    budget: TimeBudget,
    stage: str,
    done: float,
    total: float,
    doing: str = "",
) -> None:
    """Show progress; import what draws while the measuring process starts, if there is time."""
    display.show(stage, done, total, doing)
    if stage == "start" and budget.left > 2 * budget.writing_seconds:
        import_module("cellfeed_tuner._reports._page")


def _write(
    result: AutotuneResult, saved: Path, figure: str, *, is_late: bool = False
) -> list[Path]:
    """Write the result as JSON, picture and page, and return the paths; JSON only if it is late."""
    result.save(saved)
    if is_late:
        return [saved]
    from cellfeed_tuner import plots  # noqa: PLC0415 - loads Matplotlib
    from cellfeed_tuner._reports._page import html_report  # noqa: PLC0415

    picture, page = saved.with_suffix(".png"), saved.with_suffix(".html")
    with replaced_file(picture) as file:
        getattr(plots, figure)(result).savefig(file, format="png")
    text = html_report(result, code=code_to_paste(result, saved))
    with replaced_file(page) as file:
        file.write(text.encode())
    return [saved, picture, page]
