"""Throughput over block size and fetch factor: the paper's Figures 2, 6 and 7."""

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cellfeed_tuner.plots import STYLE, block_colours, draw_caption, scale_speeds

from ._looks import scale_fetch_factors
from ._machines import STRATEGIES, draw_curve, draw_level, one, scale_alike, title

__all__ = ["storage_figure", "throughput_figure"]


def throughput_figure(published: pd.DataFrame, ours: pd.DataFrame, *, caption: str) -> Figure:
    """Draw throughput over the fetch factor for each block size (the paper's Figure 2).

    Published values and ours are from different machines, so each has its own scale: on the left
    cells per second, on the right multiples of the throughput of single cells fetched for one
    minibatch at a time.

    Parameters
    ----------
    published, ours
        Columns ``loader``, ``strategy`` ("BlockShuffling" and "Streaming" of one loader; of
        AnnLoader "random" and "stream", drawn as lines), ``block_size``, ``fetch_factor``,
        ``cells_per_second`` and, if measured several times, ``low`` and ``high``.
    caption
        Where the values come from.
    """
    tables = {"published": published, "here": ours}
    block_sizes = sorted(set(pd.concat(map(_shuffled, tables.values()))["block_size"]))
    colours = block_colours(block_sizes)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, (name, table) in zip(panels, tables.items(), strict=True):
            _draw_grid(axes, table, colours)
            _draw_beside(axes, table, "AnnLoader")
            axes.set_title(title(table, name))
        at_random = [
            one(_shuffled(table), block_size=1, fetch_factor=1)["cells_per_second"]
            for table in tables.values()
        ]
        for axes, unit in zip(panels, at_random, strict=True):
            scale_alike([axes], [unit], of="block size 1, fetch factor 1")
        _draw_legend(figure, colours)
        draw_caption(figure, caption)
    return figure


def storage_figure(
    throughputs: pd.DataFrame, *, storage: str, native: pd.Series, caption: str
) -> Figure:
    """Draw throughput over the fetch factor for cells in another storage.

    On the right as multiples of what PyTorch's loader reads at random from it (the paper's
    Figures 6 and 7).

    Parameters
    ----------
    throughputs
        As `storage_throughputs` returns them.
    storage
        The name of the storage.
    native
        Throughput of the same cells in cellfeed's own storage, for comparison: ``text`` names it;
        ``loader``, ``cells_per_second``, ``low`` and ``high``.
    caption
        Where the values come from.
    """
    colours = block_colours(sorted(set(_shuffled(throughputs)["block_size"])))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        axes = figure.subplots()
        _draw_grid(axes, throughputs, colours)
        _draw_beside(axes, throughputs, "DataLoader")
        draw_level(axes, native, text=native["text"], below=True)
        axes.set_title(storage)
        at_random = one(throughputs, loader="DataLoader", strategy="random")["cells_per_second"]
        scale_alike([axes], [at_random], of="DataLoader, random access")
        _draw_legend(figure, colours)
        draw_caption(figure, caption)
    return figure


def _shuffled(table: pd.DataFrame) -> pd.DataFrame:
    return table.query("strategy == 'BlockShuffling'").astype({"block_size": int})


def _draw_grid(axes: Axes, table: pd.DataFrame, colours: Mapping[int, Any]) -> None:
    shuffled = _shuffled(table)
    for block_size, part in shuffled.groupby("block_size"):
        colour = colours[int(str(block_size))]
        draw_curve(axes, part, over="fetch_factor", color=colour, fmt="o-")
    streamed = table.query("strategy == 'Streaming'")
    draw_curve(axes, streamed, over="fetch_factor", color=STRATEGIES["streaming"], fmt="^-")
    scale_fetch_factors(axes, sorted(shuffled["fetch_factor"].astype(int).unique()))
    scale_speeds(axes)
    axes.set(xlabel="fetch factor (minibatches)", ylabel="throughput (cells/s)")


def _draw_beside(axes: Axes, table: pd.DataFrame, loader: str) -> None:
    for strategy, text in (("random", "random access"), ("stream", "streaming")):
        row = one(table, loader=loader, strategy=strategy)
        draw_level(axes, row, text=f"{loader}, {text}")


def _draw_legend(figure: Figure, colours: Mapping[int, Any]) -> None:
    handles = [
        Line2D([], [], color=colour, marker="o", ms=4, label=f"block {size}")
        for size, colour in colours.items()
    ]
    streaming = STRATEGIES["streaming"]
    handles.append(Line2D([], [], color=streaming, marker="^", ms=4, label="streaming"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
