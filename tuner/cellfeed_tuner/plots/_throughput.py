"""The paper's Figure 2: throughput over block size and fetch factor."""

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cellfeed_tuner.plots._entropy_axes import scale_fetch_factors
from cellfeed_tuner.plots._machines import (
    draw_curve,
    draw_level,
    one,
    scale_alike,
    title,
)
from cellfeed_tuner.plots._style import STRATEGIES, STYLE, block_colours, draw_caption, scale_speeds

__all__ = ["throughput_figure"]


def throughput_figure(published: pd.DataFrame, ours: pd.DataFrame, *, caption: str) -> Figure:
    """Draw throughput over the fetch factor for each block size (the paper's Figure 2).

    Published values and ours are of different machines: each has its own scale on the left. On
    the right both have the same one: multiples of the throughput of single cells that are
    fetched for one minibatch at a time.

    Parameters
    ----------
    published, ours
        Columns ``loader``, ``strategy`` ("BlockShuffling" and "Streaming" of one loader; of
        AnnLoader "random" and "stream", drawn as lines), ``block_size``, ``fetch_factor``,
        ``cells_per_second`` and, where measured several times, ``low`` and ``high``.
    caption
        Where the values come from.
    """
    tables = {"published": published, "here": ours}
    shuffled = {
        name: table.query("strategy == 'BlockShuffling'").astype({"block_size": int})
        for name, table in tables.items()
    }
    block_sizes = sorted(set(pd.concat(shuffled.values())["block_size"]))
    colours = block_colours(block_sizes)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, (name, table) in zip(panels, tables.items(), strict=True):
            for block_size, part in shuffled[name].groupby("block_size"):
                draw_curve(
                    axes, part, over="fetch_factor", color=colours[int(str(block_size))], fmt="o-"
                )
            streamed = table.query("strategy == 'Streaming'")
            draw_curve(axes, streamed, over="fetch_factor", color=STRATEGIES["streaming"], fmt="^-")
            _draw_annloader(axes, table)
            _label_axes(axes, shuffled[name])
            axes.set_title(title(table, name))
        at_random = [
            one(table, block_size=1, fetch_factor=1)["cells_per_second"]
            for table in shuffled.values()
        ]
        scale_alike(panels, at_random, of="block size 1, fetch factor 1")
        handles = [
            Line2D([], [], color=colours[size], marker="o", ms=4, label=f"block {size}")
            for size in block_sizes
        ]
        handles.append(
            Line2D([], [], color=STRATEGIES["streaming"], marker="^", ms=4, label="streaming")
        )
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
        draw_caption(figure, caption)
    return figure


def _draw_annloader(axes: Axes, table: pd.DataFrame) -> None:
    for strategy, text in (("random", "random access"), ("stream", "streaming")):
        row = one(table, loader="AnnLoader", strategy=strategy)
        draw_level(axes, row, text=f"AnnLoader, {text}")


def _label_axes(axes: Axes, shuffled: pd.DataFrame) -> None:
    scale_fetch_factors(axes, sorted(shuffled["fetch_factor"].astype(int).unique()))
    scale_speeds(axes)
    axes.set(xlabel="fetch factor (minibatches)", ylabel="throughput (cells/s)")
