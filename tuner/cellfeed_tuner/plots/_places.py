"""Values at places that form no grid."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner.plots._style import CHOSEN, COLOURS

__all__ = ["draw_places"]


def draw_places(
    axes: Axes,
    result: AutotuneResult,
    values: Mapping[tuple[int, int], float],
    *,
    logarithmic: bool,
) -> None:
    """Draw values over fetch factors and block sizes, each as a point of its colour.

    Parameters
    ----------
    axes
        Where to draw.
    result
        What ``autotune`` found, for the chosen point.
    values
        What to draw at each (block size, fetch factor).
    logarithmic
        Whether colours go by ratios.
    """
    if values:
        _draw_points(axes, values, logarithmic=logarithmic)
    else:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center")
        ranges = result.ranges
        assert ranges is not None, "grids are drawn as grids"  # noqa: S101
        axes.set(xlim=ranges.fetch_factors, ylim=ranges.block_sizes)
    if result.recommended is not None:
        chosen = result.recommended.configuration
        axes.plot(chosen.fetch_factor, chosen.block_size, "o", mfc="none", mec=CHOSEN, ms=11, mew=2)
    axes.set(xlabel="fetch factor (minibatches)", ylabel="block size (cells)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(visible=True, lw=0.3, alpha=0.5)


def _draw_points(axes: Axes, values: Mapping[tuple[int, int], float], *, logarithmic: bool) -> None:
    blocks, fetches = zip(*values, strict=True)
    points = axes.scatter(
        fetches,
        blocks,
        c=list(values.values()),
        cmap=COLOURS,
        norm=LogNorm() if logarithmic else Normalize(),
        s=28,
        lw=0,
    )
    bar = axes.figure.colorbar(points, ax=axes, fraction=0.05)
    bar.outline.set_visible(False)
    if bar.solids is not None:
        bar.solids.set_rasterized(False)  # pages have no images in their figures
    if logarithmic:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        bar.ax.yaxis.set_minor_locator(NullLocator())
