"""Label entropy over a whole grid, for which nothing is read."""

from collections.abc import Mapping, Sequence

from numpy.typing import ArrayLike

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._conditional_entropy import Conditional
from cellfeed_tuner._entropy._label_counts import LabelCounts
from cellfeed_tuner._entropy._label_entropy import LabelEntropy, Name, label_entropies
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._result import EntropyBits

__all__ = ["ENTROPY_ROWS", "entropies_with_theory", "replayed_entropies"]

ENTROPY_ROWS = 262_144
"""Rows of the plan that entropy is taken of."""


def replayed_entropies(
    labels: Mapping[Name, ArrayLike | Conditional],
    grid: Sequence[Configuration],
    batch_size: int,
    seed: int,
    on_progress: Progress,
) -> dict[Name, list[LabelEntropy]]:
    """Replay the plan of each (block size, fetch factor) of a grid over the labels.

    Size 1 of each is among them, so that the storage order can be told.
    """
    block_sizes = sorted({1, *(each.block_size for each in grid)})
    fetch_factors = sorted({1, *(each.fetch_factor for each in grid)})
    n_cells = len(block_sizes) * len(fetch_factors)
    return label_entropies(
        labels,
        batch_size=batch_size,
        block_sizes=block_sizes,
        fetch_factors=fetch_factors,
        n_rows=ENTROPY_ROWS,
        seed=seed,
        on_progress=lambda done: on_progress("entropy", done, n_cells),
    )


def entropies_with_theory(
    counted: LabelCounts, replayed: Sequence[LabelEntropy], batch_size: int
) -> dict[tuple[int, int], EntropyBits]:
    """Return the entropy of each (block size, fetch factor), with what theory says of it."""
    counts = counted.counts
    random = theory.random_entropy_bits(counts, batch_size, n_missing=counted.n_missing)
    return {
        (each.block_size, each.fetch_factor): EntropyBits(
            measured=None,
            expected=each.bits,
            homogeneous=theory.expected_entropy_bits(
                counts, batch_size, each.block_size, each.fetch_factor
            ),
            lower_bound=theory.lower_bound_bits(counts, batch_size, each.block_size),
            upper_bound=theory.upper_bound_bits(counts, batch_size),
            random=random,
        )
        for each in replayed
    }
