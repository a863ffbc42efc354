"""Sampling strategies: which rows an epoch visits, and in which order.

A strategy numbers the *positions* of an epoch, 0 .. n_positions - 1, and maps any of them to
a row. It keeps no state and permutes nothing in advance, so every position can be asked for
at any time in any process.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError, require_positive
from cellfeed.sampling._permutation import Permutation
from cellfeed.sampling._random import derive_key, random_below

__all__ = ["BlockShuffling", "SamplingStrategy", "Streaming"]

# Purposes of the random streams of one epoch.
_BLOCK_ORDER, _SHORT_BLOCK, _GRID_OFFSET = range(3)


class SamplingStrategy(ABC):
    """What the plan needs of a strategy; derive from it to write another."""

    @property
    @abstractmethod
    def shuffles_fetch(self) -> bool:
        """Whether the rows of one fetch leave in random order."""

    @abstractmethod
    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch over ``n_rows`` rows visits.

        Raises
        ------
        ParameterError
            The strategy asks for rows that do not exist.
        """

    @abstractmethod
    def rows_at(
        self, positions: NDArray[np.int64], *, n_rows: int, epoch_key: int
    ) -> NDArray[np.int64]:
        """Return the rows at the given positions of the epoch.

        Parameters
        ----------
        positions
            Values in [0, n_positions), of any shape.
        n_rows
            Number of rows of the collection.
        epoch_key
            64 bits that stand for (seed, epoch).

        Returns
        -------
        Rows in [0, n_rows), int64, in the shape of ``positions``.
        """


@dataclass(frozen=True, eq=False)
class Streaming(SamplingStrategy):
    """Visit the rows in storage order.

    Parameters
    ----------
    indices
        The rows to visit, one-dimensional integers; all rows if None. They are sorted, with
        a warning if they were not.
    shuffle
        Whether the rows within one fetch leave in random order (a shuffle buffer of
        ``batch_size * fetch_factor`` rows).

    Examples
    --------
    >>> Streaming(indices=[3, 5, 8]).n_positions(n_rows=10)
    3
    """

    indices: ArrayLike | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        """Check and sort the indices."""
        object.__setattr__(self, "indices", _sorted_indices(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the rows of one fetch leave in random order."""
        return self.shuffle

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits."""
        return _n_available(self.indices, n_rows)

    def rows_at(
        self, positions: NDArray[np.int64], *, n_rows: int, epoch_key: int
    ) -> NDArray[np.int64]:
        """Return the rows at the given positions."""
        del n_rows, epoch_key
        return _select(self.indices, positions)


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
        object.__setattr__(self, "indices", _sorted_indices(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Always true: blocks are mixed in memory."""
        return True

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits."""
        n_available = _n_available(self.indices, n_rows)
        return n_available - n_available % self.block_size if self.drop_last else n_available

    def rows_at(
        self, positions: NDArray[np.int64], *, n_rows: int, epoch_key: int
    ) -> NDArray[np.int64]:
        """Return the rows at the given positions."""
        n_blocks, n_left = divmod(_n_available(self.indices, n_rows), self.block_size)
        permute = Permutation(n_blocks, derive_key(epoch_key, _BLOCK_ORDER))
        if self.drop_last or not n_left:
            offset = random_below(derive_key(epoch_key, _GRID_OFFSET), n_left + 1)
            return _select(self.indices, self._in_blocks(positions, permute) + offset)
        slot = random_below(derive_key(epoch_key, _SHORT_BLOCK), n_blocks + 1)
        short_start = slot * self.block_size
        short_stop = short_start + n_left
        in_short = (positions >= short_start) & (positions < short_stop)
        whole = np.where(positions >= short_stop, positions - n_left, positions)
        whole[in_short] = 0
        selected = (
            self._in_blocks(whole, permute) if n_blocks else np.zeros_like(whole, dtype=np.int64)
        )
        selected[in_short] = positions[in_short] - short_start + n_blocks * self.block_size
        return _select(self.indices, selected)

    def _in_blocks(self, positions: NDArray[np.int64], permute: Permutation) -> NDArray[np.int64]:
        if self.block_size == 1 or not positions.size:
            return permute(positions)
        slots, within = np.divmod(positions, self.block_size)
        # A fetch asks for all rows of a block together, so each slot is permuted once.
        first, last = int(slots.min()), int(slots.max())
        if last - first < slots.size:
            blocks = permute(np.arange(first, last + 1))[slots - first]
        else:
            distinct, inverse = np.unique(slots, return_inverse=True)
            blocks = permute(distinct)[inverse.reshape(slots.shape)]
        rows: NDArray[np.int64] = blocks * self.block_size + within
        return rows


def _sorted_indices(indices: ArrayLike | None) -> NDArray[np.int64] | None:
    if indices is None:
        return None
    given = np.asarray(indices)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        msg = (
            "`indices` must be one-dimensional integers, at least one, "
            f"but got shape {given.shape} and dtype {given.dtype}"
        )
        raise ParameterError(msg)
    rows = given.astype(np.int64)
    if np.any(rows[1:] < rows[:-1]):
        warnings.warn(
            "`indices` were not sorted; they are visited in sorted order, as storage is read",
            UserWarning,
            stacklevel=4,
        )
        rows = np.sort(rows)
    if rows[0] < 0:
        msg = f"`indices >= 0` must hold, but the smallest is {rows[0]}"
        raise ParameterError(msg)
    return rows


def _n_available(indices: ArrayLike | None, n_rows: int) -> int:
    if indices is None:
        return n_rows
    rows = np.asarray(indices)
    if rows[-1] >= n_rows:
        msg = f"`indices < {n_rows}` (the number of rows) must hold, but the largest is {rows[-1]}"
        raise ParameterError(msg)
    return rows.size


def _select(indices: ArrayLike | None, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    if indices is None:
        return positions
    rows: NDArray[np.int64] = np.asarray(indices)[positions]
    return rows
