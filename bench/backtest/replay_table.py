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
    "spread",
    "within 5 %",
    "undecided",
    "95th",
    "measured",
    *BASELINES,
)
_LEFT_ALIGNED = {"grid", "best"}
_NONE = "-"


def replay_rows(replays: Mapping[str, Sequence[Replay]]) -> list[list[str]]:
    """Return a row for each grid and floor, in the order of the headings.

    Parameters
    ----------
    replays
        What `replay` returned, by the name of the grid.
    """
    return [
        [name if number == 0 else "", *_row(found)]
        for name, of_grid in replays.items()
        for number, found in enumerate(of_grid)
    ]


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table in Markdown."""
    aligned = ["---" if each in _LEFT_ALIGNED else "---:" for each in HEADINGS]
    return "\n".join("| " + " | ".join(row) + " |" for row in (HEADINGS, aligned, *rows))


def _row(found: Replay) -> list[str]:
    feasible = f"{found.n_feasible} of {found.n_configurations}"
    start = [f"{found.floor:.2f}", feasible]
    if found.best is None:
        return [*start, "none", *[_NONE] * (len(HEADINGS) - len(start) - 2)]
    best, n_seeds = found.best, len(found.regrets)
    return [
        *start,
        f"{best.block_size} x {best.fetch_factor}, {best.num_workers}",
        f"{found.best_cells_per_second:,.0f}",
        f"{found.spread:.0%}",
        f"{found.n_within()} of {n_seeds}",
        f"{sum(found.undecided)}",
        f"{np.quantile(found.regrets, 0.95):.1%}",
        f"{np.mean(found.shares_measured):.0%}",
        *(str(found.n_baseline_within(name)) for name in BASELINES),
    ]
