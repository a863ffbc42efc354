"""How well labels are mixed inside blocks, as the rows are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import ParameterError
from cellfeed_tuner._entropy._label_counts import LabelCounts, as_codes, count_labels
from cellfeed_tuner._entropy._minibatch_entropy import entropies_of

__all__ = ["BlockMixing", "block_mixing", "within_block_bits"]

_ROWS_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMixing:
    """Label entropy within blocks of one size.

    Parameters
    ----------
    block_size
        Rows of a block.
    within_bits
        Mean plug-in entropy of a block, over all blocks of the collection, the short last one
        among them, weighted by their rows.
    random_bits
        What that is expected to be if the rows were stored in random order: the same estimate
        over as many rows, which therefore has the same bias.
    """

    block_size: int
    within_bits: float
    random_bits: float

    @property
    def share_of_random(self) -> float:
        """0 where every block holds one label, about 1 where the rows are stored shuffled.

        More than 1 where labels take turns more evenly than chance would have it.
        """
        return self.within_bits / self.random_bits if self.random_bits else 1.0


def block_mixing(labels: ArrayLike, block_sizes: Sequence[int]) -> list[BlockMixing]:
    """Return how well labels are mixed inside blocks of each size, exactly.

    Takes the memory of some 100,000 rows, or of a block if that is larger.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, -1 where missing, shape (n_rows,).
    block_sizes
        Rows of a block.

    Raises
    ------
    ParameterError
        The labels are not a line of integers, or a size is below one.

    Examples
    --------
    >>> sorted_labels = np.repeat([0, 1, 2, 3], 300)
    >>> for each in block_mixing(sorted_labels, [10, 400]):
    ...     print(each.block_size, round(each.within_bits, 3), round(each.random_bits, 3))
    10 0.0 1.755
    400 0.874 1.996
    """
    codes = as_codes(labels)
    counted = count_labels(codes)
    return [
        BlockMixing(
            block_size=block_size,
            within_bits=within_block_bits(codes, block_size),
            random_bits=_random_bits(counted, block_size),
        )
        for block_size in block_sizes
    ]


def within_block_bits(codes: NDArray[np.integer], block_size: int) -> float:
    """Return the mean entropy of blocks, weighted by their rows; see `BlockMixing`."""
    if block_size < 1:
        msg = f"`block_size >= 1` must hold, but got {block_size=}"
        raise ParameterError(msg)
    at_once = max(1, _ROWS_AT_ONCE // block_size) * block_size
    whole = codes.size - codes.size % block_size
    total = sum(
        float(
            entropies_of(codes[start : min(start + at_once, whole)].reshape(-1, block_size)).sum()
        )
        for start in range(0, whole, at_once)
    )
    short = codes[whole:]
    in_short = float(entropies_of(short[None])[0]) if short.size else 0.0
    return (total * block_size + in_short * short.size) / codes.size


def _random_bits(counted: LabelCounts, block_size: int) -> float:
    bits, n_rows = counted.random_entropy_bits, counted.n_rows
    short = n_rows % block_size
    of_whole = bits(block_size) * (n_rows - short) if short < n_rows else 0.0
    return (of_whole + (bits(short) * short if short else 0.0)) / n_rows
