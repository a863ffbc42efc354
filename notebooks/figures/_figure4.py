"""The paper's Figure 4: entropy over the fetch factor, published and replayed."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cellfeed_tuner.plots import BOUND, STYLE, block_colours, draw_caption

from ._looks import (
    CONTEXT,
    LOWER,
    REPLAYED,
    UPPER,
    draw_bounds,
    scale_fetch_factors,
    title_of_block,
)
from ._machines import PUBLISHED

__all__ = ["entropy_figure"]


def entropy_figure(
    grid: pd.DataFrame, bounds: Mapping[int, float], upper_bound: float, *, caption: str
) -> Figure:
    """Draw minibatch entropy over the fetch factor for each block size (the paper's Figure 4).

    One column per block size: above, the entropy between its bounds, with the other block sizes
    in grey; below, the measured values minus the exact expectation.

    Parameters
    ----------
    grid
        Columns ``block_size``, ``fetch_factor`` and, in bits, ``published`` (measured by the
        paper's authors), ``replayed`` (the plan over labels) with ``low`` and ``high``, and
        ``expected`` (exact, homogeneous blocks). Missing values are not drawn.
    bounds
        The paper's lower bound for each block size, bits.
    upper_bound
        The paper's upper bound, bits.
    caption
        Where the values come from.
    """
    parts = {
        int(str(block_size)): part
        for block_size, part in grid.sort_values("fetch_factor").groupby("block_size")
    }
    colours = block_colours(sorted(parts))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 1.9 * len(parts), 5.6), layout="constrained")
        rows = figure.subplots(
            2, len(parts), sharex=True, sharey="row", squeeze=False, height_ratios=(2.4, 1)
        )
        for column, (block_size, part) in enumerate(parts.items()):
            above, below = rows[0, column], rows[1, column]
            for other in parts.values():
                above.plot(other["fetch_factor"], other["expected"], color=CONTEXT, lw=0.8)
            draw_bounds(above, bounds[block_size], upper_bound)
            above.plot(part["fetch_factor"], part["expected"], color=colours[block_size], lw=2)
            _draw_marks(above, part, apart=1)
            below.axhline(0, color=colours[block_size], lw=2, zorder=0)
            _draw_marks(below, _less_expected(part), apart=1.2)
            above.set_title(title_of_block(block_size))
        _label_axes(rows, sorted(grid["fetch_factor"].unique()))
        _name_marks(figure, rows[0, 0])
        draw_caption(figure, caption)
    return figure


def _less_expected(part: pd.DataFrame) -> pd.DataFrame:
    values = ["published", "replayed", "low", "high"]
    return part.assign(**part[values].sub(part["expected"], axis="index"))


def _draw_marks(axes: Axes, part: pd.DataFrame, *, apart: float) -> None:
    """Draw published and replayed values, shifted by a factor to the left and right."""
    axes.plot(part["fetch_factor"] / apart, part["published"], **PUBLISHED)
    around = [part["replayed"] - part["low"], part["high"] - part["replayed"]]
    axes.errorbar(part["fetch_factor"] * apart, part["replayed"], yerr=around, **REPLAYED)


def _label_axes(rows: NDArray[Any], factors: Sequence[int]) -> None:
    below = rows[1, 0]
    scale_fetch_factors(below, factors)
    for axes in rows[1]:
        axes.margins(y=0.15)
        axes.tick_params(axis="x", labelrotation=90)
        axes.set_xlabel("fetch factor\n(minibatches)")
    rows[0, 0].set_ylabel("minibatch label entropy (bits)")
    below.set_ylabel("difference from\nexact (bits)")


def _name_marks(figure: Figure, axes: Axes) -> None:
    """Explain lines and marks once, in grey, whatever their colour."""
    marks: dict[str, Any] = {
        "published, measured": axes.plot([], [], **PUBLISHED)[0],
        "ours, plan replayed over labels, 95 % interval": axes.errorbar([], [], [], **REPLAYED),
        "exact, homogeneous blocks": axes.plot([], [], lw=2, color=BOUND)[0],
        "the same for other block sizes": axes.plot([], [], lw=0.8, color=CONTEXT)[0],
        "upper bound": axes.plot([], [], **UPPER)[0],
        "lower bound of this block size": axes.plot([], [], **LOWER)[0],
    }
    figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=3)
