"""The pictures of a result.

What is the same looks the same in all of them: a block size has a colour, from dark (small) to
light (large) on a colour-blind-safe map, and a number of workers has a marker. What mixes too
little is hollow, or hatched in a grid; what is recommended is vermilion. Bars are 95 % intervals.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import ceil, isfinite
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from cellfeed_tuner._configuration import workers_in_words
from cellfeed_tuner._interval import Estimate, interval
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import ConfigurationResult

__all__ = ["autotune_figure", "throughput_figure", "trade_off_figure"]


# Colours, markers, scales and texts that all pictures share.

COLOURS = "viridis"
CHOSEN = "#d55e00"
BOUND = "#555555"
STYLE: Any = {
    "font.size": 9, "figure.dpi": 150, "hatch.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
# Of 0 workers, of 1, and so on; the marker of more is their number.
_WORKER_MARKERS = ("o", "s", "^", "v", "D", "p", "h")
# A legend names at most this many sizes.
_MOST_NAMED = 8
# Axes of cells per second that span less than this factor have equidistant ticks.
_LINEAR_SPAN = 6


def block_colours(block_sizes: Sequence[int]) -> dict[int, Any]:
    """Return the colour of each block size, from dark (1) to light (1,024), in every picture."""
    shades = np.minimum(0.09 * np.log2(block_sizes), 1.0)
    return dict(zip(block_sizes, mpl.colormaps[COLOURS](shades), strict=True))


def around(estimate: Estimate, *, unit: float = 1.0) -> list[list[float]] | None:
    """Return the lengths of error bars in a unit; None for an infinite interval."""
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    if not (isfinite(below) and isfinite(above)):
        return None
    return [[below / unit], [above / unit]]


def scale_speeds(axes: Axes) -> None:
    """Scale a vertical axis of cells per second logarithmically."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    logarithmic, linear = ticker.LogLocator(subs=(1, 2, 5)), ticker.MaxNLocator(5)
    axes.yaxis.set_major_locator(linear if high < _LINEAR_SPAN * low else logarithmic)
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(visible=True, lw=0.3, alpha=0.5)


def draw_caption(figure: Figure, caption: str, size: float = 7.5) -> None:
    """Write below a figure where its values come from."""
    # Dollars in the name of a label do not begin a formula.
    figure.supxlabel(
        _broken(caption, figure, size), x=0.01, ha="left", fontsize=size, color=BOUND,
        parse_math=False,
    )  # fmt: skip


def _broken(text: str, figure: Figure, size: float) -> str:
    """Return a text with line breaks for the width of a figure; letters are 0.6 as wide as high."""
    return textwrap.fill(text, int(72 * figure.get_figwidth() / (0.6 * size)))


def _timed(result: AutotuneResult) -> list[ConfigurationResult]:
    return [each for each in result.configurations if each.cells_per_second is not None]


def _values(timed: Iterable[ConfigurationResult], name: str) -> list[Any]:
    """Return the values of a setting, in their order."""
    return sorted({each.configuration[name] for each in timed})


def _marker(num_workers: int) -> dict[str, Any]:
    """Return the marker of a number of workers in every picture, and its size in points."""
    if num_workers < len(_WORKER_MARKERS):
        return {"marker": _WORKER_MARKERS[num_workers], "ms": 5}
    return {"marker": f"${num_workers}$", "ms": 8}


def hover(each: ConfigurationResult) -> str:
    """Return the ``gid`` of a configuration's point; the page shows it when it is pointed at."""
    share = f"{each.share_of_random:.1%} of random sampling"
    speed = f"{interval(each.cells_per_second)} cells/s" if each.cells_per_second else each.status
    return f"hover: {each.configuration}: {speed}; {share}"


def _draw_point(
    axes: Axes, x: float, result: AutotuneResult, each: ConfigurationResult, **look: Any
) -> None:
    """Draw the throughput of a timed configuration; hollow if it mixes too little."""
    if (speed := each.cells_per_second) is not None:
        if not result.constraints.mixes(each.share_of_random):
            look["mfc"] = "white"
        point = axes.errorbar(
            x, speed.value, yerr=around(speed), ls="", elinewidth=0.8,
            **_marker(each.configuration.num_workers), **look,
        )  # fmt: skip
        point.lines[0].set_gid(hover(each))


