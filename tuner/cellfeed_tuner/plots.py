"""Every picture of the project, in one visual language.

Block sizes keep their colour in all pictures, from dark (small) to light (large), in a map that
colour-blind readers can follow. Intervals are drawn wherever there are any, and the caption
names the machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from cellfeed_tuner._result import AutotuneResult, ConfigurationResult

__all__ = ["autotune_figure", "entropy_figure"]

_COLOURS = "viridis"
_CHOSEN = "#d55e00"
_BOUND = "#555555"
_NOT_TIMED = "#eeeeee"
_CONTEXT = "#d5d5d5"
_BETWEEN_BOUNDS = "#f3f3f3"
_PUBLISHED: Any = {"color": "black", "ls": "", "marker": "o", "mfc": "none", "ms": 7}
_REPLAYED: Any = {"color": "black", "ls": "", "marker": "x", "ms": 5, "elinewidth": 1, "capsize": 2}
_UPPER: Any = {"color": _BOUND, "ls": "--", "lw": 1}
_LOWER: Any = {"color": _BOUND, "ls": ":", "lw": 1.5}
# Why a place on the grid has no throughput, short enough for its square.
_ABSENT: dict[str, str] = {
    "not enough samples": "few\nsamples",
    "too few cells": "too few\ncells",
    "over memory": "over\nmemory",
    "too slow": "too\nslow",
    "below entropy floor": "below\nfloor",
    "out of budget": "no\ntime",
    "failed": "failed",
}
_WORKER_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 150,
    "legend.frameon": False,
}


def autotune_figure(result: AutotuneResult) -> Figure:
    """Draw what ``autotune`` found: throughput and entropy over the grid, and the trade-off.

    Parameters
    ----------
    result
        What it found.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(14.5, 4.9), layout="constrained")
        speed_axes, entropy_axes, trade_off_axes = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
        _draw_throughput(speed_axes, result)
        _draw_entropy(entropy_axes, result)
        _draw_trade_off(trade_off_axes, result)
        figure.suptitle(_headline(result), x=0.01, ha="left", fontsize=11)
        figure.supxlabel(_caption(result), x=0.01, ha="left", fontsize=7.5, color=_BOUND)
    return figure


