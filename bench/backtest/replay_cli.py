"""Replay the search on recorded grids from the command line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from bench.backtest.baselines import BASELINES
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import DEFAULT_LOOKS, Replay, replay
from bench.backtest.replay_table import HEADINGS, markdown_table, replay_rows
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cellfeed import ParameterError
from cellfeed.console import OneLineErrorCommand
from cellfeed_tuner._reports import report_console

__all__ = ["replay_command"]

_LEAST_WIDTH = 160
_EXPLAINED = """
floor: least entropy, as a share of random sampling's; feasible: configurations that reach it; best:
the fastest of these, block size x fetch factor, workers; noise: relative spread of measurements in
the replay; autotune: share of its searches that chose a configuration within 5 % of the best;
undecided: searches that reported being undecided with such a configuration; then other searches
with as many measurements: the same search without the terms of its cost model, or with Optuna's TPE
sampler proposing; the six configurations with the largest fetches and blocks, without workers, in
turns; the largest of them, unmeasured; Optuna's TPE sampler; successive halving; random draws; and
a search that knows the six fastest and their throughputs, but not which is which"""


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
@click.option("--looks", type=click.IntRange(min=1),
              show_default=f"{DEFAULT_LOOKS[0]} to {DEFAULT_LOOKS[-1]}, cyclically",
              help="How many measurements each search takes.")  # fmt: skip
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
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown.")
def replay_command(
    *,
    grids: tuple[Path, ...],
    floors: tuple[float, ...],
    looks: int | None,
    seeds: int,
    spread: float | None,
    plates: int | None,
    distribution: tuple[float, ...] | None,
    batch_size: int,
    as_json: bool,
    as_markdown: bool,
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
            looks=DEFAULT_LOOKS if looks is None else (looks,),
            n_seeds=seeds,
            spread=spread,
            baselines=BASELINES,
        )
        for path, grid in zip(grids, recorded, strict=True)
    }
    if as_json:
        click.echo(json.dumps(_json(replays), indent=1, allow_nan=False))
        return
    rows = replay_rows({path.stem: found for path, found in replays.items()})
    if as_markdown:
        click.echo(markdown_table(rows))
    else:
        _print(rows)


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
        left = heading in {"grid", "best"}
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    click.echo(_EXPLAINED)
