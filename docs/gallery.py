"""The pictures of the gallery of examples: `python docs/gallery.py`.

They show what an example is about, with plans and results where it has any. Nothing is measured.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from cellfeed import BlockShuffling, EpochPlan, Streaming
from cellfeed_tuner import AutotuneResult
from cellfeed_tuner.plots import COLOURS, STYLE

FOLDER = Path(__file__).parent / "images" / "gallery"
DEMO = Path(__file__).parent / "benchmarks" / "demo.json"
PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]  # Okabe and Ito
GREY, DARK = "#dddddd", "#23303f"
N_CELLS, N_PLATES = 96, 4
RNG = np.random.default_rng(0)


def delivered(strategy, fetch_factor=6):
    """Return the minibatches of 8 of an epoch, as rows of an array."""
    plan = EpochPlan(
        strategy=strategy, n_rows=N_CELLS, batch_size=8, fetch_factor=fetch_factor, seed=3
    )
    fetches = [plan.fetch(i) for i in range(plan.n_fetches)]
    return np.concatenate([each.rows[each.order] for each in fetches]).reshape(-1, 8)


def squares(axes, colours, *, gap=0.12, x=0.0, y=0.0):
    """Draw an array of colours as rows of squares; None leaves a square out."""
    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            if colour is not None:
                place = (x + column, y - row)
                axes.add_patch(mpl.patches.Rectangle(place, 1 - gap, 1 - gap, color=colour, lw=0))


def plates(minibatches):
    return [[PALETTE[row * N_PLATES // N_CELLS] for row in each] for each in minibatches]


def pytorch(axes):
    """Cells of plates in storage order, and in shuffled minibatches."""
    squares(axes, plates(delivered(Streaming())[::2]), x=0)
    squares(axes, plates(delivered(BlockShuffling(4))[:6]), x=13)
    arrow(axes, (9, -2), (12, -2))


def frameworks(axes):
    """A loss that goes down."""
    steps = np.arange(60)
    axes.plot(steps, np.exp(-steps / 15) + 0.1 * RNG.random(60), color=PALETTE[5], lw=2.5)
    axes.plot(steps, np.exp(-steps / 18) + 0.08, color=PALETTE[0], lw=2.5, ls="--")


def ranks(axes):
    """Minibatches of one epoch, divided among ranks."""
    for rank in range(3):
        squares(axes, plates(delivered(BlockShuffling(4))[rank::3][:3]), x=10 * rank)
        axes.text(10 * rank + 4, 1.6, f"rank {rank}", ha="center", fontsize=9, color=DARK)


def resume(axes):
    """An epoch that is stopped, and goes on on the next minibatch."""
    shown = delivered(BlockShuffling(4))
    done, rest = plates(shown[:5]), plates(shown[5:10])
    squares(axes, done, x=0)
    squares(axes, rest, x=13)
    axes.plot([10.4, 10.4], [1.2, -4.2], color=DARK, lw=2)
    axes.plot([11.4, 11.4], [1.2, -4.2], color=DARK, lw=2)


def balanced(axes):
    """Classes in the files, and in minibatches."""
    axes.bar([0, 1, 2], [9, 0.9, 0.3], color=PALETTE[:3], width=0.8)
    axes.bar([4.5, 5.5, 6.5], [3.3, 3.3, 3.3], color=PALETTE[:3], width=0.8)
    arrow(axes, (2.9, 4), (3.9, 4))


def sets(axes):
    """Minibatches of whole sets of one group each."""
    lines = [[PALETTE[k] for k in groups for _ in range(4)] for groups in ((0, 2), (1, 1), (3, 0))]
    for row, line in enumerate(lines):
        for each in range(2):
            squares(axes, [line[4 * each : 4 * each + 4]], x=5 * each, y=-1.5 * row)


def controls(axes):
    """Treated cells, each with its controls."""
    for k in range(4):
        squares(axes, [[PALETTE[5]]], x=3.5 * k)
        squares(axes, [[PALETTE[k % 2]] * 2], x=3.5 * k - 0.5, y=-2)
        axes.plot([3.5 * k + 0.44] * 2, [-0.1, -1], color=DARK, lw=1)


def masked(axes):
    """Cells as tokens, of which some are masked."""
    shades = mpl.colormaps[COLOURS](np.linspace(0.1, 0.95, 14))
    hidden = RNG.choice([True, False], (5, 14), p=[0.25, 0.75])
    squares(
        axes, [[GREY if off else c for off, c in zip(line, shades, strict=True)] for line in hidden]
    )


def tokens(axes):
    """Sequences of different lengths in one stream, and windows over it."""
    lengths = [9, 14, 6, 11]
    stream = [PALETTE[k] for k, n in enumerate(lengths) for _ in range(n)]
    squares(axes, [stream[:20], stream[20:]])
    for k in range(4):
        frame = mpl.patches.Rectangle((5 * k - 0.06, -0.06), 5, 1, fill=False, ec=DARK, lw=2)
        axes.add_patch(frame)


def storage(axes):
    """A sparse matrix, and a table of metadata beside it."""
    filled = RNG.choice([True, False], (6, 12), p=[0.3, 0.7])
    squares(axes, [[PALETTE[0] if each else GREY for each in line] for line in filled])
    squares(axes, [[PALETTE[k // 2], PALETTE[3 + k % 3]] for k in range(6)], x=13)


def latent(axes):
    """Cells of several types in two dimensions."""
    for k, centre in enumerate([(0, 0), (2.6, 1), (1, 2.4), (3.6, 3)]):
        axes.scatter(*(RNG.normal(centre, 0.42, (45, 2)).T), s=9, color=PALETTE[k], lw=0)


def tuned(axes):
    """Entropies of the grid of `make demo`, and the recommended configuration."""
    result = AutotuneResult.load(DEMO)
    grid = {
        (each.configuration.block_size, each.configuration.fetch_factor): each
        for each in result.configurations
    }
    blocks, factors = (sorted({each[k] for each in grid}, reverse=not k) for k in (0, 1))
    shares = [[grid[b, f].share_of_random for f in factors] for b in blocks]
    squares(axes, mpl.colormaps[COLOURS](np.clip(shares, 0, 1)))
    chosen = result.recommended.configuration
    place = factors.index(chosen.fetch_factor) - 0.06, -blocks.index(chosen.block_size) - 0.06
    axes.add_patch(mpl.patches.Rectangle(place, 1, 1, fill=False, ec=PALETTE[5], lw=3))


def arrow(axes, start, end):
    style = {"arrowstyle": "-|>", "color": DARK, "lw": 2, "mutation_scale": 14}
    axes.annotate("", end, start, arrowprops=style)


PICTURES = [
    pytorch, frameworks, ranks, resume, balanced, sets, controls, masked, tokens, storage, latent,
    tuned,
]  # fmt: skip
IN_SQUARES = {pytorch, ranks, resume, sets, controls, masked, tokens, storage, tuned}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(3, 1.5), layout="constrained")
            axes = figure.subplots()
            draw(axes)
            axes.margins(0.05)
            axes.autoscale_view()
            if draw in IN_SQUARES:
                axes.set_aspect("equal")
            axes.axis("off")
            figure.savefig(FOLDER / f"{draw.__name__}.png", dpi=120)
