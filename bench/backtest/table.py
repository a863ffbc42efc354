"""The search on all recorded grids, as a table in docs/benchmarks/autotune.md."""

from pathlib import Path

import click
from bench.backtest.baselines import BASELINES
from bench.backtest.page import put
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import replay
from bench.backtest.replay_table import HEADINGS, markdown_table, replay_rows

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "notebooks" / "figures" / "data"
# Spread of measurements, relative to their mean: on a quiet machine, and on a busy one.
NOISES = (0.05, 0.15)
FLOORS, N_SEEDS = (0.95, 0.99), 70


@click.command("table")
@click.option("--seeds", default=N_SEEDS, show_default=True, type=click.IntRange(min=1))
def table_command(*, seeds: int) -> None:
    """Replay the search on all recorded grids, and put the table into the documentation."""
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
                baselines=BASELINES,
            )
        ]
    *by_grid, quiet, busy = replay_rows(found)
    click.echo(table := markdown_table(by_grid))
    put("make replay: grids", table)
    shown = [HEADINGS.index(each) for each in ("noise", "autotune", *BASELINES)]
    rows = [[row[column] for column in shown] for row in (quiet, busy)]
    click.echo(table := markdown_table(rows, [HEADINGS[column] for column in shown]))
    put("make replay", table)
