"""The comparison as a picture: a dot with its interval for each loader, a tick for its limit."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from entries import MACHINE, PROCESSES, SECTIONS
from intervals import interval_name
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from table import count_rounds

Row = dict[str, Any]

# Colours of Okabe and Ito, which colour-blind readers can tell apart; the marks differ as well.
OURS = {"color": "#d55e00", "marker": "o"}
OTHERS = {"color": "#0072b2", "marker": "s"}
FLOORS = {"color": "#666666", "marker": "D"}
MARKS = {"cellfeed": OURS, "h5py": FLOORS, "zarr": FLOORS}
LIMIT = {"color": "black", "marker": "|", "markersize": 13, "markeredgewidth": 1.6, "linestyle": ""}
GREY = "#555555"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 150,
    "legend.frameon": False,
}
CHARACTERS_OF_A_REASON = 78


def draw(path: Path, rows: Sequence[Row], run: dict) -> None:
    """Draw all loaders, section by section, over one logarithmic axis."""
    limits = {row["name"]: row["cells_per_s"] for row in rows if row["section"] == MACHINE}
    sections = {
        section: sorted(
            (row for row in rows if row["section"] == section),
            key=lambda row: row["cells_per_s"] or 0,
        )
        for section in SECTIONS
        if section not in {MACHINE, PROCESSES}  # which compare cellfeed with nobody
    }
    sections = {section: chosen for section, chosen in sections.items() if chosen}
    if not any(row["cells_per_s"] for chosen in sections.values() for row in chosen):
        return
    heights = [len(chosen) + 0.8 for chosen in sections.values()]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 1.9 + 0.29 * sum(heights)), layout="constrained")
        all_axes = figure.subplots(
            len(sections), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, (section, chosen) in zip(all_axes, sections.items(), strict=True):
            _draw_section(axes, chosen, limits)
            axes.set_title(section[0].upper() + section[1:])
        _label(figure, all_axes, rows, run)
        figure.savefig(path)


def _draw_section(axes: Axes, rows: Sequence[Row], limits: dict[str, float]) -> None:
    axes.set_xscale("log")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", lw=0.8)
    axes.set_axisbelow(True)
    for place, row in enumerate(rows):
        mark = MARKS.get(row["peer"], OTHERS)
        if row["peer"] == "cellfeed":
            axes.get_yticklabels()[place].set_fontweight("bold")
        if row["cells_per_s"] is None:
            _write_reason(axes, place, row["failed"] or "not measured")
        else:
            _draw_speed(axes, place, row, mark)
            if row["limit"] is not None:
                axes.plot(limits[row["limit"]], place, **LIMIT)


def _draw_speed(axes: Axes, place: int, row: Row, mark: dict) -> None:
    speed = row["cells_per_s"]
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
    shown = textwrap.shorten(f"failed: {reason}", CHARACTERS_OF_A_REASON, placeholder=" ...")
    axes.annotate(
        shown, (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8,
        style="italic", color=GREY,
    )  # fmt: skip


def _label(figure: Figure, all_axes: Sequence[Axes], rows: Sequence[Row], run: dict) -> None:
    speeds = [row["cells_per_s"] for row in rows if row["cells_per_s"]]
    all_axes[-1].set_xlim(min(speeds) / 1.6, max(speeds) * 1.6)
    all_axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    all_axes[-1].set_xlabel("cells per second (logarithmic)")
    keys = {"cellfeed": OURS, "other loaders": OTHERS, "slices by hand": FLOORS}
    handles = [Line2D([], [], linestyle="", label=label, **key) for label, key in keys.items()]
    handles.append(Line2D([], [], label="what the machine allows for this work", **LIMIT))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    caption = (
        f"{run['collection']}. {run['machine']}. {run['date']}. Minibatches of 64 cells; median of "
        f"{count_rounds(run)} with the {interval_name(run['rounds'])}; page cache "
        f"{run['cache']}."
    )
    figure.supxlabel(
        "\n".join(textwrap.wrap(caption, 160)), x=0.01, ha="left", fontsize=7.5, color=GREY
    )
