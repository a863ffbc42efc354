"""The ``autotune replay`` command."""

from pathlib import Path
from typing import Any

import click

from cellfeed.console import OneLineErrorCommand
from cellfeed_tuner._defaults import DEFAULT_REPLAY_SECONDS

__all__ = ["replay_command"]


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers that are not negative, separated by commas."""

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
@click.option("--seconds", default=DEFAULT_REPLAY_SECONDS, show_default=True,
              type=click.FloatRange(0, min_open=True),
              help="How long each search measures.")  # fmt: skip
@click.option("--seeds", default=100, show_default=True, type=click.IntRange(min=1),
              help="How many searches to run at each floor.")  # fmt: skip
@click.option("--spread", type=click.FloatRange(min=0),
              help="Relative spread of replicates; if not given, that of the recorded runs, and "
              "0.05 where there is one run only.")  # fmt: skip
@click.option("--plates", type=click.IntRange(min=2),
              help="Number of labels, all as frequent.")  # fmt: skip
@click.option("--distribution", type=_Numbers(float("inf")),
              help="Frequencies or counts of the labels.")  # fmt: skip
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown.")
def replay_command(*, grids: tuple[Path, ...], **settings: Any) -> None:
    """Play the search on recorded grids, and compare what it chooses with the best.

    GRID.csv is what `autotune record` wrote, or has the columns block_size, fetch_factor,
    num_workers (0 if absent) and cells_per_second, and entropy_bits where that is known. Without
    entropies, the exact expectation for --plates or --distribution is used, and each block is
    taken to hold one label.
    """
    from cellfeed_tuner._commands._replay_report import replay_grids  # noqa: PLC0415

    replay_grids(grids, **settings)
