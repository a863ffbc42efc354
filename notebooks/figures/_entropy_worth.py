"""Model quality over the entropy deficit of minibatches."""

from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from numpy.typing import NDArray

from cellfeed_tuner.plots import BOUND, STYLE, block_colours, draw_caption

__all__ = ["entropy_worth_figure"]

_NAMES = {
    "macro_f1": "macro F1,\nless random sampling's",
    "loss": "test loss (nats),\nless random sampling's",
}
# Deficits up to here are on a linear scale, larger ones on a logarithmic one.
_TO_SCALE = 0.01
_TICKS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


def entropy_worth_figure(
    differences: pd.DataFrame, *, entropy_floor: float, caption: str
) -> Figure:
    """Draw the loss of model quality over the entropy deficit of minibatches.

    One column per task, one row per score; each setting is a point with its 95 % interval.

    Parameters
    ----------
    differences
        Columns ``task``, ``score`` (``macro_f1`` or ``loss``), ``block_size``, ``deficit`` (of
        the task's label: 1 minus the share of random sampling's entropy), and ``value``, ``low``
        and ``high`` (score minus that of random sampling).
    entropy_floor
        The floor to mark, as a share of random sampling's entropy.
    caption
        Where the values come from.
    """
    tasks = list(dict.fromkeys(differences["task"]))
    colours = block_colours(sorted(differences["block_size"].unique()))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 2.5 * len(tasks), 5.6), layout="constrained")
        rows: NDArray[Any] = figure.subplots(len(_NAMES), len(tasks), sharex=True, squeeze=False)
        for (task, score), part in differences.groupby(["task", "score"], sort=False):
            axes: Axes = rows[list(_NAMES).index(str(score)), tasks.index(str(task))]
            _draw(axes, part, colours)
            axes.axvline(1 - entropy_floor, color=BOUND, ls="--", lw=1)
        _label_axes(rows, tasks)
        _name_marks(figure, rows[0, 0], colours, entropy_floor)
        draw_caption(figure, caption)
    return figure


def _draw(axes: Axes, part: pd.DataFrame, colours: dict[int, Any]) -> None:
    axes.axhline(0, color=BOUND, lw=1)
    for block_size, points in part.groupby("block_size"):
        deficit, value, low, high = (
            points[name].to_numpy() for name in ("deficit", "value", "low", "high")
        )
        axes.errorbar(
            deficit, value, yerr=[value - low, high - value], fmt="o",
            color=colours[int(str(block_size))], ms=5, lw=1,
        )  # fmt: skip


def _label_axes(rows: NDArray[Any], tasks: list[str]) -> None:
    for axes, task in zip(rows[0], tasks, strict=True):
        axes.set_title(task)
    for axes, name in zip(rows[:, 0], _NAMES.values(), strict=True):
        axes.set_ylabel(name)
    for axes in rows[-1]:
        axes.set_xlabel("entropy deficit of this label,\nshare of random sampling's")
    for axes in rows.flat:
        axes.set_xscale("symlog", linthresh=_TO_SCALE)
        axes.set_xlim(-_TO_SCALE / 5, 1.2)
        axes.xaxis.set_major_locator(FixedLocator(_TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        axes.tick_params(axis="x", labelrotation=90)
        axes.grid(visible=True, lw=0.3, alpha=0.5)


def _name_marks(figure: Figure, axes: Axes, colours: dict[int, Any], entropy_floor: float) -> None:
    marks: dict[str, Any] = {
        f"block {size}": axes.plot([], [], "o", color=colour)[0] for size, colour in colours.items()
    }
    marks["random sampling"] = axes.plot([], [], color=BOUND, lw=1)[0]
    marks[f"floor {entropy_floor:g}"] = axes.plot([], [], color=BOUND, ls="--", lw=1)[0]
    figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=len(marks))
