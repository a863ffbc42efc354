"""Throughput and entropy over the grid."""

from collections.abc import Callable, Mapping
from math import log, nan

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS, ConfigurationResult
from cellfeed_tuner.plots._style import BOUND, CHOSEN, COLOURS, NOT_TIMED, STYLE

__all__ = ["draw_entropy", "draw_throughput", "heat_map_figure"]

_Place = tuple[int, int]


def heat_map_figure(result: AutotuneResult) -> Figure:
    """Draw throughput and entropy over block sizes and fetch factors."""
    block_sizes, fetch_factors = _sizes(result)
    size = 2 * (1.2 + 0.75 * max(4, len(fetch_factors))), 1.2 + 0.55 * len(block_sizes)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        speed_axes, entropy_axes = figure.subplots(1, 2)
        draw_throughput(speed_axes, result)
        draw_entropy(entropy_axes, result)
    return figure


def draw_throughput(axes: Axes, result: AutotuneResult) -> None:
    """Draw the throughput of the fastest at each place of the grid."""
    shown = _best(result, _speed)
    squares = dict[_Place, tuple[float, str]]()
    for place, each in shown.items():
        speed, workers = _speed(each), each.configuration.num_workers
        short = f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"  # noqa: PLR2004 - a kilo
        text = f"{short}{'*' * each.has_few_rounds}\n{workers} w"
        status = "\n".join(STATUS_WORDS[each.status].short.rsplit(" ", 1))
        squares[place] = (log(speed), text) if speed else (nan, status)
    few = "; * few rounds" if any(each.has_few_rounds for each in shown.values()) else ""
    has_others = any(each.configuration.others for each in shown.values())
    best = "best workers (w) and other settings" if has_others else "best workers (w)"
    axes.set_title(f"Throughput (cells/s), {best}{few}")
    _draw_grid(axes, result, squares)


def draw_entropy(axes: Axes, result: AutotuneResult) -> None:
    """Draw the expected entropy at each place of the grid, of what is best mixed there.

    In bits, that of the first label; as a share of random sampling's, that of the least mixed.
    """
    shown = _best(result, lambda each: each.least_mixed.share_of_random)
    squares = dict[_Place, tuple[float, str]]()
    for place, each in shown.items():
        share = each.least_mixed.share_of_random
        squares[place] = share, f"{each.entropy_bits.expected.value:.2f}\n{share:.0%}"
    title = "Entropy (bits), share of random"
    if result.dataset.further_labels:
        title = f"Entropy of {result.dataset.label} (bits),\nleast label's share of random"
    axes.set_title(title, parse_math=False)
    _draw_grid(axes, result, squares)


def _best(
    result: AutotuneResult, value: Callable[[ConfigurationResult], float]
) -> dict[_Place, ConfigurationResult]:
    """Return what has the highest value of each block size and fetch factor."""
    best = dict[_Place, ConfigurationResult]()
    for each in result.configurations:
        place = each.configuration.block_size, each.configuration.fetch_factor
        best[place] = max(best.get(place, each), each, key=value)
    return best


def _draw_grid(
    axes: Axes, result: AutotuneResult, squares: Mapping[_Place, tuple[float, str]]
) -> None:
    """Draw squares of values, NaN where there is none, and texts."""
    block_sizes, fetch_factors = _sizes(result)
    values = np.array(
        [[squares.get((size, factor), (nan, ""))[0] for factor in fetch_factors]
         for size in block_sizes]
    )  # fmt: skip
    if not np.isnan(values).all():
        low, high = np.nanmin(values), np.nanmax(values)
        values = (values - low) / max(high - low, 1e-9)
    axes.pcolormesh(
        np.arange(len(fetch_factors) + 1) - 0.5,
        np.arange(len(block_sizes) + 1) - 0.5,
        values,
        cmap=mpl.colormaps[COLOURS].with_extremes(bad=NOT_TIMED),
        vmin=0,
        vmax=1,
        edgecolors="white",
        linewidth=1,
    )
    for (block_size, fetch_factor), (_, text) in squares.items():
        row, column = block_sizes.index(block_size), fetch_factors.index(fetch_factor)
        shade = values[row, column]
        colour = BOUND if np.isnan(shade) else "white" if shade < 0.6 else "black"  # noqa: PLR2004 - of the colour map
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    if result.recommended is not None:
        chosen = result.recommended.configuration
        corner = (
            fetch_factors.index(chosen.fetch_factor) - 0.48,
            block_sizes.index(chosen.block_size) - 0.48,
        )
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, ec=CHOSEN, lw=2.5))
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


def _speed(result: ConfigurationResult) -> float:
    return result.cells_per_second.value if result.cells_per_second else 0.0
