"""Tables of docs/benchmarks/autotune.md: the search on recorded grids, and how long it takes."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from bench.backtest.baselines import BASELINES
from bench.backtest.machines import HEADINGS as MACHINE_HEADINGS
from bench.backtest.machines import machine_shares, rows_of
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import DEFAULT_SECONDS, Replay, replay
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cellfeed import ParameterError
from cellfeed.console import OneLineErrorCommand
from cellfeed_tuner._reports import report_console
from cellfeed_tuner._results import least_share

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
PAGE = ROOT / "docs" / "benchmarks" / "autotune.md"
PUBLISHED = ROOT / "notebooks" / "figures" / "data"
# Spread of measurements, relative to their mean: on a quiet machine, and on a busy one.
NOISES = (0.05, 0.15)
FLOORS, N_SEEDS = (0.95, 0.99), 70
CELLS = {"`make demo`": 28_000, "200,000 cells": 200_000}

HEADINGS = (
    *("grid", "floor", "feasible", "best", "cells/s", "noise", "autotune", "undecided"),
    *BASELINES,
)
_LEFT_ALIGNED = {"grid", "best", "machine"}
_NONE = "-"
_LEAST_WIDTH = 160
_EXPLAINED = """
floor: least entropy, as a share of random sampling's; feasible: configurations that reach it; best:
the fastest of these, block size x fetch factor, workers; noise: relative spread of measurements in
the replay; autotune: share of its searches that chose a configuration within 5 % of the best;
undecided: searches that reported being undecided with such a configuration; then other searches
with as much time: the six configurations with the largest fetches and blocks, without workers, in
turns; successive halving; random draws; and a search that knows the six fastest and their
throughputs, but not which is which"""


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Non-negative numbers, separated by commas."""

    name = "X,X,..."

    def __init__(self, most: float) -> None:
        self._most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(each) for each in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} are not numbers; write them as 0.9,0.95", param, ctx)
        if not all(0 <= each <= self._most for each in numbers):
            self.fail(f"numbers must be within 0 and {self._most:g}, not {value!r}", param, ctx)
        return numbers


@click.command("replay", cls=OneLineErrorCommand)
@click.argument("grids", nargs=-1, required=True, metavar="GRID.csv...",
                type=click.Path(dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--floors", default=(0.9, 0.95, 0.99), type=_Numbers(1),
              show_default="0.9,0.95,0.99",
              help="Least entropies, as shares of true random sampling's.")  # fmt: skip
@click.option("--seconds", default=DEFAULT_SECONDS, show_default=True,
              type=click.FloatRange(min=0, min_open=True),
              help="How long each search measures.")  # fmt: skip
@click.option("--seeds", default=100, show_default=True, type=click.IntRange(min=1),
              help="How many searches to run at each floor.")  # fmt: skip
@click.option("--spread", type=click.FloatRange(min=0),
              help="Relative spread of measurements; default: that of the recorded runs, or "
              "0.05 if there is only one run.")  # fmt: skip
@click.option("--plates", type=click.IntRange(min=2),
              help="Number of labels, all equally frequent.")  # fmt: skip
@click.option("--distribution", type=_Numbers(float("inf")),
              help="Frequencies or counts of the labels.")  # fmt: skip
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def replay_command(
    *,
    grids: tuple[Path, ...],
    floors: tuple[float, ...],
    seconds: float,
    seeds: int,
    spread: float | None,
    plates: int | None,
    distribution: tuple[float, ...] | None,
    batch_size: int,
    as_json: bool,
) -> None:
    """Replay the search on recorded grids, and compare its choices with the best.

    GRID.csv is what `record` wrote, or has the columns block_size, fetch_factor,
    num_workers (0 if absent), cells_per_second and, if known, entropy_bits. Without
    entropies, the exact expectation for --plates or --distribution is used, which
    assumes that each block holds one label.
    """
    if plates is not None and distribution is not None:
        msg = "--plates and --distribution exclude each other; give one of them"
        raise ParameterError(msg)
    labels = distribution if plates is None else (1.0,) * plates
    recorded = [read_grid(path, distribution=labels, batch_size=batch_size) for path in grids]
    replays = {
        path: replay(
            grid,
            floors=floors,
            seconds=seconds,
            n_seeds=seeds,
            spread=spread,
            baselines=tuple(BASELINES),
        )
        for path, grid in zip(grids, recorded, strict=True)
    }
    if as_json:
        click.echo(json.dumps(_json(replays), indent=1, allow_nan=False))
        return
    _print(replay_rows({path.stem: found for path, found in replays.items()}))


def _json(replays: Mapping[Path, list[Replay]]) -> dict[str, Any]:
    return {
        "schema": "cellfeed.replay/2",
        "grids": [
            {"grid": str(path), "floors": [each.to_json() for each in found]}
            for path, found in replays.items()
        ],
    }


def _print(rows: Sequence[Sequence[str]]) -> None:
    console = report_console()
    console.width = max(console.width, _LEAST_WIDTH)
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        left = heading in _LEFT_ALIGNED
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    click.echo(_EXPLAINED)


def replay_rows(replays: Mapping[str, Sequence[Replay]]) -> list[list[str]]:
    """Return a row for each grid and floor, in the order of the headings, and the overall rows.

    Parameters
    ----------
    replays
        What `replay` returned, by the name of the grid.
    """
    rows = [
        [name if number == 0 else "", *_row(found)]
        for name, of_grid in replays.items()
        for number, found in enumerate(of_grid)
    ]
    by_noise: dict[str, list[Replay]] = {}
    for found in (each for of_grid in replays.values() for each in of_grid if each.best):
        by_noise.setdefault(f"{found.spread:.0%}", []).append(found)
    return [*rows, *(_mean_row(noise, found) for noise, found in by_noise.items())]


def markdown_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """Return rows as a Markdown table."""
    aligned = ["---" if each in _LEFT_ALIGNED else "---:" for each in headings]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, aligned, *rows))


