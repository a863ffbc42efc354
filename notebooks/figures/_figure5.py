"""The paper's Figure 5: macro F1 by task and strategy, published and measured."""

from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cellfeed_tuner.plots import STYLE, draw_caption

from ._machines import STRATEGIES

__all__ = ["macro_f1_figure"]

_WIDTH = 0.2
_GROUPS = ("published", "ours")


def macro_f1_figure(scores: pd.DataFrame, published: pd.DataFrame, *, caption: str) -> Figure:
    """Draw the macro F1 of each task and strategy (the paper's Figure 5).

    One axes per task: bars of the published means with their standard deviations, next to
    ours, with a point for each seed.

    Parameters
    ----------
    scores
        Columns ``task``, ``strategy``, ``seed`` and ``macro_f1``.
    published
        Columns ``task``, ``strategy``, ``macro_f1`` and ``std``.
    caption
        Where the values come from.
    """
    tasks = list(dict.fromkeys(published["task"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1 + 2.3 * len(tasks), 3.5), layout="constrained")
        row = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, task in zip(row, tasks, strict=True):
            _draw_published(axes, published[published["task"] == task])
            _draw_ours(axes, scores[scores["task"] == task])
            axes.set_title(task)
            axes.set_xticks(range(len(_GROUPS)), _GROUPS)
            axes.tick_params(axis="x", length=0)
            axes.margins(x=0.04)
        row[0].set_ylabel("macro F1 on the held-out plate")
        _name_marks(figure, row[0])
        draw_caption(figure, caption)
    return figure


def _draw_published(axes: Axes, part: pd.DataFrame) -> None:
    by_strategy = part.set_index("strategy")
    for place, strategy in _places(0):
        mean = by_strategy["macro_f1"].to_dict()[strategy]
        std = by_strategy["std"].to_dict()[strategy]
        axes.bar(
            place, mean, _WIDTH, yerr=std, color=STRATEGIES[strategy], alpha=0.6,
            error_kw={"lw": 1, "ecolor": "black"},
        )  # fmt: skip


def _draw_ours(axes: Axes, part: pd.DataFrame) -> None:
    for place, strategy in _places(1):
        seeds = part.loc[part["strategy"] == strategy, "macro_f1"]
        axes.bar(place, seeds.mean(), _WIDTH, color=STRATEGIES[strategy])
        axes.plot([place] * len(seeds), seeds, "o", color="black", mfc="white", ms=3.5)


def _places(group: int) -> Sequence[tuple[float, str]]:
    first = group - _WIDTH * (len(STRATEGIES) - 1) / 2
    return [(first + _WIDTH * number, strategy) for number, strategy in enumerate(STRATEGIES)]


def _name_marks(figure: Figure, axes: Axes) -> None:
    bars = [mpl.patches.Patch(color=colour) for colour in STRATEGIES.values()]
    (seed,) = axes.plot([], [], "o", color="black", mfc="white", ms=3.5)
    figure.legend([*bars, seed], [*STRATEGIES, "ours, one seed"], loc="outside upper left", ncols=5)
