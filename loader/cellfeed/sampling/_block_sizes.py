"""The sizes of blocks."""

from dataclasses import dataclass

__all__ = ["BlockSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of the blocks of an epoch, in rows.

    Parameters
    ----------
    n_blocks
        Number of blocks.
    mean, largest
        Mean and largest size.
    effective
        Mean size, over rows, of the block that a row is in: ``E[s^2] / E[s]`` for block sizes s.
        Blocks of this one size would mix equally well; see
        `cellfeed_tuner.theory.lower_bound_bits`.
    """

    n_blocks: int
    mean: float
    largest: int
    effective: float
