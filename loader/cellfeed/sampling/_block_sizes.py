"""How many rows blocks have."""

from dataclasses import dataclass

__all__ = ["BlockSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of the blocks of an epoch, in rows.

    Parameters
    ----------
    n_blocks
        How many blocks there are.
    mean, largest
        Mean size, and size of the largest.
    effective
        Mean size of the block that a row is in: ``E[s^2] / E[s]`` of sizes s. Blocks of this one
        size would mix as these do; see `cellfeed_tuner.theory.lower_bound_bits`.
    """

    n_blocks: int
    mean: float
    largest: int
    effective: float
