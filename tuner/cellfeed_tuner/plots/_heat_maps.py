"""Throughput and entropy over the grid."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS, ConfigurationResult
from cellfeed_tuner.plots._style import BOUND, CHOSEN, COLOURS, NOT_TIMED, STYLE

__all__ = ["draw_entropy", "draw_throughput", "heat_map_figure"]

_Place = tuple[int, int]


def heat_map_figure(result: AutotuneResult) -> Figure:
    """Draw throughput and entropy over block sizes and fetch factors."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_figure_size(result), layout="constrained")
        speed_axes, entropy_axes = figure.subplots(1, 2)
        draw_throughput(speed_axes, result)
        draw_entropy(entropy_axes, result)
    return figure


def _figure_size(result: AutotuneResult) -> tuple[float, float]:
    block_sizes, fetch_factors = _sizes(result)
    return 2 * (1.2 + 0.75 * max(4, len(fetch_factors))), 1.2 + 0.55 * len(block_sizes)


def draw_throughput(axes: Axes, result: AutotuneResult) -> None:
    """Draw the throughput of the fastest at each place of the grid."""
    shown = {
        place: max(found, key=_speed) for place, found in _by_place(result.configurations).items()
    }
    timed = {place: each for place, each in shown.items() if _speed(each)}
    values = {place: _speed(each) for place, each in timed.items()}
    texts = {
        place: f"{_short(_speed(each))}{'*' * each.has_few_rounds}\n"
        f"{each.configuration.num_workers} w"
        if place in timed
        else _in_square(STATUS_WORDS[each.status].short)
        for place, each in shown.items()
    }
    few = "; * few rounds" if any(each.has_few_rounds for each in timed.values()) else ""
    has_others = any(each.configuration.others for each in shown.values())
    best = "best workers (w) and other settings" if has_others else "best workers (w)"
    axes.set_title(f"Throughput (cells/s), {best}{few}")
    _draw_grid(axes, result, values, texts, logarithmic=True)


def draw_entropy(axes: Axes, result: AutotuneResult) -> None:
    """Draw the expected entropy at each place of the grid, of what is best mixed there.

    In bits, that of the first label; as a share of random sampling's, that of the least mixed.
    """
    shown = {
        place: max(found, key=lambda each: each.least_mixed.share_of_random)
        for place, found in _by_place(result.configurations).items()
    }
    values = {place: each.least_mixed.share_of_random for place, each in shown.items()}
    texts = {
        place: f"{each.entropy_bits.expected.value:.2f}\n{values[place]:.0%}"
        for place, each in shown.items()
    }
    title = "Entropy (bits), share of random"
    if result.dataset.further_labels:
        title = f"Entropy of {result.dataset.label} (bits),\nleast label's share of random"
    axes.set_title(title, parse_math=False)
    _draw_grid(axes, result, values, texts, logarithmic=False)


def _by_place(results: Sequence[ConfigurationResult]) -> dict[_Place, list[ConfigurationResult]]:
    """Return results by block size and fetch factor, of which workers and other settings differ."""
    places = dict[_Place, list[ConfigurationResult]]()
    for each in results:
        place = each.configuration.block_size, each.configuration.fetch_factor
        places.setdefault(place, []).append(each)
    return places


def _draw_grid(
    axes: Axes,
    result: AutotuneResult,
    values: Mapping[_Place, float],
    texts: Mapping[_Place, str],
    *,
    logarithmic: bool,
) -> None:
    block_sizes, fetch_factors = _sizes(result)
    cells = np.full((len(block_sizes), len(fetch_factors)), np.nan)
    for (block_size, fetch_factor), value in values.items():
        cells[block_sizes.index(block_size), fetch_factors.index(fetch_factor)] = value
    shades = _shades(cells, logarithmic=logarithmic)
    axes.pcolormesh(
        np.arange(len(fetch_factors) + 1) - 0.5,
        np.arange(len(block_sizes) + 1) - 0.5,
        shades,
        cmap=mpl.colormaps[COLOURS].with_extremes(bad=NOT_TIMED),
        vmin=0,
        vmax=1,
        edgecolors="white",
        linewidth=1,
    )
    for row, block_size in enumerate(block_sizes):
        for column, fetch_factor in enumerate(fetch_factors):
            text = texts.get((block_size, fetch_factor), "")
            shade = shades[row, column]
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


def _shades(cells: NDArray[np.float64], *, logarithmic: bool) -> NDArray[np.float64]:
    """Return values scaled to 0 .. 1, NaN where there are none."""
    if np.all(np.isnan(cells)):
        return cells
    scaled = np.log(cells) if logarithmic else cells
    low, high = np.nanmin(scaled), np.nanmax(scaled)
    shades: NDArray[np.float64] = (scaled - low) / max(float(high - low), 1e-9)
    return shades


def _speed(result: ConfigurationResult) -> float:
    return result.cells_per_second.value if result.cells_per_second else 0.0


def _short(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"  # noqa: PLR2004 - a kilo


def _in_square(text: str) -> str:
    """Return a few words on two lines."""
    return text[::-1].replace(" ", "\n", 1)[::-1]
