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
    """List the results of earlier runs; see `show_command`."""
    folder = cache_folder()
    all_runs = read_runs(folder)
    runs = [(each, _before(each, all_runs)) for each in _latest(all_runs)]
    if as_json:
        found = {
            "schema": "cellfeed.known/1",
            "folder": str(folder),
            "runs": [_json(run, before) for run, before in runs],
        }
        click.echo(json.dumps(found, indent=1, allow_nan=False))
    elif runs:
        _print(runs)
        click.echo(f"\nStored in {folder}; delete files there to forget them.")
    else:
        click.echo(f"No earlier runs; results of autotune are stored in {folder}.")


def _latest(runs: Sequence[EarlierRun]) -> list[EarlierRun]:
    """Return the last run of each kind, newest first."""
    by_kind = dict[tuple[object, ...], EarlierRun]()
    for run in runs:
        asked = run.asked
        kind = (
            run.key.name,
            tuple(asked.labels),
            asked.batch_size,
            asked.cache,
            asked.dense,
            asked.ranks,
        )
        by_kind[kind] = run
    return sorted(by_kind.values(), key=lambda run: run.began, reverse=True)


def _before(run: EarlierRun, runs: Sequence[EarlierRun]) -> EarlierRun | None:
    """Return the last run before one that measured the same on the same machine; None if none.

    Versions may differ.
    """
    same = [
        each
        for each in runs
        if each.began < run.began
        and (each.key.data, each.key.machine) == (run.key.data, run.key.machine)
        and each.asked.is_like(run.asked)
        and None not in (each.cells_per_second, run.cells_per_second)
    ]
    return same[-1] if same else None


def _ratio(run: EarlierRun, before: EarlierRun) -> Estimate:
    """Return the recommended throughput, by the one before; both have one."""
    speeds = [each.cells_per_second for each in (run, before) if each.cells_per_second is not None]
    return quotient(*speeds)


def _compared(run: EarlierRun, before: EarlierRun | None) -> str:
    """Return how fast it is compared with the run before, in words; empty without one."""
    if before is None:
        return ""
    ratio = _ratio(run, before)
    alike = "equally fast" if are_equally_fast(ratio) else "undecided"
    found = "slower" if ratio.high < 1 else "faster" if ratio.low > 1 else alike
    differs = [
        *(["another configuration"] if run.choice != before.choice else []),
        *(["other versions"] if run.key.versions != before.key.versions else []),
    ]
    said = f"{found}: {times(ratio)} that of {before.date}"
    return f"{said} ({', '.join(differs)})" if differs else said


def _print(runs: Sequence[tuple[EarlierRun, EarlierRun | None]]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("date", no_wrap=True)
    for heading in ("dataset", "machine", "configuration"):
        table.add_column(heading, overflow="fold")
    table.add_column("cells/s [95 % interval]", justify="right", no_wrap=True)
    compared = [_compared(run, before) for run, before in runs]
    if any(compared):
        table.add_column("than before", overflow="fold")
    for (run, _), said in zip(runs, compared, strict=True):
        cells = run.date, *_cells(run), *([said] if any(compared) else [])
        style = "bold yellow" if said.startswith("slower") else ""
        table.add_row(*map(Text, cells), style=style)
    report_console().print(table)


def _cells(run: EarlierRun) -> tuple[str, str, str, str]:
    asked, data, machine = run.asked, run.key.data.facts, run.key.machine.facts
    disks = ", ".join(each["file_system"] or "unknown" for each in machine["storage"])
    ranks = f", {asked.ranks}" if asked.ranks.n_total > 1 else ""
    dense = "dense " * asked.dense
    files = "1 file" if data["n_files"] == 1 else f"{data['n_files']} files"
    dataset = (
        f"{run.path}, {files}: {data['n_cells']:,} cells x {data['n_vars']:,} genes, "
        f"{format_bytes(data['bytes_on_disk'])}; "
        f"{', '.join(asked.labels)}, {dense}minibatches of {asked.batch_size}, {asked.cache}{ranks}"
    )
    computer = (
        f"{machine['cpu'] or 'unknown'}, {machine['usable_cores']:g} cores, "
        f"{machine['memory_gb']} GB, {disks or 'a server'}; "
        f"cellfeed {run.key.versions.facts['cellfeed']}"
    )
    if run.choice is None or run.cells_per_second is None:
        return dataset, computer, "none feasible", ""
    return dataset, computer, str(run.choice), interval(run.cells_per_second)


def _json(run: EarlierRun, before: EarlierRun | None) -> dict[str, Any]:
    known = {"machine": run.key.machine, "data": run.key.data, "versions": run.key.versions}
    fingerprints = {name: {"digest": each.digest, **each.facts} for name, each in known.items()}
    compared = before and {
        "began": before.began,
        "choice": before.choice and dict(before.choice),
        "versions": before.key.versions.digest,
        "ratio": asdict(_ratio(run, before)),
    }
    return fingerprints | run.to_json() | {"n_measured": len(run.trials), "before": compared}
