"""The pictures of a result.

Each block size has the same colour in all pictures but the grids, from dark (small) to light
(large), on a colour-blind-safe map. Intervals are drawn wherever there are any.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from math import ceil, isfinite, log
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from cellfeed_tuner._configuration import workers_in_words
from cellfeed_tuner._interval import Estimate, interval
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import STATUS_WORDS, ConfigurationResult

__all__ = ["autotune_figure", "bounds_figure", "heat_map_figure", "trade_off_figure"]


# Colours, scales and captions that all pictures share.

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


# Throughput and entropy over the grid.

Quantity = Literal["throughput", "entropy"]
_Place = tuple[int, int]
# Not timed, though they could have been.
_PREDICTED = {"below entropy floor", "too slow", "mixes less", "out of budget"}
# What is slower than this share of the fastest has the lightest colour.
_LIGHTEST_SHARE = 0.25
# The part of the colour map on which black text can be read: more is darker.
_SHADES, _LIGHTEST, _DARKEST = "Blues", 0.2, 0.55
_HATCH, _HATCH_COLOUR = "////", "#d8d8d8"  # below the entropy floor


class _Square(NamedTuple):
    """A square of the grid; its shade is 0 to 1, from light to dark, or None for grey.

    It is hatched if it mixes too little.
    """

    shade: float | None
    text: str
    hover: str
    is_hatched: bool = False


def heat_map_figure(
    result: AutotuneResult, quantities: tuple[Quantity, ...] = ("throughput", "entropy")
) -> Figure:
    """Draw throughput and entropy over block sizes and fetch factors.

    Parameters
    ----------
    result
        What ``autotune`` found.
    quantities
        What to draw, side by side.
    """
    block_sizes, fetch_factors = _sizes(result)
    width = 1.2 + 0.75 * max(4, len(fetch_factors))
    size = width * len(quantities), 1.2 + 0.55 * len(block_sizes)
    draw = {"throughput": draw_throughput, "entropy": draw_entropy}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(quantities), squeeze=False)[0]
        for quantity, axes in zip(quantities, panels, strict=True):
            draw[quantity](axes, result)
    return figure


def draw_throughput(axes: Axes, result: AutotuneResult) -> None:
    """Draw the throughput of the fastest configuration at each place of the grid.

    Where none was timed, the predicted throughput, else the status.
    """
    squares = dict[_Place, _Square]()
    shown = _best(result, lambda each: each.cells_per_second.value if each.cells_per_second else 0)
    best = max(
        each.cells_per_second.value if each.cells_per_second else 0 for each in shown.values()
    )
    notes = list[str]()
    for place, each in shown.items():
        words = describe(each)
        if each.cells_per_second is not None:
            speed = each.cells_per_second.value
            workers = workers_in_words(each.configuration.num_workers)
            text = f"{_short(speed)}\n{workers}"
            shade = max(0.0, 1 - log(speed / best) / log(_LIGHTEST_SHARE))
            squares[place] = _Square(shade, text, words)
            continue
        predicted = result.predicted(each)
        if each.status in _PREDICTED and predicted:
            words += f"; predicted {interval(predicted)} cells/s"
            is_hatched = each.status == "below entropy floor"
            text = f"~{_short(predicted.value, digits=0)}"
            squares[place] = _Square(None, text, words, is_hatched)
        else:
            status = STATUS_WORDS[each.status].short
            squares[place] = _Square(None, "\n".join(status.rsplit(" ", 1)), words)
    if any(each.text[0] == "~" for each in squares.values()):
        notes.append("~ predicted")
    if any(each.is_hatched for each in squares.values()):
        notes.append("hatched: mixes too little")
    axes.set_title("; ".join(["Cells/s", *notes]))
    _draw_grid(axes, result, squares)


def draw_entropy(axes: Axes, result: AutotuneResult) -> None:
    """Draw the expected entropy of the best mixed configuration at each place of the grid.

    As a share of random sampling's; of several labels, that of the label mixed least. Colours begin
    at the floor.
    """
    shown = _best(result, lambda each: each.least_mixed.share_of_random)
    shares = {place: each.least_mixed.share_of_random for place, each in shown.items()}
    reaching = [share for share in shares.values() if result.constraints.mixes(share)]
    low, high = min(reaching, default=0.0), max(reaching, default=1.0)
    squares = dict[_Place, _Square]()
    for place, each in shown.items():
        share = shares[place]
        squares[place] = _Square(
            (share - low) / max(high - low, 1e-9) if share >= low or not reaching else None,
            f"{share:.1%}",
            describe(each),
        )
    below = f"; grey: below {result.constraints.entropy_floor:.0%}" if reaching else ""
    of = ", label mixed least" if result.dataset.further_labels else ""
    axes.set_title(f"Entropy (share of random){of}{below}")
    _draw_grid(axes, result, squares)


def describe(each: ConfigurationResult) -> str:
    """Return one line about a configuration, to be shown on hover."""
    bits = each.entropy_bits
    speed = STATUS_WORDS[each.status].listed
    if each.cells_per_second is not None:
        speed = f"{interval(each.cells_per_second)} cells/s"
    return (
        f"{each.configuration}: {speed}; {bits.expected.value:.3f} bits, "
        f"{bits.share_of_random:.1%} of random sampling"
    )


def _short(speed: float, digits: int = 1) -> str:
    return f"{speed / 1000:.{digits}f}k" if speed >= 1000 else f"{speed:.0f}"  # noqa: PLR2004 - a kilo


def _best(
    result: AutotuneResult, value: Callable[[ConfigurationResult], float]
) -> dict[_Place, ConfigurationResult]:
    """Return the configuration with the highest value at each block size and fetch factor."""
    best = dict[_Place, ConfigurationResult]()
    for each in result.configurations:
        place = each.configuration.block_size, each.configuration.fetch_factor
        best[place] = max(best.get(place, each), each, key=value)
    return best


def _draw_grid(axes: Axes, result: AutotuneResult, squares: Mapping[_Place, _Square]) -> None:
    block_sizes, fetch_factors = _sizes(result)
    colours = mpl.colormaps[_SHADES]
    chosen = result.recommended.configuration if result.recommended is not None else None
    for (block_size, fetch_factor), square in squares.items():
        row, column = block_sizes.index(block_size), fetch_factors.index(fetch_factor)
        ground: Any = NOT_TIMED
        if square.shade is not None:
            ground = colours(_LIGHTEST + square.shade * (_DARKEST - _LIGHTEST))
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fc=ground, ec="white", lw=1,
                gid=hover(square.hover),
            )
        )  # fmt: skip
        if square.is_hatched:
            axes.add_patch(
                Rectangle(
                    (column - 0.5, row - 0.5), 1, 1, fill=False, ec=_HATCH_COLOUR, lw=0,
                    hatch=_HATCH,
                )
            )  # fmt: skip
        is_chosen = chosen is not None and (
            (block_size, fetch_factor) == (chosen.block_size, chosen.fetch_factor)
        )
        axes.text(
            column, row, square.text, ha="center", va="center",
            color=BOUND if square.shade is None else "black",
            fontsize=7 if square.shade is None or is_chosen else 8,
            fontweight="bold" if is_chosen else None,
        )  # fmt: skip
    if chosen is not None:
        corner = (
            fetch_factors.index(chosen.fetch_factor) - 0.48,
            block_sizes.index(chosen.block_size) - 0.48,
        )
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, ec=CHOSEN, lw=2.5))
    axes.set_xlim(-0.5, len(fetch_factors) - 0.5)
    axes.set_ylim(-0.5, len(block_sizes) - 0.5)
    axes.set_xticks(range(len(fetch_factors)), [str(factor) for factor in fetch_factors])
    axes.set_yticks(range(len(block_sizes)), [str(size) for size in block_sizes])
    axes.set(xlabel="fetch factor (minibatches)", ylabel="block size (cells)")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _sizes(result: AutotuneResult) -> tuple[list[int], list[int]]:
    """Return the block sizes and the fetch factors of the grid."""
    settings = [each.configuration for each in result.configurations]
    block_sizes = sorted({each.block_size for each in settings})
    fetch_factors = sorted({each.fetch_factor for each in settings})
    return block_sizes, fetch_factors


# A result in one picture, and the trade-off between throughput and entropy in its own.

# The legend names at most this many block sizes.
_MOST_NAMED = 10
# Shares of random sampling's entropy are drawn over their distance from 1: linear below this one,
# logarithmic above, since what is worth choosing lies within a few percent of 1.
_LINEAR_DISTANCE = 0.002
_SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
_LEAST_SHOWN = 0.98
_WORKER_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def autotune_figure(result: AutotuneResult) -> Figure:
    """Draw a result: throughput and entropy over the grid, and their trade-off."""
    with mpl.rc_context(STYLE):
        if result.ranges is None:
            figure = Figure(figsize=(14.5, 4.9), layout="constrained")
            speeds, entropies, trade_off = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
            draw_throughput(speeds, result)
            draw_entropy(entropies, result)
        else:  # no grid
            figure = Figure(figsize=(9.5, 4.9), layout="constrained")
            trade_off = figure.subplots()
        _draw_trade_off(trade_off, result)
        trade_off.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        figure.suptitle(_headline(result), x=0.01, ha="left", fontsize=12, fontweight="bold")
        draw_caption(figure, _caption(result))
    return figure


def trade_off_figure(result: AutotuneResult, *, caption: str = "") -> Figure:
    """Draw throughput against entropy, their Pareto front, and the recommended point."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 4.8), layout="constrained")
        axes = figure.subplots()
        _draw_trade_off(axes, result)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=8, ncols=3)
        draw_caption(figure, caption)
    return figure