def _draw_chosen(axes: Axes, x: float, result: AutotuneResult) -> list[Artist]:
    """Draw a ring at the throughput of the recommended configuration; return its key."""
    found = result.recommended
    if found is None or (speed := found.cells_per_second) is None:
        return []
    look: Any = {"ls": "", "marker": "o", "mfc": "none", "color": CHOSEN, "ms": 11, "mew": 2}
    axes.errorbar(x, speed.value, yerr=around(speed), elinewidth=0.8, **look)
    predicted = " (predicted)" if found.basis == "predicted" else ""
    return [Line2D([], [], label=f"recommended{predicted}", **look)]


def _finish_speeds(axes: Axes, result: AutotuneResult) -> list[Artist]:
    """Scale and name a vertical axis, and draw the throughput that is needed; return its key."""
    need, keys = result.constraints.need_cells_per_second, list[Artist]()
    if need is not None:
        look: Any = {"color": BOUND, "ls": "-.", "lw": 1}
        keys.append(axes.axhline(need, label=f"needed, {need:,.0f} cells/s", **look))
    if _timed(result) or need is not None:
        scale_speeds(axes)
    else:
        axes.text(0.5, 0.5, "nothing timed", transform=axes.transAxes, ha="center", color=BOUND)
    axes.set_ylabel(f"throughput (cells/s{result.ranks.together})")
    return keys


def _keys(result: AutotuneResult, colours: Mapping[int, Any]) -> list[Artist]:
    """Return the keys of block sizes, of numbers of workers, and of what mixes too little."""
    timed = _timed(result)
    sizes = list(colours)[:: ceil(len(colours) / _MOST_NAMED) or 1]
    keys: list[Artist] = [Patch(color=colours[n], label=f"block size {n}") for n in sizes]
    look: Any = {"ls": "", "color": BOUND}
    keys += [
        Line2D([], [], label=workers_in_words(n), **_marker(n), **look)
        for n in _values(timed, "num_workers")
    ]
    if not all(result.constraints.mixes(each.share_of_random) for each in timed):
        hollow = Line2D([], [], marker="o", mfc="white", label="hollow: mixes too little", **look)
        keys.append(hollow)
    return keys


# A result in one picture.

_TRADE_OFF_INCHES, _HEADLINE_SIZE = 3.3, 11
_MOST_KEYS = 17  # below each other