def entropy_figure(
    grid: pd.DataFrame, bounds: Mapping[int, float], upper_bound: float, *, caption: str
) -> Figure:
    """Draw minibatch entropy over the fetch factor for each block size (the paper's Figure 4).

    One column per block size: above, the entropy between its bounds, with the other block sizes
    in grey; below, what lies between the exact expectation and what was measured.

    Parameters
    ----------
    grid
        Columns ``block_size``, ``fetch_factor`` and, in bits, ``published`` (measured by the
        paper's authors), ``replayed`` (the plan over labels) with ``low`` and ``high``, and
        ``expected`` (exact, homogeneous blocks). Missing values are left out.
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
    colours = _colours(sorted(parts))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(1.5 + 1.9 * len(parts), 5.6), layout="constrained")
        rows = figure.subplots(
            2, len(parts), sharex=True, sharey="row", squeeze=False, height_ratios=(2.4, 1)
        )
        for column, (block_size, part) in enumerate(parts.items()):
            above, below = rows[0, column], rows[1, column]
            for other in parts.values():
                above.plot(other["fetch_factor"], other["expected"], color=_CONTEXT, lw=0.8)
            _draw_bounds(above, bounds[block_size], upper_bound)
            above.plot(part["fetch_factor"], part["expected"], color=colours[block_size], lw=2)
            _draw_marks(above, part, apart=1)
            below.axhline(0, color=colours[block_size], lw=2, zorder=0)
            _draw_marks(below, _less_expected(part), apart=1.2)
            above.set_title(f"{block_size} cell{'s' if block_size > 1 else ''} per block")
        _label_axes(rows, sorted(grid["fetch_factor"].unique()))
        _name_marks(figure, rows[0, 0])
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=7.5, color=_BOUND)
    return figure


def _less_expected(part: pd.DataFrame) -> pd.DataFrame:
    values = ["published", "replayed", "low", "high"]
    return part.assign(**part[values].sub(part["expected"], axis="index"))


def _draw_marks(axes: Axes, part: pd.DataFrame, *, apart: float) -> None:
    """Draw what was published and what was replayed, by a factor left and right of their place."""
    axes.plot(part["fetch_factor"] / apart, part["published"], **_PUBLISHED)
    around = [part["replayed"] - part["low"], part["high"] - part["replayed"]]
    axes.errorbar(part["fetch_factor"] * apart, part["replayed"], yerr=around, **_REPLAYED)


def _draw_bounds(axes: Axes, lower: float, upper: float) -> None:
    axes.axhspan(lower, upper, color=_BETWEEN_BOUNDS, lw=0, zorder=0)
    axes.axhline(upper, **_UPPER)
    axes.axhline(lower, **_LOWER)
    axes.annotate(
        f"{lower:.2f}", (1, lower), xycoords=("axes fraction", "data"), xytext=(-2, 3),
        textcoords="offset points", ha="right", fontsize=7.5, color=_BOUND,
    )  # fmt: skip


def _label_axes(rows: NDArray[Any], factors: Sequence[int]) -> None:
    below = rows[1, 0]
    below.set_xscale("log", base=2)
    below.set_xticks(factors, [str(factor) for factor in factors])
    below.minorticks_off()
    for axes in rows[1]:
        axes.margins(y=0.15)
        axes.tick_params(axis="x", labelrotation=90)
        axes.set_xlabel("fetch factor\n(minibatches)")
    rows[0, 0].set_ylabel("minibatch label entropy (bits)")
    below.set_ylabel("difference from\nexact (bits)")


def _name_marks(figure: Figure, axes: Axes) -> None:
    """Say once what lines and marks mean; those of lines in grey, whatever their colour."""
    marks: dict[str, Any] = {
        "published, measured": axes.plot([], [], **_PUBLISHED)[0],
        "ours, plan replayed over labels, 95 % interval": axes.errorbar([], [], [], **_REPLAYED),
        "exact, homogeneous blocks": axes.plot([], [], lw=2, color=_BOUND)[0],
        "the same for other block sizes": axes.plot([], [], lw=0.8, color=_CONTEXT)[0],
        "upper bound": axes.plot([], [], **_UPPER)[0],
        "lower bound of this block size": axes.plot([], [], **_LOWER)[0],
    }
    figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=3)


def _colours(block_sizes: Sequence[int]) -> dict[int, Any]:
    shades = mpl.colormaps[_COLOURS](np.linspace(0.0, 0.9, len(block_sizes)))
    return dict(zip(block_sizes, shades, strict=True))


def _draw_throughput(axes: Axes, result: AutotuneResult) -> None:
    best = dict[tuple[int, int], ConfigurationResult]()
    for each in result.configurations:
        place = each.configuration.block_size, each.configuration.fetch_factor
        if _speed(each) > _speed(best.get(place)):
            best[place] = each
    values = {place: _speed(each) for place, each in best.items()}
    texts = {
        place: f"{_short(_speed(each))}\n{each.configuration.num_workers} w"
        for place, each in best.items()
    }
    for each in result.configurations:
        place = each.configuration.block_size, each.configuration.fetch_factor
        if place not in best:
            texts.setdefault(place, _ABSENT.get(each.status, ""))
    axes.set_title("Throughput (cells/s), best workers (w)")
    _draw_grid(axes, result, values, texts, logarithmic=True)


def _draw_entropy(axes: Axes, result: AutotuneResult) -> None:
    entropies = {
        (each.configuration.block_size, each.configuration.fetch_factor): each.entropy_bits
        for each in result.configurations
    }
    values = {place: entropy.share_of_random for place, entropy in entropies.items()}
    texts = {
        place: f"{entropy.expected.value:.2f}\n{entropy.share_of_random:.0%}"
        for place, entropy in entropies.items()
    }
    axes.set_title("Entropy (bits), share of random")
    _draw_grid(axes, result, values, texts, logarithmic=False)


def _draw_grid(
    axes: Axes,
    result: AutotuneResult,
    values: Mapping[tuple[int, int], float],
    texts: Mapping[tuple[int, int], str],
    *,
    logarithmic: bool,
) -> None:
    block_sizes = sorted({each.configuration.block_size for each in result.configurations})
    fetch_factors = sorted({each.configuration.fetch_factor for each in result.configurations})
    cells = np.full((len(block_sizes), len(fetch_factors)), np.nan)
    for (block_size, fetch_factor), value in values.items():
        cells[block_sizes.index(block_size), fetch_factors.index(fetch_factor)] = value
    shades = _shades(cells, logarithmic=logarithmic)
    axes.set_facecolor(_NOT_TIMED)
    axes.imshow(shades, cmap=_COLOURS, vmin=0, vmax=1, origin="lower", aspect="auto")
    for row, block_size in enumerate(block_sizes):
        for column, fetch_factor in enumerate(fetch_factors):
            text = texts[block_size, fetch_factor]
            shade = shades[row, column]
            colour = _BOUND if np.isnan(shade) else "white" if shade < 0.6 else "black"  # noqa: PLR2004 - of the colour map
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    if result.recommended is not None:
        chosen = result.recommended.configuration
        corner = (
            fetch_factors.index(chosen.fetch_factor) - 0.48,
            block_sizes.index(chosen.block_size) - 0.48,
        )
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, ec=_CHOSEN, lw=2.5))
    axes.set_xticks(range(len(fetch_factors)), [str(factor) for factor in fetch_factors])
    axes.set_yticks(range(len(block_sizes)), [str(size) for size in block_sizes])
    axes.set(xlabel="fetch factor (minibatches)", ylabel="block size (cells)")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _shades(cells: NDArray[np.float64], *, logarithmic: bool) -> NDArray[np.float64]:
    """Return values scaled to 0 .. 1, NaN where there are none."""
    if np.all(np.isnan(cells)):
        return cells
    scaled = np.log(cells) if logarithmic else cells
    low, high = np.nanmin(scaled), np.nanmax(scaled)
    shades: NDArray[np.float64] = (scaled - low) / max(float(high - low), 1e-9)
    return shades


def _draw_trade_off(axes: Axes, result: AutotuneResult) -> None:
    timed = [each for each in result.configurations if each.cells_per_second is not None]
    block_sizes = sorted({each.configuration.block_size for each in result.configurations})
    workers = sorted({each.configuration.num_workers for each in result.configurations})
    colours = _colours(block_sizes)
    for each in timed:
        speed = each.cells_per_second
        if speed is not None:
            axes.errorbar(
                each.entropy_bits.share_of_random,
                speed.value,
                yerr=[[speed.value - speed.low], [speed.high - speed.value]],
                fmt=_marker(workers, each.configuration.num_workers),
                color=colours[each.configuration.block_size],
                ms=5,
                lw=1,
            )
    floor = result.constraints.entropy_floor
    axes.axvline(floor, color=_BOUND, ls="--", lw=1)
    axes.annotate(
        f"floor {floor:g}", (floor, 1), xycoords=("data", "axes fraction"), xytext=(-3, -3),
        textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8, color=_BOUND,
    )  # fmt: skip
    _mark_choice(axes, result)
    axes.set_title("Trade-off, with 95 % intervals")
    axes.set(xlabel="entropy, share of random sampling's", ylabel="throughput (cells/s)")
    axes.set_yscale("log")
    axes.grid(visible=True, which="both", lw=0.3, alpha=0.5)
    for size in block_sizes:
        axes.plot([], [], "o", color=colours[size], label=f"block {size}")
    for number in workers:
        axes.plot([], [], _marker(workers, number), color=_BOUND, label=_workers(number))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _mark_choice(axes: Axes, result: AutotuneResult) -> None:
    if result.recommended is None:
        return
    chosen = result.recommended.configuration
    share = next(
        each.entropy_bits.share_of_random
        for each in result.configurations
        if each.configuration == chosen
    )
    speed = result.recommended.cells_per_second
    axes.errorbar(
        share,
        speed.value,
        yerr=[[speed.value - speed.low], [speed.high - speed.value]],
        fmt="o",
        mfc="none",
        mec=_CHOSEN,
        ecolor=_CHOSEN,
        ms=13,
        mew=2,
        label="recommended, measured afresh"
        if result.recommended.measured_afresh
        else "recommended",
    )


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _marker(workers: Sequence[int], number: int) -> str:
    return _WORKER_MARKERS[workers.index(number) % len(_WORKER_MARKERS)]


def _speed(result: ConfigurationResult | None) -> float:
    return (
        0.0 if result is None or result.cells_per_second is None else result.cells_per_second.value
    )


def _short(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"  # noqa: PLR2004 - a kilo


def _headline(result: AutotuneResult) -> str:
    if result.recommended is None:
        return "autotune: no configuration is feasible"
    chosen, speed = result.recommended.configuration, result.recommended.cells_per_second
    return (
        f"Recommended: {chosen}; {speed.value:,.0f} cells/s ({speed.low:,.0f} to {speed.high:,.0f})"
    )


def _caption(result: AutotuneResult) -> str:
    dataset, cpu = result.dataset, result.machine.cpu
    disks = ", ".join(
        sorted({storage.file_system or "unknown" for storage in result.machine.storage})
    )
    return (
        f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes, {dataset.layout}, "
        f"label {dataset.label} ({dataset.n_labels} values), minibatch {dataset.batch_size}; "
        f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, {disks}, "
        f"page cache {result.cache}"
    )