def _draw_trade_off(axes: Axes, result: AutotuneResult) -> None:
    """Draw the measured configurations and their Pareto front, without a legend."""
    timed = [each for each in result.configurations if each.cells_per_second is not None]
    block_sizes = sorted({each.configuration.block_size for each in timed})
    workers = sorted({each.configuration.num_workers for each in timed})
    colours = block_colours(block_sizes)
    for each in result.configurations:
        speed = each.cells_per_second
        if speed is None:
            continue
        point = axes.errorbar(
            each.least_mixed.share_of_random,
            speed.value,
            xerr=around(each.least_mixed.expected, unit=each.least_mixed.random_alike or 1.0),
            yerr=around(speed),
            fmt=_marker(workers, each.configuration.num_workers),
            color=colours[each.configuration.block_size],
            ms=5,
            lw=1,
        )
        point.lines[0].set_gid(hover(describe(each)))
    front = [
        (each.least_mixed.share_of_random, each.cells_per_second.value)
        for each in result.pareto_front()
        if each.cells_per_second is not None
    ]
    if front:
        axes.step(
            *zip(*front, strict=True), where="post", color=BOUND, lw=2.5, alpha=0.5, zorder=0,
            label="Pareto front",
        )  # fmt: skip
    floor = result.constraints.entropy_floor
    axes.axvline(floor, color=BOUND, ls="--", lw=1, label=f"entropy floor, {floor:.4g}")
    chosen, recommended = result.chosen, result.recommended
    if chosen is not None and recommended is not None and recommended.cells_per_second is not None:
        share, speed = chosen.least_mixed.share_of_random, recommended.cells_per_second
        axes.errorbar(
            share, speed.value, yerr=around(speed), fmt="o", mfc="none", mec=CHOSEN, ecolor=CHOSEN,
            ms=13, mew=2,
        )  # fmt: skip
        axes.plot([], [], "o", mfc="none", mec=CHOSEN, ms=9, mew=2, label="recommended")
    axes.set_title("Trade-off, with 95 % intervals; better up and right")
    of = "entropy of the label mixed least" if result.dataset.further_labels else "entropy"
    axes.set(
        xlabel=f"{of}, as a share of random sampling (stretched near 1)",
        ylabel="throughput (cells/s)",
    )
    _scale_shares(axes)
    scale_speeds(axes)
    axes.yaxis.set_minor_locator(NullLocator())
    for size in block_sizes[:: ceil(len(block_sizes) / _MOST_NAMED) or 1]:
        axes.plot([], [], "o", color=colours[size], label=f"block size {size}")
    for number in workers:
        axes.plot([], [], _marker(workers, number), color=BOUND, label=workers_in_words(number))