def autotune_figure(result: AutotuneResult) -> Figure:
    """Draw a result: throughput and entropy over the grid, and their trade-off."""
    grid = [len(_values(result.configurations, name)) for name in _GRID]
    rows, columns = [0, 0] if result.ranges else grid
    panel, high = np.maximum(_SQUARE_INCHES * np.array([columns, rows]) + 0.75, _LEAST_INCHES)
    with mpl.rc_context(STYLE):
        figure = Figure(layout="constrained")
        figure.set_figwidth(max(7.5, 2 * panel))
        headline = _broken(result.sentence, figure, _HEADLINE_SIZE)
        figure.set_figheight(high + _TRADE_OFF_INCHES + 0.5 + 0.2 * len(headline.splitlines()))
        notes, below = "", figure
        if not result.ranges:
            parts: Any = figure.subfigures(2, 1, height_ratios=(high, _TRADE_OFF_INCHES))
            notes, below = _draw_grids(result, parts[0].subplots(1, 2)), parts[1]
        keys = _draw_trade_off(below.subplots(), result)
        below.legend(handles=keys, loc="outside right center", ncols=1 + len(keys) // _MOST_KEYS)
        figure.suptitle(
            headline, x=0.01, ha="left", fontsize=_HEADLINE_SIZE, fontweight="bold",
            parse_math=False,
        )  # fmt: skip
        draw_caption(figure, notes + _caption(result))
    return figure


def _caption(result: AutotuneResult) -> str:
    dataset, cpu = result.dataset, result.machine.cpu
    what = f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes, {dataset.layout}"
    if dataset.loader:
        what = f"{dataset.loader}, {dataset.n_cells:,} rows"
    disks = sorted({storage.file_system or "unknown" for storage in result.machine.storage})
    remote, local = "files on a server", f"{', '.join(disks)}, page cache {result.cache}"
    early = f" Interrupted after {result.seconds:.0f} s." if result.interrupted else ""
    return (
        f"{what}, mixed by {', '.join(dataset.labels)}, minibatch {dataset.batch_size}; "
        f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, "
        f"{remote if result.cache == 'remote' else local}.{early}"
    )


# Throughput and entropy over the grid.

Quantity = Literal["throughput", "entropy"]
# The part of the colour map on which black text can be read: more is darker.
_SHADES = ListedColormap(mpl.colormaps["Blues"](np.linspace(0.12, 0.55, 256)))
_HATCH, _HATCH_COLOUR = "//", "#b8b8b8"
# Of a square, and of a panel at least.
_SQUARE_INCHES, _LEAST_INCHES = np.array([0.74, 0.42]), (3.6, 1.6)
_LONGEST_WORD = len("too few cells")
_GRID = ["block_size", "fetch_factor"]


def _draw_grids(result: AutotuneResult, panels: Sequence[Axes]) -> str:
    """Draw both quantities over block sizes and fetch factors; return what a caption has to say."""
    notes = _draw_grid(panels[0], result, "throughput") + _draw_grid(panels[1], result, "entropy")
    panels[0].set_title(f"Throughput (cells/s{result.ranks.together})")
    panels[1].set_title("Entropy (share of random)")
    if len(result.dataset.labels) > 1:
        notes.append("Entropy: of the label mixed least")
    return "".join(f"{note}. " for note in dict.fromkeys(notes))


def _draw_grid(axes: Axes, result: AutotuneResult, quantity: Quantity) -> list[str]:
    """Draw squares from light (the lowest value) to dark; return what a caption has to say.

    A square is of the recommended configuration, else of the fastest or the best mixed.
    """
    value, counts = ("share_of_random", "mixes")
    if quantity == "throughput":
        value, counts = ("cells_per_second", "is_timed")
    table = result.table()
    table["mixes"] = table["share_of_random"].map(result.constraints.mixes)
    table["is_timed"] = table["known"].isin(["timed", "compared"])
    order = ["is_recommended", counts, value, "peak_memory_bytes"]  # which only what ran has
    table = table.sort_values(order, na_position="first")
    squares = table.drop_duplicates(_GRID, keep="last").set_index(_GRID)
    coloured = squares[value].where(squares[counts])
    if quantity == "throughput":
        coloured = np.log(coloured)
    squares["shade"] = (coloured - coloured.min()) / (np.ptp(coloured.dropna()) or 1.0)
    shades = squares["shade"].unstack()
    notes, write = list[str](), partial(axes.text, ha="center", va="center", fontsize=7)
    for row, column in np.ndindex(shades.shape):
        place = shades.index[row], shades.columns[column]
        if place not in squares.index:
            write(column, row, "\N{EN DASH}", color=BOUND)
            notes.append("\N{EN DASH}: not in the grid")
            continue
        each: Any = squares.loc[place]
        text = f"{each[value]:.1%}" if quantity == "entropy" else _in_square(each)
        square = partial(Rectangle, (column - 0.48, row - 0.48), 0.96, 0.96, fill=False)
        if not each["mixes"]:
            axes.add_patch(square(ec=_HATCH_COLOUR, lw=0, hatch=_HATCH))
            notes.append(f"Hatched: entropy below {100 * result.constraints.entropy_floor:.4g}%")
        if each["is_recommended"]:
            axes.add_patch(square(ec=CHOSEN, lw=2.5, zorder=2))
            notes.append("Framed: recommended")
        notes += ["~: predicted"] * text.startswith("~")
        write(
            column, row, text, color=BOUND if np.isnan(each["shade"]) else "black",
            fontweight="bold" if each["is_recommended"] else "normal",
        )  # fmt: skip
    edges = [np.arange(n + 1) - 0.5 for n in shades.shape[::-1]]
    axes.pcolormesh(*edges, shades, cmap=_SHADES, vmin=0, vmax=1, ec="white", lw=1)
    axes.set_xticks(range(shades.shape[1]), shades.columns.map(str))
    axes.set_yticks(range(shades.shape[0]), shades.index.map(str))
    axes.set(xlabel="fetch factor (minibatches)", ylabel="block size (cells)")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return notes


def _in_square(each: Mapping[str, Any]) -> str:
    """Return the throughput, timed or predicted, else why it was not timed."""
    if each["is_timed"]:
        return f"{_short(each['cells_per_second'])}\n{workers_in_words(each['num_workers'])}"
    if each["known"] == "predicted":
        return f"~{_short(each['cells_per_second'])}"
    return textwrap.fill(each["status"], _LONGEST_WORD)


def _short(speed: float) -> str:
    return f"{speed / 1000:,.1f}k" if speed >= 1000 else f"{speed:.0f}"  # noqa: PLR2004 - a kilo


# The trade-off between throughput and entropy.

# Shares are drawn over the percentage that is missing to random sampling: linear below this one,
# logarithmic above, since what is worth choosing lies within a few percent.
_LINEAR_PERCENT, _NAMED_PERCENT = 0.2, (0, 0.5, 1, 5, 10, 50, 100)


def trade_off_figure(result: AutotuneResult, *, caption: str = "") -> Figure:
    """Draw throughput against entropy, their Pareto front, and the recommended point."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 4.9), layout="constrained")
        keys = _draw_trade_off(figure.subplots(), result)
        figure.legend(handles=keys, loc="outside lower left", ncols=3)
        draw_caption(figure, caption)
    return figure


def _draw_trade_off(axes: Axes, result: AutotuneResult) -> list[Artist]:
    """Draw the timed configurations and their Pareto front; return the keys."""
    timed, chosen, keys = _timed(result), result.chosen, list[Artist]()
    colours = block_colours(_values(timed, "block_size"))
    for each in timed:
        look: Any = {"color": colours[each.configuration.block_size]}
        if least := each.least_mixed:
            bits = each.labels[least].entropy_bits
            bars = around(bits.expected, unit=(bits.random_alike or 1.0) / 100)
            look["xerr"] = bars and bars[::-1]
        _draw_point(axes, _missing(each), result, each, **look)
    if chosen is not None:
        keys += _draw_chosen(axes, _missing(chosen), result)
    keys += _finish_speeds(axes, result)
    floor, look = 100 * result.constraints.entropy_floor, {"color": BOUND, "ls": "--", "lw": 1}
    keys.append(axes.axvline(100 - floor, label=f"entropy floor, {floor:.4g}%", **look))
    front = [
        (_missing(each), each.cells_per_second.value)
        for each in result.pareto_front()
        if each.cells_per_second is not None
    ]
    if len(front) > 1:
        look = {"color": BOUND, "lw": 2.5, "alpha": 0.4, "zorder": 0}
        keys += axes.step(*zip(*front, strict=True), where="post", label="Pareto front", **look)
    axes.set_title("Trade-off (better: up and right)")
    of = " of the label mixed least" if len(result.dataset.labels) > 1 else ""
    axes.set_xlabel(f"entropy{of} (% of random sampling)")
    axes.set_xscale("asinh", linear_width=_LINEAR_PERCENT)
    axes.set_xlim(max(2.0, *axes.get_xlim()), min(0.0, *axes.get_xlim()) - _LINEAR_PERCENT / 4)
    axes.xaxis.set_major_locator(ticker.FixedLocator(_NAMED_PERCENT))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda missing, _: f"{100 - missing:.4g}"))
    axes.minorticks_off()
    return keys + _keys(result, colours)


def _missing(each: ConfigurationResult) -> float:
    """Return how many percent of random sampling's entropy are missing."""
    return 100 * (1 - each.share_of_random)


# Throughput over the fetch factor.

_MOST_PANELS = 3  # beside each other


def throughput_figure(result: AutotuneResult) -> Figure:
    """Draw throughput over the fetch factor, with a line per block size (the paper's Figure 2).

    There is a panel for each number of workers that was timed.
    """
    timed, chosen = sorted(_timed(result), key=lambda each: each.configuration), result.chosen
    colours = block_colours(_values(timed, "block_size"))
    workers, keys = _values(timed, "num_workers") or [0], list[Artist]()
    n_rows = ceil(len(workers) / _MOST_PANELS)
    n_columns = ceil(len(workers) / n_rows)
    with mpl.rc_context(STYLE):
        size = 3.4 * n_columns + 1.9, 3.0 * n_rows + 0.6
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        for axes in rows.flat[len(workers) :]:
            axes.set_axis_off()
        for axes, number in zip(rows.flat, workers, strict=False):
            axes.tick_params(labelbottom=True)
            lines = dict[tuple[Any, ...], dict[int, float]]()
            for each in timed:
                settings, speed = each.configuration, each.cells_per_second
                if settings.num_workers == number and speed is not None:
                    size, factor, *others = settings.plan_settings
                    lines.setdefault((size, *others), {})[factor] = speed.value
                    _draw_point(axes, factor, result, each, color=colours[size])
            for (size, *_), line in lines.items():
                axes.plot(*zip(*line.items(), strict=True), color=colours[size], lw=1.2, zorder=1)
            if chosen is not None and chosen.configuration.num_workers == number:
                keys += _draw_chosen(axes, chosen.configuration.fetch_factor, result)
            needed = _finish_speeds(axes, result)
            axes.set_title(workers_in_words(number))
            axes.set_xlabel("fetch factor (minibatches)")
        for axes in rows[:, 1:].flat:
            axes.set_ylabel("")
        rows[0, 0].set_xscale("log", base=4)
        rows[0, 0].xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.10g}"))
        rows[0, 0].minorticks_off()
        keys += [*needed, *_keys(result, colours)]
        figure.legend(handles=keys, loc="outside right upper")
        draw_caption(figure, _caption(result))
    return figure
