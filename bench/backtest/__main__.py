"""Record whole grids, and replay the search of autotune: ``python -m bench.backtest COMMAND``.

Writes the tables of docs/benchmarks/autotune.md.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench.backtest.machines import HEADINGS as MACHINE_HEADINGS
from bench.backtest.machines import machine_rows, machines_command
from bench.backtest.record import record_command
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import BASELINES, DEFAULT_SECONDS, Replay, markdown_table, replay

from cellfeed.console import OneLineErrorCommand

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
PAGE = ROOT / "docs" / "benchmarks" / "autotune.md"
PUBLISHED = ROOT / "notebooks" / "figures" / "data"
# Spread of measurements, relative to their mean: on a quiet machine, and on a busy one.
NOISES = (0.05, 0.15)
FLOORS, N_SEEDS = (0.95, 0.99), 70
SPEED = "{value:,.0f} [{low:,.0f}, {high:,.0f}]"
CELLS = {"`make demo`": 28_000, "200,000 cells": 200_000}

HEADINGS = (
    *("grid", "floor", "feasible", "best", "cells/s", "noise", "autotune", "undecided"),
    *BASELINES,
)


@click.group()
def main() -> None:
    """Record whole grids, and replay the search of autotune on them."""


@main.command("replay", cls=OneLineErrorCommand)
@click.argument("grids", nargs=-1, required=True, metavar="GRID.csv...",
                type=click.Path(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--floor", "floors", default=(0.9, 0.95, 0.99), type=click.FloatRange(0, 1),
              multiple=True, show_default="0.9, 0.95 and 0.99",
              help="Least entropy, as a share of true random sampling's.")  # fmt: skip
@click.option("--seconds", default=DEFAULT_SECONDS, show_default=True,
              type=click.FloatRange(min=0, min_open=True),
              help="How long each search measures.")  # fmt: skip
@click.option("--seeds", "n_seeds", default=100, show_default=True, type=click.IntRange(min=1),
              help="How many searches to run at each floor.")  # fmt: skip
def replay_command(*, grids: tuple[Path, ...], **settings: Any) -> None:
    """Replay the search on recorded grids, and compare its choices with the best.

    GRID.csv is what `record` wrote, or has the columns block_size, fetch_factor, num_workers (0 if
    absent), cells_per_second and entropy_bits. Columns are those of docs/benchmarks/autotune.md.
    """
    found = {path.stem: replay(read_grid(path), baselines=[*BASELINES], **settings)
             for path in grids}  # fmt: skip
    click.echo(markdown_table(replay_rows(found), HEADINGS))


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


def _row(found: Replay) -> list[str]:
    start = [f"{found.floor:.2f}", f"{found.n_feasible} of {found.n_configurations}"]
    if found.best is None:
        return [*start, "none", *["-"] * (len(HEADINGS) - 4)]
    return [
        *start,
        _settings(found.best),
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
    click.echo(table)
    place = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, n = place.subn(lambda match: f"{match[1]}{table}\n{match[2]}", PAGE.read_text())
    assert n == 1, f"the page has one place for the table of {command!r}"
    PAGE.write_text(text)


@main.command("table")
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
                grid, floors=sorted(floors.values()), n_seeds=seeds, spread=noise,
                baselines=[*BASELINES],
            )
        ]  # fmt: skip
    *by_grid, quiet, busy = replay_rows(found)
    put("make replay: grids", markdown_table(by_grid, HEADINGS))
    shown = [HEADINGS.index(each) for each in ("noise", "autotune", *BASELINES)]
    rows = [[row[column] for column in shown] for row in (quiet, busy)]
    put("make replay", markdown_table(rows, [HEADINGS[column] for column in shown]))
    put("make replay: machines", markdown_table(machine_rows(), MACHINE_HEADINGS))


@main.command("times")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def times_command(*, folder: Path) -> None:
    """Time autotune and the whole grid, in FOLDER, and put the table into the documentation.

    Both run as commands, on the collection of `make demo` and on 200,000 cells.
    """
    rows = [_times_row(name, n_cells, folder.resolve()) for name, n_cells in CELLS.items()]
    put("make autotune-times", markdown_table([each.values() for each in rows], [*rows[0]]))


def _times_row(name: str, n_cells: int, folder: Path) -> dict[str, str]:
    plates, grid = folder / f"plates-{n_cells}", folder / f"grid-{n_cells}.csv"
    out = folder / f"autotune-{n_cells}"
    _seconds_of(BIN / "cellfeed", "synthesize", plates, "--cells", n_cells)
    seconds = _seconds_of(BIN / "autotune", plates, "--label", "plate", "--output", out)
    grid.unlink(missing_ok=True)
    grid.with_suffix(".json").unlink(missing_ok=True)
    record = (sys.executable, "-m", "bench.backtest", "record")
    whole = _seconds_of(*record, plates, "--label", "plate", "--runs", 1, "--out", grid)
    result = json.loads((out / "autotune.json").read_text())
    chosen = result["recommended"]
    return {
        "collection": name,
        "`autotune`": f"{seconds:.0f} s",
        "chosen: block x fetch, workers": _settings(chosen["configuration"]),
        "cells/s [95 %]": SPEED.format(**chosen["cells_per_second"]),
        "the whole grid": f"{whole:,.0f} s",
        "its best, once measured": _best(grid, result["constraints"]["entropy_floor"]),
    }


def _best(path: Path, floor: float) -> str:
    """Return the fastest recorded configuration among those that mix well enough."""
    speeds = (grid := read_grid(path)).cells_per_second()
    best = max(grid.feasible(floor), key=speeds.__getitem__)
    return f"{_settings(best)}: {speeds[best]:,.0f}"


def _settings(configuration: Mapping[str, Any]) -> str:
    return "{block_size} x {fetch_factor}, {num_workers}".format(**configuration)


def _seconds_of(*command: object) -> float:
    """Run a command, and return the seconds it took."""
    start = time.perf_counter()
    subprocess.run([*map(str, command)], check=True, cwd=ROOT)
    return time.perf_counter() - start


for each in (record_command, machines_command):
    main.add_command(each)

if __name__ == "__main__":
    main(prog_name="python -m bench.backtest")
