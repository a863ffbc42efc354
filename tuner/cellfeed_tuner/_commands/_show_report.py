"""What ``autotune show`` prints."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cellfeed.console import format_bytes
from cellfeed_tuner._history import EarlierRun, cache_folder, read_runs
from cellfeed_tuner._interval import Estimate, are_equally_fast, interval, quotient, times
from cellfeed_tuner._reports import report_console


def show(*, as_json: bool) -> None:
    """List the last run of each kind, newest first; see `show_command`."""
    folder = cache_folder()
    all_runs = read_runs(folder)
    last_of_kind = {(run.key.name, str(run.settings)): run for run in all_runs}
    runs = sorted(last_of_kind.values(), key=lambda run: run.began, reverse=True)
    compared = [_before(run, all_runs) for run in runs]
    if as_json:
        found = {
            "schema": "cellfeed.known/1",
            "folder": str(folder),
            "runs": [_json(*each) for each in zip(runs, compared, strict=True)],
        }
        click.echo(json.dumps(found, indent=1, allow_nan=False))
        return
    if not runs:
        click.echo(f"No earlier runs; results of autotune are stored in {folder}.")
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("date", no_wrap=True)
    for heading in ("dataset", "machine", "configuration"):
        table.add_column(heading, overflow="fold")
    table.add_column("cells/s [95 % interval]", justify="right", no_wrap=True)
    if any(compared):
        table.add_column("than before", overflow="fold")
    for run, before in zip(runs, compared, strict=True):
        said = _than_before(run, before) if before else ""
        cells = run.date, *_cells(run), *([said] if any(compared) else [])
        style = "bold yellow" if said.startswith("slower") else ""
        table.add_row(*map(Text, cells), style=style)
    report_console().print(table)
    click.echo(f"\nStored in {folder}; delete files there to forget them.")


def _before(run: EarlierRun, runs: Sequence[EarlierRun]) -> tuple[EarlierRun, Estimate] | None:
    """Return the last run before one that measured the same on the same machine, and the ratio.

    Versions may differ.
    """
    for each in reversed(runs):
        is_same = (each.key.data, each.key.machine) == (run.key.data, run.key.machine)
        if each.began < run.began and is_same and each.settings.is_like(run.settings):
            speed, before = run.cells_per_second, each.cells_per_second
            if speed is not None and before is not None:
                return each, quotient(speed, before)
    return None


def _than_before(run: EarlierRun, compared: tuple[EarlierRun, Estimate]) -> str:
    """Return how fast it is compared with the run before, in words."""
    before, ratio = compared
    alike = "equally fast" if are_equally_fast(ratio) else "undecided"
    found = "slower" if ratio.high < 1 else "faster" if ratio.low > 1 else alike
    differs = [
        *(["another configuration"] if run.choice != before.choice else []),
        *(["other versions"] if run.key.versions != before.key.versions else []),
    ]
    said = f"{found}: {times(ratio)} that of {before.date}"
    return f"{said} ({', '.join(differs)})" if differs else said


def _cells(run: EarlierRun) -> tuple[str, str, str, str]:
    settings, data, machine = run.settings, run.key.data.facts, run.key.machine.facts
    disks = ", ".join(each["file_system"] or "unknown" for each in machine["storage"])
    ranks = f", {settings.ranks}" if settings.ranks.n_total > 1 else ""
    files = "1 file" if data["n_files"] == 1 else f"{data['n_files']} files"
    dataset = (
        f"{run.path}, {files}: {data['n_cells']:,} cells x {data['n_vars']:,} genes, "
        f"{format_bytes(data['bytes_on_disk'])}; {', '.join(settings.labels)}, "
        f"{'dense ' * settings.dense}minibatches of {settings.batch_size}, {settings.cache}{ranks}"
    )
    computer = (
        f"{machine['cpu'] or 'unknown'}, {machine['usable_cores']:g} cores, "
        f"{machine['memory_gb']} GB, {disks or 'a server'}; "
        f"cellfeed {run.key.versions.facts['cellfeed']}"
    )
    if run.choice is None or run.cells_per_second is None:
        return dataset, computer, "none feasible", ""
    return dataset, computer, str(run.choice), interval(run.cells_per_second)


def _json(run: EarlierRun, compared: tuple[EarlierRun, Estimate] | None) -> dict[str, Any]:
    known = {"machine": run.key.machine, "data": run.key.data, "versions": run.key.versions}
    fingerprints = {name: {"digest": each.digest, **each.facts} for name, each in known.items()}
    before = compared and {
        "began": compared[0].began,
        "choice": compared[0].choice and dict(compared[0].choice),
        "versions": compared[0].key.versions.digest,
        "ratio": asdict(compared[1]),
    }
    return fingerprints | run.to_json() | {"n_measured": len(run.trials), "before": before}