def _row(found: Replay) -> list[str]:
    feasible = f"{found.n_feasible} of {found.n_configurations}"
    start = [f"{found.floor:.2f}", feasible]
    if found.best is None:
        return [*start, "none", *[_NONE] * (len(HEADINGS) - len(start) - 2)]
    best = found.best
    return [
        *start,
        f"{best.block_size} x {best.fetch_factor}, {best.num_workers}",
        f"{found.best_cells_per_second:,.0f}",
        f"{found.spread:.0%}",
        f"{found.share_within():.0%}",
        f"{sum(found.undecided)} of {len(found.undecided)}",
        *(f"{found.share_within(name):.0%}" for name in BASELINES),
    ]


def _mean_row(noise: str, found: Sequence[Replay]) -> list[str]:
    """Return the mean shares over grids and floors."""
    shares = [np.mean([each.share_within(name) for each in found]) for name in (None, *BASELINES)]
    own, *others = (f"{share:.1%}" for share in shares)
    blank = [""] * (len(HEADINGS) - len(others) - 4)
    return ["all", *blank, noise, own, "", *others]


def put(command: str, table: str) -> None:
    """Put a table between ``<!-- command -->`` and ``<!-- end -->``."""
    place = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, n = place.subn(lambda match: f"{match[1]}{table}\n{match[2]}", PAGE.read_text())
    assert n == 1, f"the page has one place for the table of {command!r}"
    PAGE.write_text(text)


@click.command("table")
@click.option("--seeds", default=N_SEEDS, show_default=True, type=click.IntRange(min=1))
def table_command(*, seeds: int) -> None:
    """Replay the search on all recorded grids and on simulated machines, for the documentation."""
    paths = [
        *sorted((ROOT / "bench" / "grids").glob("*.csv")),
        *sorted(PUBLISHED.glob("published_tahoe_*.csv")),
    ]
    found = {}
    for path in paths:
        click.echo(f"{path.stem} ...")
        grid = read_grid(path)
        # A floor with as many feasible configurations as the one before is the same search.
        floors = {len(grid.feasible(floor)): floor for floor in reversed(FLOORS)}
        found[path.stem] = [
            each
            for noise in NOISES
            for each in replay(
                grid,
                floors=sorted(floors.values()),
                n_seeds=seeds,
                spread=noise,
                baselines=tuple(BASELINES),
            )
        ]
    *by_grid, quiet, busy = replay_rows(found)
    click.echo(table := markdown_table(by_grid))
    put("make replay: grids", table)
    shown = [HEADINGS.index(each) for each in ("noise", "autotune", *BASELINES)]
    rows = [[row[column] for column in shown] for row in (quiet, busy)]
    click.echo(table := markdown_table(rows, [HEADINGS[column] for column in shown]))
    put("make replay", table)
    lines = list(rows_of(dict(machine_shares()), {}))
    click.echo(table := markdown_table(lines, MACHINE_HEADINGS))
    put("make replay: machines", table)


@click.command("times")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def times_command(*, folder: Path) -> None:
    """Time autotune and the whole grid, in FOLDER, and put the table into the documentation.

    Both run as commands, on the collection of `make demo` and on 200,000 cells.
    """
    folder = folder.resolve()
    rows = [_times_row(name, n_cells, folder) for name, n_cells in CELLS.items()]
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    click.echo(table)
    put("make autotune-times", table)


def _times_row(name: str, n_cells: int, folder: Path) -> dict[str, str]:
    plates, grid = folder / f"plates-{n_cells}", folder / f"grid-{n_cells}.csv"
    out = folder / f"autotune-{n_cells}"
    _seconds_of(BIN / "cellfeed", "synthesize", plates, "--cells", n_cells)
    seconds = _seconds_of(BIN / "autotune", plates, "--label", "plate", "--output", out)
    grid.unlink(missing_ok=True)
    grid.with_suffix(".json").unlink(missing_ok=True)
    record = (sys.executable, "-m", "bench.backtest", "record")
    whole = _seconds_of(*record, plates, "--label", "plate", "--runs", 1, "--output", grid)
    result = json.loads((out / "autotune.json").read_text())
    chosen = result["recommended"]
    return {
        "collection": name,
        "`autotune`": f"{seconds:.0f} s",
        "chosen: block x fetch, workers": _settings(chosen["configuration"]),
        "cells/s [95 %]": "{value:,.0f} [{low:,.0f}, {high:,.0f}]".format(
            **chosen["cells_per_second"]
        ),
        "the whole grid": f"{whole:,.0f} s",
        "its best, once measured": _best(grid, result["constraints"]["entropy_floor"]),
    }


def _best(grid: Path, floor: float) -> str:
    """Return the fastest recorded configuration among those that mix well enough."""
    random = json.loads(grid.with_suffix(".json").read_text())["random_entropy_bits"]
    measured = pd.read_csv(grid)
    mixed = measured[measured["entropy_bits"] >= least_share(floor) * random]
    best = mixed.loc[mixed["cells_per_second"].idxmax()]
    return f"{_settings(best)}: {best['cells_per_second']:,.0f}"


def _settings(row: dict[str, int] | pd.Series) -> str:
    block, fetch, workers = (
        int(row[name]) for name in ("block_size", "fetch_factor", "num_workers")
    )
    return f"{block} x {fetch}, {workers}"


def _seconds_of(*command: object) -> float:
    """Run a command, and return the seconds it took."""
    start = time.perf_counter()
    subprocess.run([*map(str, command)], check=True, cwd=ROOT)
    return time.perf_counter() - start
