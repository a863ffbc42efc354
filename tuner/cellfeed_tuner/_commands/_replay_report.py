"""What ``autotune replay`` plays and prints."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cellfeed import ParameterError
from cellfeed_tuner._recording._recorded_grid import read_grid
from cellfeed_tuner._replaying._baselines import BASELINES
from cellfeed_tuner._replaying._replay import Replay, replay
from cellfeed_tuner._reports._console import report_console
from cellfeed_tuner._reports._replay_table import HEADINGS, markdown_table, replay_rows

__all__ = ["replay_grids"]

_EXPLAINED = """
floor: least entropy, as a share of random sampling's; feasible: what has it; best: the fastest of
these, block size x fetch factor, workers; spread: of replicates, as played; within 5 %: of the
best, in how many of the searches of {seconds:g} s; undecided: how many said so, of what is within
5 % of the best; 95th: percentile of how much slower the choice is than the best; measured: mean
share of the grid; the rest: simpler searches with as much time, within 5 % (the six configurations
with the largest fetches and blocks, without workers, measured in turns; Optuna's TPE sampler)"""


def replay_grids(
    grids: Sequence[Path],
    *,
    floors: tuple[float, ...],
    seconds: float,
    seeds: int,
    spread: float | None,
    plates: int | None,
    distribution: tuple[float, ...] | None,
    batch_size: int,
    as_json: bool,
    as_markdown: bool,
) -> None:
    """Play the search on recorded grids; see `replay_command`."""
    if plates is not None and distribution is not None:
        msg = "--plates and --distribution say the same; give one of them"
        raise ParameterError(msg)
    labels = distribution if plates is None else (1.0,) * plates
    recorded = [read_grid(path, distribution=labels, batch_size=batch_size) for path in grids]
    replays = {
        path: replay(
            grid,
            floors=floors,
            seconds=seconds,
            n_seeds=seeds,
            spread=spread,
            baselines=tuple(BASELINES),
        )
        for path, grid in zip(grids, recorded, strict=True)
    }
    if as_json:
        click.echo(json.dumps(_json(replays, seconds), indent=1, allow_nan=False))
        return
    rows = replay_rows({path.stem: found for path, found in replays.items()})
    if as_markdown:
        click.echo(markdown_table(rows))
    else:
        _print(rows, seconds)


def _json(replays: Mapping[Path, list[Replay]], seconds: float) -> dict[str, Any]:
    return {
        "schema": "cellfeed.replay/1",
        "seconds": seconds,
        "grids": [
            {"grid": str(path), "floors": [each.to_json() for each in found]}
            for path, found in replays.items()
        ],
    }


def _print(rows: Sequence[Sequence[str]], seconds: float) -> None:
    console = report_console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        left = heading in {"grid", "best"}
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    click.echo(_EXPLAINED.format(seconds=seconds))
