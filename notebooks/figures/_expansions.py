"""Equation 5 and the bounds: first-order expansions compared with exact values."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cellfeed_tuner.plots import BOUND, COLOURS, STYLE, draw_caption

from ._looks import LOWER, REPLAYED
from ._machines import PUBLISHED

__all__ = ["expansions_figure"]

_EXACT: Any = {"color": "black", "lw": 1.5}


def expansions_figure(blocks: pd.DataFrame, batches: pd.DataFrame, *, caption: str) -> Figure:
    """Draw how far the paper's expansions of minibatch entropy are from exact expectations.

    Left, one minibatch per fetch: entropy over the block size. Right, an endless fetch, which is
    random sampling: the entropy deficit over the size of minibatches, for several numbers of
    labels.

    Parameters
    ----------
    blocks
        Columns ``block_size`` and, in bits, ``lower_bound`` (the expansion), ``expected`` (exact,
        homogeneous blocks), ``published`` (may be missing), ``replayed``, ``low`` and ``high``.
    batches
        Columns ``n_labels``, ``batch_size`` and, in bits, ``expansion`` and ``exact``: the entropy
        of the labels minus that of random minibatches.
    caption
        Where the values come from.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_blocks(left, blocks.sort_values("block_size"))
        _draw_batches(right, batches.sort_values("batch_size"))
        draw_caption(figure, caption)
    return figure


def _draw_blocks(axes: Axes, blocks: pd.DataFrame) -> None:
    sizes = blocks["block_size"]
    axes.plot(sizes, blocks["lower_bound"], label="expansion (lower bound)", **LOWER)
    axes.plot(sizes, blocks["expected"], label="exact, homogeneous blocks", **_EXACT)
    around = [blocks["replayed"] - blocks["low"], blocks["high"] - blocks["replayed"]]
    axes.errorbar(sizes, blocks["replayed"], yerr=around, label="replayed, 95 %", **REPLAYED)
    axes.plot(sizes, blocks["published"], label="published", **PUBLISHED)
    _scale(axes, sorted(sizes.unique()))
    axes.set_xlabel("block size (cells)")
    axes.set_ylabel("minibatch label entropy (bits)")
    axes.set_title("One minibatch to a fetch")
    axes.legend()


def _draw_batches(axes: Axes, batches: pd.DataFrame) -> None:
    numbers = sorted(batches["n_labels"].unique())
    shades = mpl.colormaps[COLOURS].resampled(len(numbers) + 1).colors  # type: ignore[attr-defined]
    for shade, n_labels in zip(shades, numbers, strict=False):
        part = batches[batches["n_labels"] == n_labels]
        axes.plot(part["batch_size"], part["exact"], color=shade, lw=1.5, label=f"{n_labels}")
        axes.plot(part["batch_size"], part["expansion"], color=shade, ls=":", lw=1.5)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    _scale(axes, sorted(batches["batch_size"].unique()))
    axes.set_xlabel("minibatch (cells)")
    axes.set_ylabel("entropy lacking (bits)")
    axes.set_title("Random sampling")
    axes.plot([], [], color=BOUND, ls=":", lw=1.5, label="expansion")
    axes.legend(title="labels, exact", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _scale(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=90)
    axes.minorticks_off()
