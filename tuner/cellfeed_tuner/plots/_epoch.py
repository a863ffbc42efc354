"""Entropy over the course of an epoch."""

from math import isfinite

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cellfeed_tuner._entropy._epoch_course import EpochCourse
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner.plots._entropy_axes import UPPER
from cellfeed_tuner.plots._style import CHOSEN, STYLE, around

__all__ = ["epoch_figure"]

# An axis shows at least this share of random sampling's entropy, so that noise stays small.
_LEAST_SPAN = 0.1
_MARGIN = 0.02


def epoch_figure(result: AutotuneResult) -> Figure:
    """Draw the entropy of each label from the first to the last tenth of an epoch.

    Parameters
    ----------
    result
        What ``autotune`` found, with the course of an epoch of its choice.
    """
    chosen, courses = result.chosen, result.entropy_over_epoch
    assert chosen is not None, "there is no course without a choice"  # noqa: S101
    random = {name: each.entropy_bits.random for name, each in chosen.further_labels.items()}
    random[result.dataset.label] = chosen.entropy_bits.random
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 3.4 * len(courses), 2.9), layout="constrained")
        all_axes = figure.subplots(1, len(courses), squeeze=False)[0]
        for axes, (label, course) in zip(all_axes, courses.items(), strict=True):
            _draw_course(axes, course, random[label])
            # A label may have dollars in its name, which are no formula.
            axes.set_title(label, parse_math=False)
            axes.set_xlabel("tenth of the epoch")
        all_axes[0].set_ylabel("minibatch label\nentropy (bits)")
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper right")
    return figure


def _draw_course(axes: Axes, course: EpochCourse, random: float) -> None:
    tenths = range(1, len(course.deciles) + 1)
    for tenth, bits in zip(tenths, course.deciles, strict=True):
        axes.errorbar(
            tenth, bits.value, yerr=around(bits), fmt="o", color="black", ms=4, lw=1, capsize=2
        )
    axes.plot(tenths, [each.value for each in course.deciles], color=CHOSEN, lw=1, zorder=0)
    axes.axhline(random, label="random sampling", **UPPER)
    ends = [random, *(end for each in course.deciles for end in (each.low, each.value, each.high))]
    low, high = min(filter(isfinite, ends)), max(filter(isfinite, ends))
    missing = max(0.0, _LEAST_SPAN * random - (high - low))
    pad = _MARGIN * random
    axes.set_ylim(low - missing - pad, high + 2 * pad)
    axes.set_xticks(tenths)
