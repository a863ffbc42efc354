"""The pictures of a result.

What is the same looks the same in all of them: a block size has a colour, from dark (small) to
light (large) on a colour-blind-safe map, and a number of workers has a marker. What mixes too
little is hollow, or hatched in a grid; what is recommended is vermilion. Bars are 95 % intervals.
Texts are broken to the width that they have.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import ceil, isfinite, log
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from cellfeed_tuner._configuration import workers_in_words
from cellfeed_tuner._interval import Estimate, interval
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import STATUS_WORDS, ConfigurationResult, VerdictKind

__all__ = [
    "autotune_figure", "bounds_figure", "heat_map_figure", "throughput_figure", "trade_off_figure",
]  # fmt: skip


# Colours, markers, scales and texts that all pictures share.

COLOURS = "viridis"
CHOSEN = "#d55e00"
BOUND = "#555555"
NOT_TIMED = "#eeeeee"
CONTEXT = "#d5d5d5"
STYLE: Any = {
    "font.size": 9, "figure.dpi": 150, "hatch.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
_CAPTION_SIZE, _HEADLINE_SIZE = 7.5, 11
_MARGIN_INCHES = 0.15
# Labels on a horizontal axis are at least this far apart.
_LABEL_INCHES = 0.45
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


def worker_marker(number: int) -> dict[str, Any]:
    """Return the marker of a number of workers in every picture, and its size in points."""
    if number < len(_WORKER_MARKERS):
        return {"marker": _WORKER_MARKERS[number], "ms": 5}
    return {"marker": f"${number}$", "ms": 8}


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
    low, high = axes.get_ylim()
    logarithmic, linear = ticker.LogLocator(subs=(1, 2, 5)), ticker.MaxNLocator(5)
    axes.yaxis.set_major_locator(linear if high < _LINEAR_SPAN * low else logarithmic)
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(visible=True, lw=0.3, alpha=0.5)


def draw_caption(figure: Figure, caption: str) -> None:
    """Write below a figure where its values come from."""
    # Dollars in the name of a label do not begin a formula.
    figure.supxlabel(
        _broken(caption, figure.get_figwidth(), size=_CAPTION_SIZE), x=0.01, ha="left",
        fontsize=_CAPTION_SIZE, color=BOUND, parse_math=False,
    )  # fmt: skip


def _broken(text: str, inches: float, **font: Any) -> str:
    """Return a text with line breaks, at most this wide, less a margin."""
    face = get_font(findfont(FontProperties(**font)))
    face.set_size(font["size"], 72)

    def width(line: str) -> float:
        face.set_text(line)
        return float(face.get_width_height()[0]) / 64 / 72

    lines, n_characters = [text], len(text)
    while n_characters > 1 and max(map(width, lines)) > inches - 2 * _MARGIN_INCHES:
        n_characters -= 1 + n_characters // 20
        lines = textwrap.wrap(text, n_characters)
    return "\n".join(lines)


def _name_ticks(axes: Axes, ticks: Iterable[float], inches: float, unit: float = 1) -> None:
    """Name ticks of a horizontal axis of this width, in their order, where there is room."""
    place = axes.get_xaxis_transform().transform
    left, right = (place((x, 0))[0] for x in axes.get_xlim())
    named = dict[float, float]()
    for tick in ticks:
        at = (place((tick, 0))[0] - left) / (right - left) * inches
        if 0 <= at <= inches and all(abs(at - one) >= _LABEL_INCHES for one in named.values()):
            named[tick] = at
    axes.set_xticks(list(named), [f"{unit * tick:.10g}" for tick in named])
    axes.minorticks_off()


def _timed(result: AutotuneResult) -> list[ConfigurationResult]:
    return [each for each in result.configurations if each.cells_per_second is not None]


def _values(timed: Iterable[ConfigurationResult], name: str) -> list[Any]:
    """Return the values of a setting, in their order."""
    return sorted({each.configuration[name] for each in timed})


def _mixes(result: AutotuneResult, each: ConfigurationResult) -> bool:
    return result.constraints.mixes(each.least_mixed.share_of_random)


def _draw_point(
    axes: Axes, x: float, result: AutotuneResult, each: ConfigurationResult, **look: Any
) -> None:
    """Draw the throughput of a timed configuration; hollow if it mixes too little."""
    if (speed := each.cells_per_second) is not None:
        if not _mixes(result, each):
            look["mfc"] = "white"
        point = axes.errorbar(
            x, speed.value, yerr=around(speed), ls="", elinewidth=0.8,
            **worker_marker(each.configuration.num_workers), **look,
        )  # fmt: skip
        point.lines[0].set_gid(hover(describe(each)))


def _draw_chosen(axes: Axes, x: float, result: AutotuneResult) -> list[Artist]:
    """Draw a ring at the throughput of the recommended configuration; return its key."""
    found = result.recommended
    if found is None or (speed := found.cells_per_second) is None:
        return []
    look: Any = {"ls": "", "marker": "o", "mfc": "none", "color": CHOSEN, "ms": 11, "mew": 2}
    axes.errorbar(x, speed.value, yerr=around(speed), elinewidth=0.8, **look)
    predicted = " (predicted)" if found.basis == "predicted" else ""
    return [Line2D([], [], label=f"recommended{predicted}", **look)]


def _scale_to_timed(axes: Axes, result: AutotuneResult) -> list[Artist]:
    """Scale a vertical axis to all throughputs, and draw the one needed; return its key."""
    speeds = [each.cells_per_second for each in [*_timed(result), result.recommended] if each]
    ends = [end for each in speeds if each for end in (each.low, each.value, each.high)]
    need, keys = result.constraints.need_cells_per_second, list[Artist]()
    if need is not None:
        look: Any = {"color": BOUND, "ls": "-.", "lw": 1}
        keys.append(axes.axhline(need, label=f"needed, {need:,.0f} cells/s", **look))
    drawn = [end for end in [*ends, need or 0.0] if end > 0 and isfinite(end)]
    if drawn:
        axes.set_ylim(min(drawn) / 1.15, max(drawn) * 1.15)
        scale_speeds(axes)
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    if not ends:
        axes.text(0.5, 0.5, "nothing timed", transform=axes.transAxes, ha="center", color=BOUND)
    axes.set_ylabel(f"throughput (cells/s{result.ranks.together})")
    return keys


def _keys(result: AutotuneResult, name: str, colours: Mapping[int, Any]) -> list[Artist]:
    """Return the keys of sizes, of numbers of workers, and of what mixes too little."""
    step = ceil(len(colours) / _MOST_NAMED) or 1
    sizes = list(colours)[::step]
    keys: list[Artist] = [Patch(color=colours[n], label=f"{name} {n}") for n in sizes]
    keys += _worker_keys(timed := _timed(result))
    if not all(_mixes(result, each) for each in timed):
        look: Any = {"ls": "", "color": BOUND, "marker": "o", "mfc": "white"}
        keys.append(Line2D([], [], label="hollow: mixes too little", **look))
    return keys


def _worker_keys(drawn: Iterable[ConfigurationResult], before: str = "") -> list[Artist]:
    labels = {n: f"{before}{workers_in_words(n)}" for n in _values(drawn, "num_workers")}
    look: Any = {"ls": "", "color": BOUND}
    return [Line2D([], [], label=labels[n], **worker_marker(n), **look) for n in labels]


def _panels(
    n: int, most: int, panel: tuple[float, float], frame: tuple[float, float]
) -> tuple[Figure, Any]:
    """Return a figure, and its ``n`` axes in rows of at most so many; sizes are in inches."""
    n_rows = ceil(n / most)
    n_columns = ceil(n / n_rows)
    size = np.array([n_columns, n_rows]) * panel + frame
    figure = Figure(figsize=size.tolist(), layout="constrained")
    rows = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for number, axes in enumerate(rows.flat):
        axes.tick_params(labelbottom=True)
        if number >= n:
            axes.set_axis_off()
    return figure, rows


# A result in one picture.

_TRADE_OFF_INCHES, _KEYS_INCHES = 3.3, 1.9
_MOST_KEYS = 17  # below each other


def autotune_figure(result: AutotuneResult) -> Figure:
    """Draw a result: throughput and entropy over the grid, and their trade-off."""
    panel, high = (3.6, 0.0) if result.ranges else _panel_inches(result)
    width = max(7.5, 2 * panel)
    headline = _broken(_headline(result), width, size=_HEADLINE_SIZE, weight="bold")
    with mpl.rc_context(STYLE):
        size = width, high + _TRADE_OFF_INCHES + 0.5 + 0.2 * len(headline.splitlines())
        figure = Figure(figsize=size, layout="constrained")
        notes, below = "", figure
        if not result.ranges:
            parts: Any = figure.subfigures(2, 1, height_ratios=(high, _TRADE_OFF_INCHES))
            notes, below = _draw_grids(parts[0].subplots(1, 2), result), parts[1]
        keys = _draw_trade_off(below.subplots(), result, inches=width - _KEYS_INCHES - 1)
        below.legend(handles=keys, loc="outside right center", ncols=1 + len(keys) // _MOST_KEYS)
        figure.suptitle(
            headline, x=0.01, ha="left", fontsize=_HEADLINE_SIZE, fontweight="bold",
            parse_math=False,
        )  # fmt: skip
        draw_caption(figure, notes + _caption(result))
    return figure


def _headline(result: AutotuneResult) -> str:
    found, known = result.recommended, result.chosen
    if found is None or known is None:
        wrong = "The loader delivers wrong data, so nothing is recommended"
        return wrong if result.loader_fault else "No configuration is feasible"
    speed, predicted = found.cells_per_second, " (predicted)" if found.basis == "predicted" else ""
    # An interval is not broken.
    how_fast = f"{interval(speed)} cells/s".replace(" ", "\xa0") if speed else "unknown throughput"
    mixed = f"{known.least_mixed.share_of_random:.1%} of random sampling's entropy"
    return (
        f"Recommended: {found.configuration}; {how_fast}{result.ranks.together}{predicted}, {mixed}"
    )


def _caption(result: AutotuneResult) -> str:
    dataset, cpu = result.dataset, result.machine.cpu
    what = f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes, {dataset.layout}"
    if dataset.loader:
        what = f"{dataset.loader}, {dataset.n_cells:,} rows"
    values = "1 value" if dataset.n_labels == 1 else f"{dataset.n_labels} values"
    labels = [f"label {dataset.label} ({values})"]
    labels += [f"{name} ({each.n_labels})" for name, each in dataset.further_labels.items()]
    disks = sorted({storage.file_system or "unknown" for storage in result.machine.storage})
    remote, local = "files on a server", f"{', '.join(disks)}, page cache {result.cache}"
    early = f" Interrupted after {result.seconds:.0f} s." if result.interrupted else ""
    return (
        f"{what}, {', '.join(labels)}, minibatch {dataset.batch_size}; "
        f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, "
        f"{remote if result.cache == 'remote' else local}.{early}"
    )


# Throughput and entropy over the grid.

Quantity = Literal["throughput", "entropy"]
_QUANTITIES: tuple[Quantity, ...] = ("throughput", "entropy")
# Not timed, though they could have been.
_PREDICTED = {"below entropy floor", "too slow", "mixes less", "out of budget", "interrupted"}
# The part of the colour map on which black text can be read: more is darker.
_SHADES, _LIGHTEST, _DARKEST = "Blues", 0.12, 0.55
_HATCH, _HATCH_COLOUR = "//", "#b8b8b8"
# Of a square, of what is around the squares of a panel, and of a panel at least.
_SQUARE_INCHES, _FRAME_INCHES, _LEAST_INCHES = (0.74, 0.42), (0.75, 0.75), (3.6, 1.6)
_GRID = "block_size", "fetch_factor"


def heat_map_figure(result: AutotuneResult, quantities: Sequence[Quantity] = _QUANTITIES) -> Figure:
    """Draw throughput and entropy over block sizes and fetch factors, or only one of them."""
    width, height = _panel_inches(result)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width * len(quantities), height + 0.3), layout="constrained")
        panels = figure.subplots(1, len(quantities), squeeze=False).flat
        draw_caption(figure, _draw_grids(panels, result, quantities))
    return figure


def _draw_grids(
    panels: Iterable[Axes], result: AutotuneResult, quantities: Sequence[Quantity] = _QUANTITIES
) -> str:
    """Draw quantities over block sizes and fetch factors; return what a caption has to say."""
    notes = list[str]()
    for axes, quantity in zip(panels, quantities, strict=True):
        notes += _draw_grid(axes, result, quantity)
        of = f"cells/s{result.ranks.together}" if quantity == "throughput" else "share of random"
        axes.set_title(f"{quantity.capitalize()} ({of})")
    if "entropy" in quantities and result.dataset.further_labels:
        notes.append("Entropy: of the label mixed least")
    return "".join(f"{note}. " for note in dict.fromkeys(notes))


def _draw_grid(axes: Axes, result: AutotuneResult, quantity: Quantity) -> list[str]:
    """Draw squares from light (the lowest value) to dark; return what a caption has to say.

    A square is of the recommended configuration, else of the fastest or the best mixed.
    """

    def value(each: ConfigurationResult) -> float | None:
        if quantity == "entropy":
            return each.least_mixed.share_of_random
        return log(each.cells_per_second.value) if each.cells_per_second else None

    def is_coloured(each: ConfigurationResult) -> bool:
        return _mixes(result, each) if quantity == "entropy" else each.cells_per_second is not None

    ranked = sorted(
        result.configurations,
        key=lambda one: (one is result.chosen, value(one) or 0.0, one.status in _PREDICTED),
    )
    shown = {tuple(each.configuration[name] for name in _GRID): each for each in ranked}
    values = [value(each) or 0.0 for each in shown.values() if is_coloured(each)]
    low, span = min(values, default=0.0), max(np.ptp(values or [0.0]), 1e-9)
    block_sizes, fetch_factors = (_values(result.configurations, name) for name in _GRID)
    notes, write = list[str](), partial(axes.text, ha="center", va="center", fontsize=7)
    for row, column in np.ndindex(len(block_sizes), len(fetch_factors)):
        each = shown.get((block_sizes[row], fetch_factors[column]))
        if each is None:
            write(column, row, "\N{EN DASH}", color=BOUND)
            notes.append("\N{EN DASH}: not in the grid")
            continue
        ground: Any = "white" if quantity == "entropy" else NOT_TIMED
        if is_coloured(each):
            shade = ((value(each) or 0.0) - low) / span
            ground = mpl.colormaps[_SHADES](_LIGHTEST + shade * (_DARKEST - _LIGHTEST))
        elif quantity == "throughput":
            notes.append("Grey: not timed")
        square = partial(Rectangle, (column - 0.5, row - 0.5), 1, 1)
        words = hover(describe(each, result.predicted(each)))
        axes.add_patch(square(fc=ground, ec="white", lw=1, gid=words))
        if not _mixes(result, each):
            axes.add_patch(square(fill=False, ec=_HATCH_COLOUR, lw=0, hatch=_HATCH))
            notes.append(f"Hatched: entropy below {100 * result.constraints.entropy_floor:.4g}%")
        text = _in_square(result, each, quantity)
        notes += ["~: predicted"] if text.startswith("~") else []
        weight = "bold" if each is result.chosen else "normal"
        write(column, row, text, color="black" if is_coloured(each) else BOUND, fontweight=weight)
        if each is result.chosen:
            frame = Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, fill=False, zorder=2)
            frame.set(edgecolor=CHOSEN, linewidth=2.5)
            axes.add_patch(frame)
            notes.append("Framed: recommended")
    axes.set_xlim(-0.5, len(fetch_factors) - 0.5)
    axes.set_ylim(-0.5, len(block_sizes) - 0.5)
    axes.set_xticks(range(len(fetch_factors)), list(map(str, fetch_factors)))
    axes.set_yticks(range(len(block_sizes)), list(map(str, block_sizes)))
    axes.set(xlabel="fetch factor (minibatches)", ylabel="block size (cells)")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return notes


def _in_square(result: AutotuneResult, each: ConfigurationResult, quantity: Quantity) -> str:
    """Return the entropy, or the throughput, timed or predicted, else why it was not timed."""
    if quantity == "entropy":
        return f"{each.least_mixed.share_of_random:.1%}"
    speed, predicted = each.cells_per_second, result.predicted(each)
    if speed is not None:
        return f"{_short(speed.value)}\n{workers_in_words(each.configuration.num_workers)}"
    if each.status in _PREDICTED and predicted:
        return f"~{_short(predicted.value, digits=0)}"
    return "\n".join(STATUS_WORDS[each.status].short.rsplit(" ", 1))


def _short(speed: float, digits: int = 1) -> str:
    return f"{speed / 1000:,.{digits}f}k" if speed >= 1000 else f"{speed:.0f}"  # noqa: PLR2004 - a kilo


def describe(each: ConfigurationResult, predicted: Estimate | None = None) -> str:
    """Return one line about a configuration, to be shown on hover."""
    bits, speed = each.entropy_bits, STATUS_WORDS[each.status].listed
    if each.cells_per_second is not None:
        speed = f"{interval(each.cells_per_second)} cells/s"
    elif predicted is not None:
        speed += f", predicted {interval(predicted)} cells/s"
    shares = f"{bits.expected.value:.3f} bits, {bits.share_of_random:.1%} of random sampling"
    return f"{each.configuration}: {speed}; {shares}"


def _panel_inches(result: AutotuneResult) -> tuple[float, float]:
    """Return the width and height of a panel of the grid."""
    n_rows, n_columns = (len(_values(result.configurations, name)) for name in _GRID)
    inches = _SQUARE_INCHES * np.array([n_columns, n_rows]) + _FRAME_INCHES
    width, height = np.maximum(inches, _LEAST_INCHES).tolist()
    return width, height


# The trade-off between throughput and entropy.

# Shares of random sampling's entropy are drawn over their distance from 1: linear below this one,
# logarithmic above, since what is worth choosing lies within a few percent of 1.
_LINEAR_DISTANCE = 0.002
_LEAST_SHOWN = 0.98
# Those to be named, in percent, the most important first.
_PERCENT = (100, 99, 95, 90, 98, 99.5, 50, 80, 99.9, 0)


def trade_off_figure(result: AutotuneResult, *, caption: str = "") -> Figure:
    """Draw throughput against entropy, their Pareto front, and the recommended point."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 4.9), layout="constrained")
        keys = _draw_trade_off(figure.subplots(), result, inches=4.3)
        figure.legend(handles=keys, loc="outside lower left", ncols=3)
        draw_caption(figure, caption)
    return figure


