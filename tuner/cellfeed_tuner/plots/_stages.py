"""Where the time of a cell goes."""

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cellfeed_tuner._explain._bottleneck import Bottleneck
from cellfeed_tuner.plots._style import BOUND, CHOSEN, STYLE, around

__all__ = ["stages_figure"]

_MICRO = 1e-6
_OTHERS = "#8c8c8c"
_HEIGHT_OF_BAR, _HEIGHT_OF_REST = 0.3, 0.9


def stages_figure(found: Bottleneck) -> Figure:
    """Draw how long threads are busy with each stage, beside what a cell takes.

    Parameters
    ----------
    found
        Where the time goes.
    """
    with mpl.rc_context(STYLE):
        height = _HEIGHT_OF_REST + _HEIGHT_OF_BAR * len(found.stages)
        figure = Figure(figsize=(9.5, height), layout="constrained")
        _draw(figure.subplots(), found)
    return figure


def _draw(axes: Axes, found: Bottleneck) -> None:
    for place, stage in enumerate(found.stages):
        seconds = stage.seconds_per_cell
        axes.barh(
            place, max(0.0, seconds.value) / _MICRO, xerr=around(seconds, unit=_MICRO),
            color=CHOSEN if stage.name == found.kind else _OTHERS, height=0.7,
            error_kw={"lw": 1, "ecolor": BOUND},
        )  # fmt: skip
    axes.set_yticks(range(len(found.stages)), [stage.label for stage in found.stages])
    axes.invert_yaxis()
    whole = found.measured_seconds_per_cell / _MICRO
    axes.axvline(whole, color=BOUND, ls="--", lw=1)
    axes.annotate(
        f"measured: {whole:,.1f}", (whole, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
        textcoords="offset points", ha="center", va="bottom", fontsize=8, color=BOUND,
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_xlabel("microseconds for each cell, over all threads")
