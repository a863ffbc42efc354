"""Colours, scales and captions that all pictures share."""

import textwrap
from collections.abc import Sequence
from math import isfinite
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from cellfeed_tuner._interval import Estimate

__all__ = [
    "BOUND", "CHOSEN", "COLOURS", "CONTEXT", "NOT_TIMED", "STYLE", "around", "block_colours",
    "draw_caption", "hover", "scale_speeds",
]  # fmt: skip

COLOURS = "viridis"
CHOSEN = "#d55e00"
BOUND = "#555555"
NOT_TIMED = "#eeeeee"
CONTEXT = "#d5d5d5"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 150,
    "legend.frameon": False,
}
_CAPTION_CHARACTERS_PER_INCH = 17


def block_colours(block_sizes: Sequence[int]) -> dict[int, Any]:
    """Return the colour of each block size, from dark (1) to light (1,024), in every picture."""
    shades = np.minimum(0.09 * np.log2(block_sizes), 1.0)
    return dict(zip(block_sizes, mpl.colormaps[COLOURS](shades), strict=True))


def hover(text: str) -> str:
    """Return the ``gid`` of an artist that shows a text when pointed at, on the page."""
    return f"hover: {text}"


def around(estimate: Estimate, *, unit: float = 1.0) -> list[list[float]] | None:
    """Return the lengths of error bars in a unit; None for an infinite interval."""
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    if not (isfinite(below) and isfinite(above)):
        return None
    return [[below / unit], [above / unit]]


def scale_speeds(axes: Axes) -> None:
    """Scale a vertical axis of cells per second logarithmically."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, lw=0.3, alpha=0.5)


def draw_caption(figure: Figure, caption: str) -> None:
    """Write below a figure where its values come from."""
    # Dollars in the name of a label do not begin a formula.
    width = int(_CAPTION_CHARACTERS_PER_INCH * figure.get_figwidth())
    figure.supxlabel(
        textwrap.fill(caption, width), x=0.01, ha="left", fontsize=7.5, color=BOUND,
        parse_math=False,
    )  # fmt: skip
