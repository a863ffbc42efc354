"""Throughput and entropy over the grid."""

from collections.abc import Callable, Mapping
from math import log
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cellfeed_tuner._interval import interval
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS, ConfigurationResult
from cellfeed_tuner.plots._style import BOUND, CHOSEN, COLOURS, NOT_TIMED, STYLE, hover

__all__ = ["describe", "draw_entropy", "draw_throughput", "heat_map_figure"]

Quantity = Literal["throughput", "entropy"]
_Place = tuple[int, int]
# Not timed, though they could have been.
_PREDICTED = {"below entropy floor", "too slow", "mixes less", "not raced", "out of budget"}
# What is slower than this share of the fastest has the darkest colour.
_DARKEST_SHARE = 0.25
_WHITE_ON = 0.6  # darker colours have white text


class _Square(NamedTuple):
    """A square of the grid; its shade is 0 to 1 on the colour map, or None for grey."""

    shade: float | None
    text: str
    hover: str


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

    Where none was timed, the status is given and the throughput that the cost model predicts.
    """
    squares = dict[_Place, _Square]()
    shown = _best(result, lambda each: each.cells_per_second.value if each.cells_per_second else 0)
    best = max(
        each.cells_per_second.value if each.cells_per_second else 0 for each in shown.values()
    )
    for place, each in shown.items():
        words = describe(each)
        if each.cells_per_second is not None:
            speed = each.cells_per_second.value
            text = f"{_short(speed)}{'*' * each.has_few_rounds}\n{each.configuration.num_workers} w"
            shade = max(0.0, 1 - log(speed / best) / log(_DARKEST_SHARE))
            squares[place] = _Square(shade, text, words)
            continue
        status = STATUS_WORDS[each.status].short
        predicted = result.predicted(each)
        if each.status in _PREDICTED and predicted:
            words += f"; predicted {interval(predicted)} cells/s"
            squares[place] = _Square(None, f"~{_short(predicted.value, digits=0)}\n{status}", words)
        else:
            squares[place] = _Square(None, "\n".join(status.rsplit(" ", 1)), words)
    few = "; * few rounds" if any(each.has_few_rounds for each in shown.values()) else ""
    has_others = any(each.configuration.others for each in shown.values())
    of_best = "best workers (w) and other settings" if has_others else "best workers (w)"
    predicted_too = "; ~ predicted" if any(each.text[0] == "~" for each in squares.values()) else ""
    axes.set_title(f"Throughput (cells/s), {of_best}{predicted_too}{few}")
    _draw_grid(axes, result, squares)


def draw_entropy(axes: Axes, result: AutotuneResult) -> None:
    """Draw the expected entropy of the best mixed configuration at each place of the grid.

    Of several labels, that of the label mixed least. Colours begin at the floor.
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
            f"{each.least_mixed.expected.value:.3f}\n{share:.1%}",
            describe(each),
        )
    below = f"; grey: below {result.constraints.entropy_floor:g}" if reaching else ""
    of = " of the label mixed least" if result.dataset.further_labels else ""
    axes.set_title(f"Entropy{of} (bits),{chr(10) if of else ' '}share of random{below}")
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
    colours = mpl.colormaps[COLOURS]
    for (block_size, fetch_factor), square in squares.items():
        row, column = block_sizes.index(block_size), fetch_factors.index(fetch_factor)
        ground = NOT_TIMED if square.shade is None else colours(square.shade)
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fc=ground, ec="white", lw=1,
                gid=hover(square.hover),
            )
        )  # fmt: skip
        colour, size = BOUND, 7
        if square.shade is not None:
            colour, size = "white" if square.shade < _WHITE_ON else "black", 8
        axes.text(column, row, square.text, ha="center", va="center", color=colour, fontsize=size)
    if result.recommended is not None:
        chosen = result.recommended.configuration
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
