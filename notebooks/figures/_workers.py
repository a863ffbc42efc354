"""The paper's Table 2 and its Appendix E: worker processes, at equal memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cellfeed_tuner.plots import STYLE, draw_caption, scale_speeds

from ._looks import title_of_block
from ._machines import draw_curve

__all__ = ["workers_figure"]

_MARKERS = ("o", "s", "^", "D", "v", "P")


def workers_figure(published: pd.DataFrame, ours: pd.DataFrame, *, caption: str) -> Figure:
    """Draw throughput over the memory of all buffers, for each number of workers.

    One column per block size; published values above, ours below, from another machine and on
    their own scale. Points above each other hold as many minibatches: one process with four times
    the buffer, and four workers (the paper's Appendix E).

    Parameters
    ----------
    published, ours
        Columns ``loader``, ``block_size``, ``fetch_factor``, ``num_workers``,
        ``cells_per_second`` and, if measured several times, ``low`` and ``high``.
    caption
        Where the values come from.
    """
    tables = {"published": _with_buffers(published), "here": _with_buffers(ours)}
    block_sizes = sorted(set(published["block_size"]) | set(ours["block_size"]))
    workers = sorted(set(published["num_workers"]) | set(ours["num_workers"]))
    looks = _looks(workers)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 2.3 * len(block_sizes), 5.6), layout="constrained")
        rows = figure.subplots(2, len(block_sizes), sharex=True, sharey="row", squeeze=False)
        for row, (name, table) in zip(rows, tables.items(), strict=True):
            (loader,) = set(table["loader"])
            row[0].set_ylabel(f"{loader}, {name}\nthroughput (cells/s)")
            for axes, block_size in zip(row, block_sizes, strict=True):
                _draw_workers(axes, table[table["block_size"] == block_size], looks)
        for axes, block_size in zip(rows[0], block_sizes, strict=True):
            axes.set_title(title_of_block(int(block_size)))
        _scale_buffers(rows[1], pd.concat(tables.values())["buffers"])
        handles = [
            Line2D([], [], ms=5, label=f"{number} workers", **looks[number]) for number in workers
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
        draw_caption(figure, caption)
    return figure


def _with_buffers(table: pd.DataFrame) -> pd.DataFrame:
    """Add the number of minibatches in all fetches that are in flight."""
    return table.assign(buffers=table["fetch_factor"] * table["num_workers"].clip(lower=1))


def _looks(workers: Sequence[int]) -> dict[int, Any]:
    """Return the colour of each number of workers: none in black, more the lighter."""
    shades = mpl.colormaps["cividis"](np.linspace(0.0, 0.9, len(workers)))
    return {
        number: {"color": shade, "marker": _MARKERS[place % len(_MARKERS)], "ls": "-"}
        for place, (number, shade) in enumerate(zip(workers, shades, strict=True))
    }


def _draw_workers(axes: Axes, part: pd.DataFrame, looks: Mapping[int, Any]) -> None:
    for number, of_number in part.groupby("num_workers"):
        draw_curve(axes, of_number, over="buffers", **looks[int(str(number))])
    scale_speeds(axes)


def _scale_buffers(row: Sequence[Axes], buffers: pd.Series) -> None:
    for axes in row:
        axes.set_xscale("log", base=2)
        ticks = [4**power for power in range(7) if buffers.min() <= 4**power <= buffers.max()]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelrotation=90)
        axes.set_xlabel("minibatches fetched\nside by side")
