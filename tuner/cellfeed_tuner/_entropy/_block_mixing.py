"""How well labels are mixed inside blocks, as the rows are stored."""

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner._entropy._minibatch_entropy import entropies_of

__all__ = ["within_block_bits"]

_ROWS_AT_ONCE = 1 << 17


def within_block_bits(codes: NDArray[np.integer], block_size: int) -> float:
    """Return the mean plug-in entropy of blocks, a short last one too, weighted by their rows.

    Takes the memory of some 100,000 rows, or of a block if that is larger.

    Parameters
    ----------
    codes
        Code of each row's label, block after block, -1 where missing, shape (n_rows,).
    block_size
        Rows of a block.

    Examples
    --------
    >>> sorted_labels = np.repeat([0, 1, 2, 3], 300)
    >>> [round(within_block_bits(sorted_labels, size), 3) for size in (10, 400)]
    [0.0, 0.874]
    """
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
