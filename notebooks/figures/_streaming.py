"""The paper's Figure 3: streaming, and the effect of the fetch factor."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from cellfeed_tuner.plots import STYLE, draw_caption, scale_speeds

from ._looks import scale_fetch_factors
from ._machines import (
    LOADERS,
    draw_curve,
    draw_level,
    one,
    scale_alike,
    title,
)

__all__ = ["streaming_figure"]


def streaming_figure(published: pd.DataFrame, ours: pd.DataFrame, *, caption: str) -> Figure:
    """Draw the throughput of streaming over the fetch factor (the paper's Figure 3).

    Published values and ours are from different machines: each has its own scale on the left. On
    the right both share one: multiples of the throughput of one minibatch at a time.

    Parameters
    ----------
    published, ours
        Columns ``loader``, ``strategy`` ("Streaming" of one loader, and "stream" of AnnLoader,
        drawn as a line), ``fetch_factor``, ``cells_per_second`` and, if measured several
        times, ``low`` and ``high``.
    caption
        Where the values come from.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 4), layout="constrained")
        panels = figure.subplots(1, 2)
        units = []
        for axes, (name, table) in zip(
            panels, {"published": published, "here": ours}.items(), strict=True
        ):
            streamed = table.query("strategy == 'Streaming'")
            look = LOADERS[streamed["loader"].iloc[0]]
            draw_curve(axes, streamed, over="fetch_factor", ls="-", **look)
            level = one(table, loader="AnnLoader", strategy="stream")
            draw_level(axes, level, text="AnnLoader, streaming")
            scale_fetch_factors(axes, sorted(streamed["fetch_factor"].astype(int)))
            scale_speeds(axes)
            axes.set(xlabel="fetch factor (minibatches)", ylabel="throughput (cells/s)")
            axes.set_title(title(table, name))
            units.append(one(streamed, fetch_factor=1)["cells_per_second"])
        scale_alike(panels, units, of="fetch factor 1")
        draw_caption(figure, caption)
    return figure
