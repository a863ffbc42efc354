"""How long a default `autotune` takes, compared with measuring the whole grid.

Both run as commands, on the collection of `make demo` and on 200,000 cells. The table goes into
docs/benchmarks/autotune.md.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import click
import pandas as pd
from bench.backtest.page import put

from cellfeed_tuner._results import least_share

CELLS = {"`make demo`": 28_000, "200,000 cells": 200_000}
ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent


@click.command("times")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def times_command(*, folder: Path) -> None:
    """Time autotune and the whole grid, in FOLDER, and put the table into the documentation."""
    folder = folder.resolve()
    rows = [_row(name, n_cells, folder) for name, n_cells in CELLS.items()]
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    click.echo(table)
    put("make autotune-times", table)


def _row(name: str, n_cells: int, folder: Path) -> dict[str, str]:
    plates, grid = folder / f"plates-{n_cells}", folder / f"grid-{n_cells}.csv"
    out = folder / f"autotune-{n_cells}"
    _run(BIN / "cellfeed", "synthesize", plates, "--cells", n_cells)
    seconds = _run(BIN / "autotune", plates, "--label", "plate", "--fresh", "--output", out)
    grid.unlink(missing_ok=True)
    grid.with_suffix(".json").unlink(missing_ok=True)
    record = (sys.executable, "-m", "bench.backtest", "record")
    whole = _run(*record, plates, "--label", "plate", "--runs", 1, "--output", grid)
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


def _run(*command: object) -> float:
    """Run a command, and return the seconds it took."""
    start = time.perf_counter()
    subprocess.run([*map(str, command)], check=True, cwd=ROOT)
    return time.perf_counter() - start
