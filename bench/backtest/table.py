"""The search on all recorded grids, as a table of docs/benchmarks/autotune.md."""

from pathlib import Path

import click
from bench.backtest.baselines import BASELINES
from bench.backtest.page import put
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import replay
from bench.backtest.replay_table import markdown_table, replay_rows

from cellfeed_tuner._defaults import DEFAULT_REPLAY_SECONDS

ROOT = Path(__file__).parents[2]
# How much replicates differ on a busy machine, as against what was recorded.
BUSY_SPREAD = 0.15
FLOORS, N_SEEDS = (0.95, 0.99), 10
# A slower disk, on which each configuration was measured for two minutes.
SECONDS_OF_PUBLISHED = 1800.0
PUBLISHED = ROOT / "notebooks" / "figures" / "data"


@click.command("table")
def table_command() -> None:
    """Play the search on all recorded grids, and put the table into the documentation."""
    paths = [
        *sorted((ROOT / "bench" / "grids").glob("*.csv")),
        *sorted(PUBLISHED.glob("published_tahoe_*.csv")),
    ]
    found = {}
    for path in paths:
        click.echo(f"{path.stem} ...")
        found[path.stem] = [
            each
            for spread in (None, BUSY_SPREAD)
            for each in replay(
                read_grid(path),
                floors=FLOORS,
                seconds=SECONDS_OF_PUBLISHED
                if path.parent == PUBLISHED
                else DEFAULT_REPLAY_SECONDS,
                n_seeds=N_SEEDS,
                spread=spread,
                baselines=tuple(BASELINES),
            )
        ]
    table = markdown_table(replay_rows(found))
    click.echo(table)
    put("make replay", table)
