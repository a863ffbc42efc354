"""Loaders compared: a dot with its interval for each, and a tick for its limit."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cellfeed_tuner.plots import BOUND, STYLE, draw_caption

from ._machines import LOADERS

__all__ = ["loaders_figure"]

_OURS = LOADERS["cellfeed"]
_OTHERS = LOADERS["scDataset"]  # all others share one colour: their names are beside them
_FLOORS = {"color": BOUND, "marker": "D"}
_MARKS = {"cellfeed": _OURS, "h5py": _FLOORS, "zarr": _FLOORS}
_LIMIT: Any = {
    "color": "black", "marker": "|", "markersize": 13, "markeredgewidth": 1.6, "linestyle": "",
}  # fmt: skip
_CHARACTERS_OF_A_REASON = 78


def loaders_figure(rows: pd.DataFrame, *, caption: str) -> Figure:
    """Draw loaders section by section over one logarithmic axis, the fastest on top.

    Parameters
    ----------
    rows
        As `bench/peers/compare.py` writes them: columns ``section``, ``name``, ``peer``,
        ``cells_per_s`` with ``cells_per_s_low`` and ``cells_per_s_high`` (missing if it
        failed), ``failed`` (why) and ``limit``. Rows of the peer "machine" are limits, which the
        others refer to.
    caption
        Where the values come from, and on which machine.

    Raises
    ------
    ValueError
        No loader has a throughput.
    """
    is_limit = rows["peer"] == "machine"
    limits = rows[is_limit].set_index("name")["cells_per_s"].to_dict()
    loaders = rows[~is_limit].sort_values("cells_per_s", na_position="first", kind="stable")
    if loaders["cells_per_s"].isna().all():
        msg = "no loader has a throughput"
        raise ValueError(msg)
    sections = {
        section: loaders[loaders["section"] == section]
        for section in rows[~is_limit]["section"].unique()
    }
    heights = [len(section) + 0.8 for section in sections.values()]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 1.9 + 0.29 * sum(heights)), layout="constrained")
        all_axes = figure.subplots(
            len(sections), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, (title, section) in zip(all_axes, sections.items(), strict=True):
            _draw_section(axes, section.to_dict("records"), limits)
            axes.set_title(title[0].upper() + title[1:])
        named = loaders["limit"].map(limits)
        _scale(all_axes[-1], pd.concat([loaders["cells_per_s"], named]))
        _name_marks(figure, set(loaders["peer"]), is_limited=bool(named.notna().any()))
        draw_caption(figure, caption)
    return figure


def _draw_section(
    axes: Axes, rows: Sequence[Mapping[Any, Any]], limits: Mapping[Any, float]
) -> None:
    axes.set_xscale("log")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", lw=0.8)
    axes.set_axisbelow(True)
    for place, row in enumerate(rows):
        if row["peer"] == "cellfeed":
            axes.get_yticklabels()[place].set_fontweight("bold")
        if pd.isna(row["cells_per_s"]):
            _write_reason(axes, place, row["failed"] or "not measured")
            continue
        _draw_speed(axes, place, row)
        if row["limit"] in limits:
            axes.plot(limits[row["limit"]], place, **_LIMIT)


def _draw_speed(axes: Axes, place: int, row: Mapping[Any, Any]) -> None:
    speed, mark = row["cells_per_s"], _MARKS.get(row["peer"], _OTHERS)
    around = [[speed - row["cells_per_s_low"]], [row["cells_per_s_high"] - speed]]
    axes.errorbar(
        speed, place, xerr=around, fmt=mark["marker"], color=mark["color"], markersize=6,
        elinewidth=1.5, capsize=3,
    )  # fmt: skip
    axes.annotate(
        f"{speed:,.0f}", (speed, place), xytext=(0, 5), textcoords="offset points",
        ha="center", va="bottom", fontsize=7, color=mark["color"],
    )  # fmt: skip


def _write_reason(axes: Axes, place: int, reason: str) -> None:
    shown = textwrap.shorten(f"failed: {reason}", _CHARACTERS_OF_A_REASON, placeholder=" ...")
    axes.annotate(
        shown, (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8,
        style="italic", color=BOUND,
    )  # fmt: skip


def _scale(axes: Axes, speeds: pd.Series) -> None:
    axes.set_xlim(speeds.min() / 1.6, speeds.max() * 1.6)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("cells per second (logarithmic)")


def _name_marks(figure: Figure, peers: set[str], *, is_limited: bool) -> None:
    marks = {"cellfeed": _OURS, "other loaders": _OTHERS, "slices by hand": _FLOORS}
    drawn = [_MARKS.get(peer, _OTHERS) for peer in peers]
    handles = [
        Line2D([], [], linestyle="", label=label, **mark)
        for label, mark in marks.items()
        if mark in drawn
    ]
    if is_limited:
        handles.append(Line2D([], [], label="what the machine allows for this work", **_LIMIT))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
