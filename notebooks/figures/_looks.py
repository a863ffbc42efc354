"""What figures of entropy and of the fetch factor share."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from cellfeed_tuner.plots import BOUND

__all__ = [
    "CONTEXT", "LOWER", "REPLAYED", "UPPER", "draw_bounds", "scale_fetch_factors", "title_of_block",
]  # fmt: skip

CONTEXT = "#d5d5d5"
REPLAYED: Any = {"color": "black", "ls": "", "marker": "x", "ms": 5, "elinewidth": 1, "capsize": 2}
UPPER: Any = {"color": BOUND, "ls": "--", "lw": 1}
LOWER: Any = {"color": BOUND, "ls": ":", "lw": 1.5}
_BETWEEN_BOUNDS = "#f3f3f3"


def draw_bounds(axes: Axes, lower: float, upper: float) -> None:
    """Shade the range between the bounds, and label the lower one."""
    axes.axhspan(lower, upper, color=_BETWEEN_BOUNDS, lw=0, zorder=0)
    axes.axhline(upper, **UPPER)
    axes.axhline(lower, **LOWER)
    axes.annotate(
        f"{lower:.2f}" if lower else "0: no bound", (1, lower),
        xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points", ha="right",
        fontsize=7.5, color=BOUND,
    )  # fmt: skip


def title_of_block(block_size: int) -> str:
    """Return the title of the axes of one block size."""
    return f"{block_size} cell{'s' if block_size > 1 else ''} per block"


def scale_fetch_factors(axes: Axes, factors: Sequence[int]) -> None:
    """Scale the horizontal axis and those that share it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [str(factor) for factor in factors])
    axes.minorticks_off()