def _draw_trade_off(axes: Axes, result: AutotuneResult, *, inches: float) -> list[Artist]:
    """Draw the timed configurations and their Pareto front in axes this wide; return the keys."""
    timed, chosen = _timed(result), result.chosen
    colours = block_colours(_values(timed, "block_size"))
    shares = [floor := result.constraints.entropy_floor]
    for each in timed:
        bits, unit = each.least_mixed, each.least_mixed.random_alike or 1.0
        bars = around(bits.expected, unit=unit)
        look: Any = {"color": colours[each.configuration.block_size], "xerr": bars}
        _draw_point(axes, bits.share_of_random, result, each, **look)
        shares += [bits.share_of_random, bits.share_of_random + (bars[1][0] if bars else 0.0)]
    keys = list[Artist]()
    if chosen is not None:
        shares.append(chosen.least_mixed.share_of_random)
        keys += _draw_chosen(axes, chosen.least_mixed.share_of_random, result)
    keys += _scale_to_timed(axes, result)
    look = {"color": BOUND, "ls": "--", "lw": 1}
    keys.append(axes.axvline(floor, label=f"entropy floor, {100 * floor:.4g}%", **look))
    front = [
        (each.least_mixed.share_of_random, each.cells_per_second.value)
        for each in result.pareto_front()
        if each.cells_per_second is not None
    ]
    if len(front) > 1:
        look = {"color": BOUND, "lw": 2.5, "alpha": 0.4, "zorder": 0}
        keys += axes.step(*zip(*front, strict=True), where="post", label="Pareto front", **look)
    axes.set_title("Trade-off (better: up and right)")
    of = " of the label mixed least" if result.dataset.further_labels else ""
    axes.set_xlabel(f"entropy{of} (% of random sampling)")
    _scale_shares(axes, shares, inches)
    return keys + _keys(result, "block size", colours)


