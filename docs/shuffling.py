"""The picture of how minibatches are shuffled, from the plan itself: `python docs/shuffling.py`."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from cellfeed import BlockShuffling, EpochPlan
from cellfeed_tuner.plots import BOUND, STYLE

PICTURE = Path(__file__).parent / "images" / "shuffling.png"
N_CELLS, N_PLATES, BLOCK, BATCH, FETCH_FACTOR = 128, 4, 8, 16, 4
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"]  # of Okabe and Ito's palette
# A seed with which the first fetch has blocks of all plates.
SEED = 7


def plan_of(fetch_factor):
    return EpochPlan(
        strategy=BlockShuffling(BLOCK), n_rows=N_CELLS, batch_size=BATCH,
        fetch_factor=fetch_factor, seed=SEED, epoch=0,
    )  # fmt: skip


def delivered(plan):
    """Return the rows of an epoch in the order in which they are delivered."""
    fetches = [plan.fetch(i) for i in range(plan.n_fetches)]
    return np.concatenate([each.rows[each.order] for each in fetches])


def draw_cells(axes, rows, *, group, height=1.0):
    """Draw cells coloured by plate, in groups with a gap between them."""
    gap = 1.0
    for place, row in enumerate(rows):
        x = place + gap * (place // group)
        colour = COLOURS[row * N_PLATES // N_CELLS]
        axes.add_patch(Rectangle((x, 0), 1, height, facecolor=colour, edgecolor="white", lw=0.5))
    axes.set_xlim(-0.5, len(rows) + gap * (len(rows) // group) - 0.5)
    axes.set_ylim(-0.05, height + 0.05)
    axes.axis("off")


def frame(axes, group, n_groups, width):
    """Draw a box around every ``n_groups`` groups."""
    for k in range(N_CELLS // (group * n_groups)):
        x = k * n_groups * (group + 1) - 0.4
        axes.add_patch(
            Rectangle((x, -0.12), width * n_groups - 0.2, 1.24, fill=False, edgecolor="black",
                      lw=1.3, clip_on=False)
        )  # fmt: skip


def lines_between(figure, above, below, order):
    """Draw a line from each block that the first fetch reads to its position in the epoch."""
    for place, block in enumerate(order[: BATCH * FETCH_FACTOR // BLOCK]):
        figure.add_artist(
            ConnectionPatch(
                (block * (BLOCK + 1) + BLOCK / 2, 0), (place * (BLOCK + 1) + BLOCK / 2, 1),
                "data", "data", axesA=above, axesB=below, color="#aaaaaa", lw=0.9, zorder=-1,
            )
        )  # fmt: skip


def draw():
    plan, narrow = plan_of(FETCH_FACTOR), plan_of(1)
    in_blocks = plan.rows_at(np.arange(N_CELLS))
    n_blocks = BATCH * FETCH_FACTOR // BLOCK
    titles = [
        f"1  On disk: {N_PLATES} plates, one after the other, cut into blocks of {BLOCK} cells",
        f"2  Blocks in random order; a fetch (box) is {n_blocks} blocks, each read in one piece",
        f"3  The fetch is shuffled in memory and split into {FETCH_FACTOR} minibatches of {BATCH}",
        f"With a fetch factor of 1, each minibatch has cells from only {BATCH // BLOCK} blocks",
    ]
    with mpl.rc_context(STYLE | {"font.size": 10, "axes.titlesize": 10.5}):
        figure = Figure(figsize=(10, 4.9))
        all_axes = figure.subplots(4, 1)
        figure.subplots_adjust(left=0.01, right=0.99, top=0.93, bottom=0.1, hspace=1.25)
        shown = [np.arange(N_CELLS), in_blocks, delivered(plan), delivered(narrow)]
        for axes, title, rows, group in zip(
            all_axes, titles, shown, [BLOCK, BLOCK, BATCH, BATCH], strict=True
        ):
            draw_cells(axes, rows, group=group)
            # Below the cells, so that the lines between the first two rows cross no text.
            below = axes is not all_axes[0]
            axes.set_title(title, pad=9, y=-0.62 if below else 1.0)
        all_axes[3].title.set_color(BOUND)
        frame(all_axes[1], BLOCK, n_blocks, BLOCK + 1)
        lines_between(figure, all_axes[0], all_axes[1], in_blocks[::BLOCK] // BLOCK)
        for k, axes in ((FETCH_FACTOR, all_axes[2]), (1, all_axes[3])):
            frame(axes, BATCH, k, BATCH + 1)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=160)
