"""Play the search on all recorded grids, and put the table into the README."""

from pathlib import Path

import click
import readme

from cellfeed_tuner import read_grid, replay
from cellfeed_tuner._reports._replay_table import markdown_table, replay_rows

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "tuner" / "cellfeed_tuner" / "data"


def main() -> None:
    paths = [
        *sorted(Path(__file__).parent.glob("*.csv")),
        *sorted(PUBLISHED.glob("published_tahoe_*.csv")),
    ]
    found = {}
    for path in paths:
        click.echo(f"{path.stem} ...")
        found[path.stem] = replay(read_grid(path))
    table = markdown_table(replay_rows(found))
    click.echo(table)
    readme.put("make replay", table)


if __name__ == "__main__":
    main()
