"""Play the search on all recorded grids, and put the table into the README."""

import re
from pathlib import Path

import click

from cellfeed_tuner import read_grid, replay
from cellfeed_tuner._reports._replay_table import markdown_table, replay_rows

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PUBLISHED = ROOT / "tuner" / "cellfeed_tuner" / "data" / "published_tahoe_grid.csv"
BETWEEN = re.compile(r"(<!-- make replay -->\n).*(<!-- end -->)", re.DOTALL)


def main() -> None:
    paths = [*sorted(Path(__file__).parent.glob("*.csv")), PUBLISHED]
    found = {}
    for path in paths:
        click.echo(f"{path.stem} ...")
        found[path.stem] = replay(read_grid(path))
    table = markdown_table(replay_rows(found))
    click.echo(table)
    text, n = BETWEEN.subn(rf"\g<1>{table}\n\g<2>", README.read_text())
    assert n == 1, "the README has one place for the table"
    README.write_text(text)


if __name__ == "__main__":
    main()
