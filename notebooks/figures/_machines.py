"""Throughputs of two machines side by side: published ones and ours."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from cellfeed_tuner.plots import BOUND, CHOSEN

__all__ = [
    "LOADERS", "PUBLISHED", "STRATEGIES", "draw_curve", "draw_level", "one", "scale_alike", "title",
]  # fmt: skip

PUBLISHED: Any = {"color": "black", "ls": "", "marker": "o", "mfc": "none", "ms": 7}
# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
STRATEGIES = {
    "streaming": "#e69f00",
    "streaming with buffer": "#cc79a7",
    "block shuffling": "#56b4e9",
    "random": "#009e73",
}
# Ours is vermilion, others are blue, from the same palette; the marks differ as well.
_OTHERS = "#0072b2"
LOADERS: Any = {
    "cellfeed": {"color": CHOSEN, "marker": "o"},
    "scDataset": {"color": _OTHERS, "marker": "s"},
    "AnnLoader": {"color": _OTHERS, "marker": "D"},
    "DataLoader": {"color": _OTHERS, "marker": "v"},
}


def draw_curve(axes: Axes, part: pd.DataFrame, *, over: str, **look: Any) -> None:
    """Draw throughput over a column, with its intervals where there are any."""
    part = part.sort_values(over)
    around = None
    if "low" in part:
        speed = part["cells_per_second"]
        around = [speed - part["low"], part["high"] - speed]
    style = {"ms": 4, "lw": 1.5, "elinewidth": 1, "capsize": 2, **look}
    axes.errorbar(part[over], part["cells_per_second"], yerr=around, **style)


def draw_level(axes: Axes, row: pd.Series, *, text: str, below: bool = False) -> None:
    """Draw the throughput of a loader without settings, as a line with its interval.

    The text stands above the line on the right, or below it on the left, before other lines.
    """
    colour = LOADERS[row["loader"]]["color"]
    if "low" in row:
        axes.axhspan(row["low"], row["high"], color=colour, alpha=0.15, lw=0)
    axes.axhline(row["cells_per_second"], color=colour, ls="--", lw=1)
    axes.annotate(
        text, (0 if below else 1, row["cells_per_second"]), xycoords=("axes fraction", "data"),
        xytext=(4, -4) if below else (-2, 4), textcoords="offset points",
        ha="left" if below else "right", va="top" if below else "bottom", fontsize=8, color=colour,
        bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 0.6}, zorder=5,
    )  # fmt: skip


def one(table: pd.DataFrame, **values: object) -> pd.Series:
    """Return the only row with these values.

    Raises
    ------
    ValueError
        There are none, or several.
    """
    rows = table[(table[list(values)] == pd.Series(values)).all(axis="columns")]
    if len(rows) != 1:
        msg = f"one row must have {values}, but {len(rows)} have"
        raise ValueError(msg)
    return rows.iloc[0]


def scale_alike(panels: Sequence[Axes], units: Sequence[float], *, of: str) -> None:
    """Scale all panels so that equal heights are equal multiples of a unit, whatever the machine.

    Parameters
    ----------
    panels
        Axes of cells per second.
    units
        The unit throughput of each panel.
    of
        The name of the unit.
    """
    limits = [
        (axes.get_ylim()[0] / unit, axes.get_ylim()[1] / unit)
        for axes, unit in zip(panels, units, strict=True)
    ]
    low, high = min(each for each, _ in limits), max(each for _, each in limits)
    for axes, unit in zip(panels, units, strict=True):
        axes.set_ylim(low * unit, high * unit)
        right = axes.secondary_yaxis(
            "right",
            functions=(partial(np.multiply, 1 / unit), partial(np.multiply, unit)),
        )
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        right.yaxis.set_minor_formatter(NullFormatter())
        right.spines["right"].set_visible(False)
        right.set_ylabel(f"times {of}", color=BOUND)
        right.tick_params(colors=BOUND)


def title(table: pd.DataFrame, name: str) -> str:
    """Return the title of a panel: the loader of its curves, and where they were measured."""
    (loader,) = set(table["loader"]) - {"AnnLoader"}
    return f"{loader}, {name}"
