"""Entropy over the course of an epoch."""

from collections.abc import Iterable, Mapping
from math import isfinite

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cellfeed_tuner.plots import CHOSEN, STYLE, around, draw_caption

from ._epoch_course import EpochCourse
from ._looks import UPPER

__all__ = ["epoch_figure"]

# An axis shows at least this share of random sampling's entropy, so that noise stays small.
_LEAST_SPAN = 0.1
_MARGIN = 0.02


def epoch_figure(
    courses: Mapping[str, EpochCourse], random: Mapping[str, float], *, caption: str = ""
) -> Figure:
    """Draw minibatch entropy from the first to the last tenth of an epoch.

    Parameters
    ----------
    courses
        The courses by name, each on its own axes.
    random
        Entropy of random sampling for each of them, bits; if it is the same for all, they share
        one scale.
    caption
        Where the values come from.
    """
    same_scale = len(set(random.values())) == 1
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 3.4 * len(courses), 2.9), layout="constrained")
        all_axes = figure.subplots(1, len(courses), squeeze=False, sharey=same_scale)[0]
        for axes, (name, course) in zip(all_axes, courses.items(), strict=True):
            _draw_course(axes, course, random[name])
            shown = courses.values() if same_scale else [course]
            axes.set_ylim(*_span(shown, random[name]))
            # A label may have dollar signs in its name, which are not a formula.
            axes.set_title(name, parse_math=False)
            axes.set_xlabel("tenth of the epoch")
        all_axes[0].set_ylabel("minibatch label\nentropy (bits)")
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper right")
        if caption:
            draw_caption(figure, caption)
    return figure


def _draw_course(axes: Axes, course: EpochCourse, random: float) -> None:
    tenths = range(1, len(course.deciles) + 1)
    for tenth, bits in zip(tenths, course.deciles, strict=True):
        axes.errorbar(
            tenth, bits.value, yerr=around(bits), fmt="o", color="black", ms=4, lw=1, capsize=2
        )
    axes.plot(tenths, [each.value for each in course.deciles], color=CHOSEN, lw=1, zorder=0)
    axes.axhline(random, label="random sampling", **UPPER)
    axes.set_xticks(tenths)


def _span(courses: Iterable[EpochCourse], random: float) -> tuple[float, float]:
    """Return the end of the courses' axis."""
    deciles = [each for course in courses for each in course.deciles]
    ends = [random, *(end for each in deciles for end in (each.low, each.value, each.high))]
    low, high = min(filter(isfinite, ends)), max(filter(isfinite, ends))
    missing = max(0.0, _LEAST_SPAN * random - (high - low))
    pad = _MARGIN * random
    return low - missing - pad, high + 2 * pad