def _scale_shares(axes: Axes, shares: Sequence[float], inches: float) -> None:
    """Scale a horizontal axis of shares so that those near 1 can be told apart."""
    axes.set_xscale(
        "function",
        functions=(
            lambda share: -np.arcsinh((1 - share) / _LINEAR_DISTANCE),
            lambda place: 1 + _LINEAR_DISTANCE * np.sinh(place),
        ),
    )
    scale = axes.xaxis.get_transform()
    ends = scale.transform([min(_LEAST_SHOWN, *shares), max(1.0, *shares)])
    wider = ends + np.array([-0.05, 0.05]) * np.ptp(ends)
    axes.set_xlim(*scale.inverted().transform(wider).tolist())
    _name_ticks(axes, [each / 100 for each in _PERCENT], inches, unit=100)


# Throughput over the block size.


def throughput_figure(result: AutotuneResult) -> Figure:
    """Draw throughput over the fetch factor, with a line per block size (the paper's Figure 2).

    There is a panel for each number of workers that was timed.
    """
    timed = sorted(_timed(result), key=lambda each: each.configuration)
    block_sizes, factors = (_values(timed, name) or [1] for name in _GRID)
    colours = block_colours(block_sizes)
    workers = _values(timed, "num_workers") or [0]
    keys, chosen = list[Artist](), result.chosen
    with mpl.rc_context(STYLE):
        figure, rows = _panels(len(workers), 3, (3.4, 3.0), (_KEYS_INCHES, 0.6))
        for axes, number in zip(rows.flat, workers, strict=False):
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
            needed = _scale_to_timed(axes, result)
            axes.set_title(workers_in_words(number))
            axes.set_xlabel("fetch factor (minibatches)")
        for axes in rows[:, 1:].flat:
            axes.set_ylabel("")
        rows[0, 0].set_xscale("log", base=2)
        rows[0, 0].set_xlim(0.7 * factors[0], 1.4 * factors[-1])
        _name_ticks(rows[0, 0], factors, inches=2.8)
        keys += [*needed, *_keys(result, "block size", colours if timed else {})]
        figure.legend(handles=keys, loc="outside right upper")
        draw_caption(figure, _caption(result))
    return figure


