"""The ``autotune replay`` command."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cellfeed import ParameterError
from cellfeed.console import OneLineErrorCommand
from cellfeed_tuner._planning._replay import Replay, read_grid, replay

__all__ = ["replay_command"]

_GOOD_REGRET = 0.05


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
@click.argument("grid", metavar="GRID.csv", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--floors", default=(0.9, 0.95, 0.99), type=_Numbers(1),
              show_default="0.9,0.95,0.99",
              help="Least entropies, as shares of true random sampling's.")  # fmt: skip
@click.option("--share", default=0.25, show_default=True,
              type=click.FloatRange(0, 1, min_open=True),
              help="Share of the grid that may be measured.")  # fmt: skip
@click.option("--seeds", default=100, show_default=True, type=click.IntRange(min=1),
              help="How many searches to run at each floor.")  # fmt: skip
@click.option("--noise", default=0.03, show_default=True, type=click.FloatRange(min=0),
              help="Relative spread of samples where there is one run of a "
              "configuration.")  # fmt: skip
@click.option("--plates", type=click.IntRange(min=2),
              help="Number of labels, all as frequent.")  # fmt: skip
@click.option("--distribution", type=_Numbers(float("inf")),
              help="Frequencies or counts of the labels.")  # fmt: skip
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def replay_command(
    *,
    grid: Path,
    floors: tuple[float, ...],
    share: float,
    seeds: int,
    noise: float,
    plates: int | None,
    distribution: tuple[float, ...] | None,
    batch_size: int,
    as_json: bool,
) -> None:
    """Play the search on a recorded grid, and compare what it chooses with the best.

    GRID.csv has the columns block_size, fetch_factor, num_workers (0 if absent) and
    cells_per_second, and entropy_bits where that is known. Without entropies, the exact
    expectation for --plates or --distribution is used, and each block is taken to hold one label.
    """
    if plates is not None and distribution is not None:
        msg = "--plates and --distribution say the same; give one of them"
        raise ParameterError(msg)
    labels = distribution if plates is None else (1.0,) * plates
    recorded = read_grid(grid, distribution=labels, batch_size=batch_size)
    replays = replay(recorded, floors=floors, share=share, n_seeds=seeds, noise=noise)
    if as_json:
        click.echo(json.dumps(_json(grid, share, noise, replays), indent=1, allow_nan=False))
    else:
        _print(grid, share, replays)


def _json(grid: Path, share: float, noise: float, replays: list[Replay]) -> dict[str, Any]:
    return {
        "schema": "cellfeed.replay/1",
        "grid": str(grid),
        "share": share,
        "noise": noise,
        "floors": [each.to_json() for each in replays],
    }


def _print(grid: Path, share: float, replays: list[Replay]) -> None:
    n = replays[0].n_configurations
    click.echo(f"{grid.name}: {n} configurations, of which at most {share:.0%} are timed\n")
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in (
        "floor",
        "feasible",
        "best",
        "cells/s",
        "within 5%",
        "median",
        "worst",
        "timed",
    ):
        table.add_column(heading, justify="left" if heading == "best" else "right")
    for each in replays:
        table.add_row(*_row(each))
    Console().print(table)
    click.echo(
        "\nbest: block size x fetch factor, workers; within 5%: of the best, in how many of the "
        "searches;\nmedian, worst: regret, as a share of the best; timed: mean share of the grid"
    )


def _row(found: Replay) -> list[str]:
    start = [f"{found.floor:g}", str(found.n_feasible)]
    if found.best is None:
        return [*start, "none", *["-"] * 5]
    within = round(found.share_within(_GOOD_REGRET) * len(found.regrets))
    best = found.best
    return [
        *start,
        f"{best.block_size} x {best.fetch_factor}, {best.num_workers}",
        f"{found.best_cells_per_second:,.0f}",
        f"{within}/{len(found.regrets)}",
        f"{np.median(found.regrets):.1%}",
        f"{max(found.regrets):.1%}",
        f"{np.mean(found.shares_measured):.1%}",
    ]