def _scale_shares(axes: Axes) -> None:
    """Scale a horizontal axis of shares so that those near 1 can be told apart."""
    low, high = axes.get_xlim()
    low = min(low, _LEAST_SHOWN)
    axes.set_xscale(
        "function",
        functions=(
            lambda share: -np.arcsinh((1 - share) / _LINEAR_DISTANCE),
            lambda place: 1 + _LINEAR_DISTANCE * np.sinh(place),
        ),
    )
    axes.set_xlim(low, max(high, 1 + _LINEAR_DISTANCE))
    axes.set_xticks([share for share in _SHARES if share >= low])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _marker(workers: Sequence[int], number: int) -> str:
    return _WORKER_MARKERS[workers.index(number) % len(_WORKER_MARKERS)]


def _headline(result: AutotuneResult) -> str:
    if result.recommended is None or result.chosen is None:
        wrong = "the loader delivers wrong data, so nothing is recommended"
        return f"autotune: {wrong if result.loader_fault else 'no configuration is feasible'}"
    chosen, speed = result.recommended.configuration, result.recommended.cells_per_second
    if speed is None:
        return f"Recommended: {chosen} (predicted; its throughput is unknown)"
    predicted = " (predicted)" if result.recommended.basis == "predicted" else ""
    mixed = f"{result.chosen.least_mixed.share_of_random:.1%} of random sampling's entropy"
    return f"Recommended: {chosen}; {interval(speed)} cells/s{predicted}, {mixed}"


def _caption(result: AutotuneResult) -> str:
    dataset, cpu = result.dataset, result.machine.cpu
    what = f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes, {dataset.layout}"
    if dataset.loader:
        what = f"{dataset.loader}, {dataset.n_cells:,} rows"
    labels = [f"label {dataset.label} ({dataset.n_labels} values)"]
    labels += [f"{name} ({each.n_labels})" for name, each in dataset.further_labels.items()]
    disks = sorted({storage.file_system or "unknown" for storage in result.machine.storage})
    where = f"{', '.join(disks)}, page cache {result.cache}"
    if result.cache == "remote":
        where = "files on a server"
    return (
        f"{what}, {', '.join(labels)}, minibatch {dataset.batch_size}; "
        f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, {where}"
    )


# Measured entropy against the plan, the exact expectation and the paper's bounds.

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
        if bits is not None:
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
        if each.cells_per_second is not None
    }
    for kind, style in _MARKS.items():
        if kind in found:
            label = f"measured, verdict: {kind}" if kind else "measured, not judged"
            marks[label] = axes.errorbar([], [], [], **_MEASURED, **style)
    figure.legend(list(marks.values()), list(marks), loc="outside upper left", ncols=3)
