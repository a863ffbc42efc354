"""What all pictures have in common."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import matplotlib as mpl
import numpy as np

from cellfeed_tuner._interval import Estimate

__all__ = [
    "BOUND",
    "CHOSEN",
    "COLOURS",
    "CONTEXT",
    "LOADERS",
    "NOT_TIMED",
    "STRATEGIES",
    "STYLE",
    "around",
    "block_colours",
]

COLOURS = "viridis"
CHOSEN = "#d55e00"
BOUND = "#555555"
NOT_TIMED = "#eeeeee"
CONTEXT = "#d5d5d5"
# Of the palette of Okabe and Ito, which all can tell apart.
STRATEGIES = {
    "streaming": "#e69f00",
    "streaming with buffer": "#cc79a7",
    "block shuffling": "#0072b2",
    "random": "#009e73",
}
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
# Ours is vermilion, others are blue, of the same palette; the marks differ as well.
_OTHERS = "#0072b2"
LOADERS: Any = {
    "cellfeed": {"color": CHOSEN, "marker": "o"},
    "scDataset": {"color": _OTHERS, "marker": "s"},
    "AnnLoader": {"color": _OTHERS, "marker": "D"},
}


def block_colours(block_sizes: Sequence[int]) -> dict[int, Any]:
    """Return the colour of each block size, from dark (small) to light (large)."""
    shades = mpl.colormaps[COLOURS](np.linspace(0.0, 0.9, len(block_sizes)))
    return dict(zip(block_sizes, shades, strict=True))


def around(estimate: Estimate, *, unit: float = 1.0) -> list[list[float]] | None:
    """Return an interval as error bars want it, None where there is none.

    Parameters
    ----------
    estimate
        What is drawn.
    unit
        The value that is drawn as 1.
    """
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    if not (isfinite(below) and isfinite(above)):
        return None
    return [[below / unit], [above / unit]]