# Measured entropy against the plan, the exact expectation and the paper's bounds.

REPLAYED: Any = {"color": "black", "ls": "", "marker": "x", "ms": 5, "elinewidth": 1, "capsize": 2}
UPPER: Any = {"color": BOUND, "ls": "--", "lw": 1}
LOWER: Any = {"color": BOUND, "ls": ":", "lw": 1.5}
_BETWEEN_BOUNDS = "#f3f3f3"
# Measured values are drawn right of their fetch factor, side by side for each number of workers.
_FIRST_STEP, _STEPS = 0.2, 0.6
# By the kind of the verdict; None where there is none. From the palette of Okabe and Ito.
_VERDICT_COLOURS: dict[VerdictKind | None, str] = {
    "inside": "black", "outside": "#e69f00", "assumptions": "#56b4e9", "loader": "#c1121f",
    None: "#aaaaaa",
}  # fmt: skip


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


def scale_fetch_factors(axes: Axes, factors: Sequence[int]) -> None:
    """Scale the horizontal axis and those that share it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [str(factor) for factor in factors])
    axes.minorticks_off()


def title_of_block(block_size: int) -> str:
    """Return the title of the axes of one block size."""
    return f"{block_size} cell{'s' if block_size > 1 else ''} per block"


def bounds_figure(result: AutotuneResult) -> Figure:
    """Draw entropy over the fetch factor for each block size, with the theory."""
    factors = _values(result.configurations, "fetch_factor")
    parts = dict[int, list[ConfigurationResult]]()
    exact = dict[int, dict[int, float]]()
    for each in sorted(result.configurations, key=lambda each: each.configuration):
        size, factor = each.configuration.block_size, each.configuration.fetch_factor
        parts.setdefault(size, []).append(each)
        if each.entropy_bits.homogeneous is not None:
            exact.setdefault(size, {})[factor] = each.entropy_bits.homogeneous
    colours = block_colours(list(parts))
    width = max(1.7, 5.5 / len(parts))
    with mpl.rc_context(STYLE):
        figure, rows = _panels(len(parts), 6, (width, 2.6), (0.9, 1.6))
        for axes, (block_size, part) in zip(rows.flat, parts.items(), strict=False):
            for line in exact.values():
                axes.plot(list(line), list(line.values()), color=CONTEXT, lw=0.8)
            bounds = part[0].entropy_bits
            if bounds.upper_bound > 0:
                draw_bounds(axes, bounds.lower_bound, bounds.upper_bound)
            line = exact.get(block_size, {})
            axes.plot(list(line), list(line.values()), color=colours[block_size], lw=2)
            workers = _values(part, "num_workers")
            for each in part:
                factor, number = each.configuration.fetch_factor, each.configuration.num_workers
                bits, measured = each.entropy_bits.expected, each.entropy_bits.measured
                axes.errorbar(factor, bits.value, yerr=around(bits), **REPLAYED)
                if measured is not None:
                    place = factor * 2 ** (
                        _FIRST_STEP + _STEPS * workers.index(number) / len(workers)
                    )
                    axes.errorbar(
                        place, measured.value, yerr=around(measured), ls="",
                        color=_VERDICT_COLOURS[_kind(each)], **worker_marker(number),
                    )  # fmt: skip
            axes.set_title(title_of_block(block_size))
            axes.set_xlabel("fetch factor\n(minibatches)")
        for axes in rows[:, 0]:
            axes.set_ylabel("minibatch label entropy (bits)")
        scale_fetch_factors(rows[0, 0], factors)
        _name_ticks(rows[0, 0], factors, inches=width - 0.3)
        figure.legend(handles=_bounds_keys(result), loc="outside lower left", ncols=2)
    return figure


def _kind(each: ConfigurationResult) -> VerdictKind | None:
    return each.verdict.kind if each.verdict else None


def _bounds_keys(result: AutotuneResult) -> list[Artist]:
    """Return the keys of all lines and marks, with grey for those of any colour."""
    measured = [each for each in result.configurations if each.entropy_bits.measured is not None]
    keys: list[Artist] = [
        Line2D([], [], lw=2, color=BOUND, label="exact, if each block had one label"),
        Line2D([], [], color="black", ls="", marker="x", label="plan replayed over the labels"),
    ]
    if any(each.entropy_bits.upper_bound > 0 for each in result.configurations):
        keys.append(Line2D([], [], **UPPER, label="upper bound"))
        keys.append(Line2D([], [], **LOWER, label="lower bound of this block size"))
    keys += _worker_keys(measured, "measured, ")
    kinds = set(map(_kind, measured))
    for kind, colour in _VERDICT_COLOURS.items():
        if kind in kinds:
            keys.append(Patch(color=colour, label=f"verdict: {kind}" if kind else "not judged"))
    return keys
