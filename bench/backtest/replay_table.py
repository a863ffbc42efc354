"""How well the search does on recorded grids, as rows of a table."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from bench.backtest.baselines import BASELINES
from bench.backtest.replay import Replay

__all__ = ["HEADINGS", "markdown_table", "replay_rows"]

HEADINGS = (
    "grid",
    "floor",
    "feasible",
    "best",
    "cells/s",
    "noise",
    "autotune",
    "undecided",
    *BASELINES,
)
_LEFT_ALIGNED = {"grid", "best"}
_NONE = "-"


def replay_rows(replays: Mapping[str, Sequence[Replay]]) -> list[list[str]]:
    """Return a row for each grid and floor, in the order of the headings, and the overall rows.

    Parameters
    ----------
    replays
        What `replay` returned, by the name of the grid.
    """
    rows = [
        [name if number == 0 else "", *_row(found)]
        for name, of_grid in replays.items()
        for number, found in enumerate(of_grid)
    ]
    by_noise: dict[str, list[Replay]] = {}
    for found in (each for of_grid in replays.values() for each in of_grid if each.best):
        by_noise.setdefault(f"{found.spread:.0%}", []).append(found)
    return [*rows, *(_mean_row(noise, found) for noise, found in by_noise.items())]


def markdown_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """Return rows as a Markdown table."""
    aligned = ["---" if each in _LEFT_ALIGNED else "---:" for each in headings]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, aligned, *rows))


def _row(found: Replay) -> list[str]:
    feasible = f"{found.n_feasible} of {found.n_configurations}"
    start = [f"{found.floor:.2f}", feasible]
    if found.best is None:
        return [*start, "none", *[_NONE] * (len(HEADINGS) - len(start) - 2)]
    best = found.best
    return [
        *start,
        f"{best.block_size} x {best.fetch_factor}, {best.num_workers}",
        f"{found.best_cells_per_second:,.0f}",
        f"{found.spread:.0%}",
        f"{found.share_within():.0%}",
        f"{sum(found.undecided)} of {len(found.undecided)}",
        *(f"{found.share_within(name):.0%}" for name in BASELINES),
    ]


def _mean_row(noise: str, found: Sequence[Replay]) -> list[str]:
    """Return the mean shares over grids and floors."""
    shares = [np.mean([each.share_within(name) for each in found]) for name in (None, *BASELINES)]
    own, *others = (f"{share:.1%}" for share in shares)
    blank = [""] * (len(HEADINGS) - len(others) - 4)
    return ["all", *blank, noise, own, "", *others]
