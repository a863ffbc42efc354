"""Measured entropy against the plan, the exact expectation and the paper's bounds."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult
from cellfeed_tuner.plots._style import BOUND, CONTEXT, STYLE, around, block_colours

__all__ = [
    "LOWER", "REPLAYED", "UPPER", "bounds_figure", "draw_bounds", "scale_fetch_factors",
    "title_of_block",
]  # fmt: skip

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
        f"{lower:.2f}", (1, lower), xycoords=("axes fraction", "data"), xytext=(-2, 3),
        textcoords="offset points", ha="right", fontsize=7.5, color=BOUND,
    )  # fmt: skip


def scale_fetch_factors(axes: Axes, factors: Sequence[int]) -> None:
    """Scale the horizontal axis and those that share it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [str(factor) for factor in factors])
    axes.minorticks_off()


def title_of_block(block_size: int) -> str:
    """Return the title of the axes of one block size."""
    return f"{block_size} cell{'s' if block_size > 1 else ''} per block"


_MOST_COLUMNS = 6
# Measured values are drawn right of their fetch factor, side by side for each number of workers.
_FIRST_STEP, _LAST_STEP = 0.2, 0.6
_MEASURED: Any = {"ls": "", "mfc": "none", "ms": 5, "elinewidth": 1}
# By the kind of the verdict; None where there is none.
_MARKS: dict[str | None, Any] = {
    "inside": {"marker": "o", "color": "black"},
    "outside": {"marker": "s", "color": "#7b3294"},
    "assumptions": {"marker": "^", "color": "#0072b2"},
    "loader": {"marker": "X", "color": "#c1121f"},
    None: {"marker": "o", "color": BOUND},
}


def bounds_figure(result: AutotuneResult) -> Figure:
    """Draw entropy over the fetch factor for each block size, with the theory."""
    parts = dict[int, list[ConfigurationResult]]()
    for each in sorted(result.configurations, key=lambda each: each.configuration):
        parts.setdefault(each.configuration.block_size, []).append(each)
    factors = sorted({each.configuration.fetch_factor for each in result.configurations})
    colours = block_colours(list(parts))
    n_columns = min(_MOST_COLUMNS, len(parts))
    n_rows = ceil(len(parts) / n_columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(0.9 + 1.7 * n_columns, 1.2 + 2.6 * n_rows), layout="constrained")
        rows = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        used = rows.flat[: len(parts)]
        for axes in rows.flat[len(parts) :]:
            axes.set_axis_off()
        for axes, (block_size, part) in zip(used, parts.items(), strict=True):
            for other in parts.values():
                _draw_exact(axes, other, color=CONTEXT, lw=0.8)
            bounds = part[0].entropy_bits
            if bounds.upper_bound > 0:
                draw_bounds(axes, bounds.lower_bound, bounds.upper_bound)
            _draw_exact(axes, part, color=colours[block_size], lw=2)
            planned = {each.configuration.fetch_factor: each.entropy_bits.expected for each in part}
            for fetch_factor, bits in planned.items():
                axes.errorbar(fetch_factor, bits.value, yerr=around(bits), **REPLAYED)
            _draw_measured(axes, part)
            axes.set_title(title_of_block(block_size))
        scale_fetch_factors(rows[0, 0], factors)
        for axes in used[-n_columns:]:  # the lowest of each column
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel("fetch factor\n(minibatches)")
        for axes in rows[:, 0]:
            axes.set_ylabel("minibatch label entropy (bits)")
        _name_marks(figure, rows[0, 0], result)
    return figure


def _draw_exact(axes: Axes, part: Sequence[ConfigurationResult], **style: Any) -> None:
    exact = {
        each.configuration.fetch_factor: each.entropy_bits.homogeneous
        for each in part
        if each.entropy_bits.homogeneous is not None
    }
    axes.plot(list(exact), list(exact.values()), **style)


def _draw_measured(axes: Axes, part: Sequence[ConfigurationResult]) -> None:
    workers = sorted({each.configuration.num_workers for each in part})
    steps = dict(zip(workers, np.linspace(_FIRST_STEP, _LAST_STEP, len(workers)), strict=True))
    for each in part:
        bits = each.entropy_bits.measured
        if bits is not None and each.status == "measured":
            place = each.configuration.fetch_factor * 2 ** steps[each.configuration.num_workers]
            style = _MARKS[each.verdict.kind if each.verdict else None]
            axes.errorbar(place, bits.value, yerr=around(bits), **_MEASURED, **style)


def _name_marks(figure: Figure, axes: Axes, result: AutotuneResult) -> None:
    """Draw one legend of all lines and marks, with grey for lines of any colour."""
    marks: dict[str, Any] = {
        "exact for homogeneous blocks": axes.plot([], [], lw=2, color=BOUND)[0],
        "plan replayed over labels, 95 % interval": axes.errorbar([], [], [], **REPLAYED),
        "upper bound": axes.plot([], [], **UPPER)[0],
        "lower bound of this block size": axes.plot([], [], **LOWER)[0],
    }
    found = {
        each.verdict.kind if each.verdict else None
        for each in result.configurations
        if each.status == "measured"
    }
    for kind, style in _MARKS.items():
        if kind in found:
            label = f"measured, verdict: {kind}" if kind else "measured, not judged"
            marks[label] = axes.errorbar([], [], [], **_MEASURED, **style)
    figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=3)
