"""Blocks that begin at chunk boundaries, in random order; imported only when needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellfeed.sampling._base import BlockSizes, ChunkedRows, EpochOrder
from cellfeed.sampling._kernels import (
    CHUNK,
    FIRST_ROW,
    N_COLUMNS,
    POINTER,
    ROW,
    group_sizes,
    moments,
    rows_at,
)
from cellfeed.sampling._permutation import Permutation


@dataclass(frozen=True, eq=False)
class AlignedBlocks:
    """Blocks of equal size, each shifted to the next row that begins a chunk.

    Parameters
    ----------
    files
        The rows of each file.
    indices
        The rows to visit, ascending int64; empty for all rows.
    n
        The number of rows to visit.
    block_size
        Rows in a block before alignment.
    """

    files: Sequence[ChunkedRows]
    indices: NDArray[np.int64]
    n: int
    block_size: int
    _table: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Record the first row of each file, and keep `files`, which owns the memory."""
        firsts = np.cumsum([0, *(each.n_rows for each in self.files)])
        table = np.zeros((len(self.files) + 1, N_COLUMNS), np.int64)
        table[:, FIRST_ROW] = firsts
        for row, each in zip(table, self.files, strict=False):
            row[POINTER] = 0 if each.pointer is None else each.pointer.ctypes.data
            row[ROW], row[CHUNK] = each.row_size, each.chunk_size
        object.__setattr__(self, "_table", table)

    @property
    def n_blocks(self) -> int:
        """Number of blocks, including empty ones."""
        return -(-self.n // self.block_size)

    def sizes(self) -> BlockSizes:
        """Return the sizes of the blocks."""
        n_blocks, largest, squares = moments(self._table, self.indices, self.n, self.block_size)
        return BlockSizes(
            n_blocks=n_blocks, mean=self.n / n_blocks, largest=largest, effective=squares / self.n
        )

    def in_random_order(self, key: int) -> EpochOrder:
        """Return the row numbers below ``n``, with the blocks in random order."""
        keys = np.array(Permutation(self.n_blocks, key).round_keys, np.uint64)
        sizes = group_sizes(self._table, self.indices, self.n, self.block_size, keys)
        group_ends = np.cumsum(sizes)

        def numbers_at(positions: NDArray[np.int64], /) -> NDArray[np.int64]:
            flat = np.ascontiguousarray(positions).reshape(-1)
            order = None if np.all(flat[1:] >= flat[:-1]) else np.argsort(flat)
            ascending = flat if order is None else flat[order]
            found: NDArray[np.int64] = rows_at(
                ascending, group_ends, self._table, self.indices, self.n, self.block_size, keys
            )
            numbers = found
            if order is not None:
                numbers = np.empty_like(found)
                numbers[order] = found
            return numbers.reshape(positions.shape)

        return numbers_at
