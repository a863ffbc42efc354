"""Contiguous blocks of rows in random order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import require_positive
from cellfeed.sampling._base import EpochOrder, SamplingStrategy
from cellfeed.sampling._indices import among, n_available, sorted_indices
from cellfeed.sampling._permutation import Permutation
from cellfeed.sampling._random import derive_key, random_below

__all__ = ["BlockShuffling", "shuffled_blocks"]

# Purposes of the random streams of one epoch.
_BLOCK_ORDER, _SHORT_BLOCK, _GRID_OFFSET = range(3)


@dataclass(frozen=True, eq=False)
class BlockShuffling(SamplingStrategy):
    """Visit contiguous blocks of rows in random order, and shuffle within each fetch.

    The block sampling of scDataset: large blocks read fast, small blocks mix well, and a
    fetch of many minibatches makes up for large blocks.

    Parameters
    ----------
    block_size
        Rows in a block.
    indices
        The rows to visit, one-dimensional integers; all rows if None. They are sorted, with
        a warning if they were not. Blocks are contiguous in ``indices``.
    drop_last
        Whether to leave out the rows that do not fill a block. Which ones are left out, at
        the start and at the end, differs from epoch to epoch. If they are kept, they form one
        short block at a random place.

    Examples
    --------
    >>> BlockShuffling(block_size=4).n_positions(n_rows=10)
    10
    >>> BlockShuffling(block_size=4, drop_last=True).n_positions(n_rows=10)
    8
    """

    block_size: int = 8
    indices: ArrayLike | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        """Check the block size; check and sort the indices."""
        object.__setattr__(self, "block_size", require_positive("block_size", self.block_size))
        object.__setattr__(self, "indices", sorted_indices(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Always true: blocks are mixed in memory."""
        return True

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits."""
        n = n_available(self.indices, n_rows)
        return n - n % self.block_size if self.drop_last else n

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the order of the blocks in one epoch; keeps nothing that grows."""
        n = n_available(self.indices, n_rows)
        order = shuffled_blocks(n, self.block_size, epoch_key, drop_last=self.drop_last)
        return among(self.indices, order)


def shuffled_blocks(
    n: int, block_size: int, epoch_key: int, *, drop_last: bool = False
) -> EpochOrder:
    """Return the numbers below ``n`` in contiguous blocks in random order; see `BlockShuffling`."""
    n_blocks, n_left = divmod(n, block_size)
    has_short = n_left > 0 and not drop_last
    slot = random_below(derive_key(epoch_key, _SHORT_BLOCK), n_blocks + 1)
    first = random_below(derive_key(epoch_key, _GRID_OFFSET), n_left + 1)
    return _BlockOrder(
        block_size=block_size,
        permute=Permutation(n_blocks, derive_key(epoch_key, _BLOCK_ORDER)),
        first=0 if has_short else first,
        short_start=slot * block_size,
        short_size=n_left if has_short else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockOrder:
    """Blocks of rows in random order.

    Parameters
    ----------
    block_size
        Rows in a block.
    permute
        Order of the whole blocks.
    first
        The row that the first whole block starts with.
    short_start, short_size
        Position and size of the block of the rows after the last whole one; size 0 without it.
    """

    block_size: int
    permute: Permutation
    first: int
    short_start: int
    short_size: int

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the rows at the given positions."""
        if not self.short_size:
            return self._in_whole_blocks(positions) + self.first
        short_stop = self.short_start + self.short_size
        in_short = (positions >= self.short_start) & (positions < short_stop)
        whole = np.where(positions >= short_stop, positions - self.short_size, positions)
        whole[in_short] = 0
        rows = self._in_whole_blocks(whole) if self.permute.n else whole
        last = self.permute.n * self.block_size
        rows[in_short] = positions[in_short] - self.short_start + last
        return rows

    def _in_whole_blocks(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.block_size == 1 or not positions.size:
            return self.permute(positions)
        slots, within = np.divmod(positions, self.block_size)
        # A fetch asks for all rows of a block together, so each slot is permuted once.
        first, last = int(slots.min()), int(slots.max())
        if last - first < slots.size:
            blocks = self.permute(np.arange(first, last + 1))[slots - first]
        else:
            distinct, inverse = np.unique(slots, return_inverse=True)
            blocks = self.permute(distinct)[inverse.reshape(slots.shape)]
        rows: NDArray[np.int64] = blocks * self.block_size + within
        return rows
