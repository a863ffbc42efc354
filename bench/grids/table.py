"""Play the search on all recorded grids, and put the table into docs/benchmarks/autotune.md."""

from pathlib import Path

import click
import page

from cellfeed_tuner import read_grid, replay
from cellfeed_tuner._defaults import DEFAULT_REPLAY_SECONDS
from cellfeed_tuner._replaying._baselines import BASELINES
from cellfeed_tuner._reports._replay_table import markdown_table, replay_rows

ROOT = Path(__file__).parents[2]
# How much replicates differ on a busy machine, as against what was recorded.
BUSY_SPREAD = 0.15
FLOORS, N_SEEDS = (0.95, 0.99), 10
# A slower disk, on which each configuration was measured for two minutes.
SECONDS_OF_PUBLISHED = 1800.0
PUBLISHED = ROOT / "tuner" / "cellfeed_tuner" / "data"


def main() -> None:
    paths = [
        *sorted(Path(__file__).parent.glob("*.csv")),
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
    page.put("make replay", table)


if __name__ == "__main__":
    main()
