"""SLAF's score of randomness, computed from the plan of an epoch: no cell is read.

SLAF (https://slaf-project.github.io/slaf/benchmarks/ml_benchmarks/, "Entropy Measurement"; code in
``benchmarks/benchmark_dataloaders_entropy.py`` of github.com/slaf-project/slaf) takes a cell's
position in storage as its number, and publishes two distances of minibatches:

- within a minibatch: the mean of ``|a - b|`` over pairs of its cells;
- across minibatches: the mean of ``|a - b|`` over pairs of a cell and one of the next minibatch.

Each becomes a score: 0 for cells in storage order, 1 for cells at random,
``(distance - sequential) / (random - sequential)``. It publishes 0.880 and 0.900 for its own
loader, from 10,000 minibatches of 32 of 5,481,420 cells. Where SLAF draws pairs at random, the
mean over all pairs is taken here, which is what its draws estimate; and both references are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    EpochPlan,
    GroupedSampling,
    SamplingStrategy,
    Streaming,
)
from cellfeed.sampling import ChunkedRows, ChunkStarts
from cellfeed.synthetic import plate_sizes

# What SLAF publishes its scores for.
N_CELLS, N_MINIBATCHES, BATCH_SIZE = 5_481_420, 10_000, 32
PUBLISHED = {"SLAF, sequential": (0.0, 0.0), "SLAF, fragments": (0.001, 0.001),
             "SLAF, mixture of scanners (its default)": (0.880, 0.900)}  # fmt: skip

BLOCK_SIZES, FETCH_FACTORS = (1, 4, 16, 64, 256, 1024), (1, 16, 64, 256)
# The chunks that anndata writes, and the non-zeros of a cell of Tahoe-100M.
CHUNK_ELEMENTS, CELL_ELEMENTS = 24_047, 2_260
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Randomness:
    """SLAF's two scores: 0 for storage order, 1 for random cells."""

    within: float
    across: float


def randomness(cells: np.ndarray, n_cells: int) -> Randomness:
    """Return SLAF's scores of minibatches.

    Parameters
    ----------
    cells
        Positions in storage of the cells of consecutive minibatches, integers, shape
        (n_minibatches, batch_size), at least (2, 2).
    n_cells
        Cells of the collection, more than ``batch_size``.

    Examples
    --------
    >>> randomness(np.arange(64).reshape(2, 32), 1_000)
    Randomness(within=0.0, across=0.0)
    """
    size = cells.shape[1]
    n_pairs = size * (size - 1) / 2
    within = _sums_over_pairs(cells)
    of_both = _sums_over_pairs(np.concatenate([cells[:-1], cells[1:]], axis=1))
    across = of_both - within[:-1] - within[1:]  # without the pairs of one minibatch
    random = (n_cells + 1) / 3  # of two different cells, each pair equally likely
    return Randomness(
        within=_score(float(within.mean()) / n_pairs, (size + 1) / 3, random),
        across=_score(float(across.mean()) / size**2, size, random),
    )


def _score(distance: float, sequential: float, random: float) -> float:
    return (distance - sequential) / (random - sequential)


def _sums_over_pairs(cells: np.ndarray) -> np.ndarray:
    """Return the sum of ``|a - b|`` over all pairs of each row, float64, shape (n,)."""
    size = cells.shape[1]
    return np.sort(cells, axis=1) @ (2.0 * np.arange(size) - size + 1)


def of_strategy(
    strategy: SamplingStrategy,
    fetch_factor: int,
    *,
    n_cells: int = N_CELLS,
    n_minibatches: int = N_MINIBATCHES,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
) -> Randomness:
    """Return the scores of the first minibatches that a strategy plans.

    Whole fetches are taken, as few as have so many minibatches.
    """
    plan = EpochPlan(
        strategy=strategy,
        n_rows=n_cells,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        seed=seed,
    )
    n_fetches = min(-(-n_minibatches // fetch_factor), plan.n_whole_fetches)
    rows = plan.delivered_rows(0, n_fetches)
    return randomness(rows.reshape(-1, batch_size), n_cells)


def other_strategies(n_cells: int = N_CELLS) -> Iterator[tuple[str, SamplingStrategy]]:
    """Return strategies beside the grid of block sizes, on plates of the sizes of Tahoe-100M's."""
    sizes = plate_sizes(n_cells)
    plates = np.repeat(np.arange(sizes.size), sizes)
    stored = ChunkedRows(n_rows=n_cells, chunk_size=CHUNK_ELEMENTS, row_size=CELL_ELEMENTS)
    aligned = ChunkStarts(lambda: [stored])
    yield "`Streaming()`: storage order", Streaming()
    yield "`Streaming(shuffle=True)`: shuffled in each fetch", Streaming(shuffle=True)
    yield '`BlockShuffling(16, align="chunks")`', BlockShuffling(16, align=aligned)
    yield "`BlockWeightedSampling(16)`", BlockWeightedSampling(16)
    yield "`ClassBalancedSampling(plates, 16)`", ClassBalancedSampling(plates, 16)
    yield "`GroupedSampling(plates, 4)`", GroupedSampling(plates, set_size=4)


def table() -> str:
    """Return the scores of all settings as Markdown: within / across minibatches."""
    lines = [
        _line("", *(f"fetch factor {each}" for each in FETCH_FACTORS)),
        _line("---", *["---:"] * len(FETCH_FACTORS)),
    ]
    grid = [(f"`BlockShuffling({size})`", BlockShuffling(size)) for size in BLOCK_SIZES]
    for name, strategy in [*grid, *other_strategies()]:
        lines.append(_line(name, *(shown(of_strategy(strategy, f)) for f in FETCH_FACTORS)))
    for name, (within, across) in PUBLISHED.items():
        published = shown(Randomness(within, across))
        lines.append(_line(f"{name}, as published", published, *[""] * (len(FETCH_FACTORS) - 1)))
    return "\n".join(lines)


def shown(scores: Randomness) -> str:
    # `+ 0.0`, so that none is a negative zero.
    within, across = (f"{round(each, 3) + 0.0:.3f}" for each in (scores.within, scores.across))
    return f"{within}{_NO_BREAK}/{_NO_BREAK}{across}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
