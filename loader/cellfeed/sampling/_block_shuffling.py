"""Contiguous blocks of rows in random order."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from dataclasses import replace as changed
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError, require_positive
from cellfeed.sampling._base import (
    ABSENT_BY_DEFAULT,
    BlockSizes,
    ChunkedRows,
    EpochOrder,
    SamplingStrategy,
    among,
    n_available,
    sorted_indices,
)
from cellfeed.sampling._permutation import Permutation, derive_key, random_below

# Which rows are the first to begin in a chunk of storage.


@dataclass(frozen=True, eq=False)
class ChunkStarts:
    """Which rows of a collection are the first to begin in a chunk, computed on demand.

    This is ``align`` of a `BlockShuffling` that is bound to a collection. Only the row pointers are
    kept, in the memory that reading uses.

    Parameters
    ----------
    read
        Returns the rows of each file, in the order of the collection. Called once in each process
        that gets a pickled copy.

    Examples
    --------
    >>> dense = ChunkedRows(n_rows=10, chunk_size=4, row_size=1)
    >>> ChunkStarts(lambda: [dense]).blocks(None, 3).sizes()  # 4, 4 and 2 rows
    BlockSizes(n_blocks=3, mean=3.3333333333333335, largest=4, effective=3.6)
    """

    read: InitVar[Callable[[], Sequence[ChunkedRows]]]
    chunks: NDArray[np.int64] = field(init=False, repr=False)  # tell storage from other storage

    def __post_init__(self, read: Callable[[], Sequence[ChunkedRows]]) -> None:
        """Read the positions of the rows."""
        object.__setattr__(self, "_read", read)
        of_files = [(each.n_rows, each.chunk_size, each.n_elements) for each in self._files()]
        object.__setattr__(self, "chunks", np.array(of_files, np.int64).reshape(-1, 3))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}

    @property
    def n_rows(self) -> int:
        """Number of rows in all files."""
        return int(self.chunks[:, 0].sum())

    @property
    def is_chunked(self) -> bool:
        """Whether any row is in a chunk that is decompressed as a whole."""
        return bool(self.chunks[:, 1].any())

    def blocks(self, indices: NDArray[np.int64] | None, block_size: int) -> "AlignedBlocks":
        """Return the aligned blocks of all rows, or of the given ascending rows."""
        return AlignedBlocks(self._files(), indices, block_size)

    def _files(self) -> Sequence[ChunkedRows]:
        files: Sequence[ChunkedRows] | None = self.__dict__.get("_rows")
        if files is None:
            files = tuple(self.__dict__["_read"]())
            object.__setattr__(self, "_rows", files)
        return files


_AT_ONCE = 1 << 20  # blocks that are found together, so that this takes little memory
_GROUP = 128  # blocks; the number of rows is kept for each group


class AlignedBlocks:
    """Blocks of equal size, each shifted to the next row that begins a chunk.

    Parameters
    ----------
    files
        The rows of each file.
    indices
        The rows to visit, ascending int64; None for all rows.
    block_size
        Rows in a block before alignment.
    """

    def __init__(
        self, files: Sequence[ChunkedRows], indices: NDArray[np.int64] | None, block_size: int
    ) -> None:
        firsts = np.cumsum([0, *(each.n_rows for each in files)])
        n = self._n = int(firsts[-1]) if indices is None else indices.size
        size = self._block_size = min(block_size, max(1, n))
        self.n_blocks = -(-n // size)
        # By how many of the visited rows each block begins later; and 0 for the end of the last.
        self._shifts = np.zeros(self.n_blocks + 1, np.uint32)
        for start in range(1, self.n_blocks, _AT_ONCE):
            places = np.arange(start, min(start + _AT_ONCE, self.n_blocks)) * size
            rows, before = places, places - 1
            if indices is not None:
                rows, before = indices[places], indices[before]
            begins, bounds = np.empty_like(rows), np.searchsorted(rows, firsts)
            for each, first, pair in zip(files, firsts, pairwise(bounds), strict=False):
                own = slice(*pair)
                begins[own] = first + each.first_from(rows[own] - first, before[own] - first)
            if indices is not None:
                begins = np.where(begins == rows, places, np.searchsorted(indices, begins))
            self._shifts[start : start + places.size] = begins - places

    def sizes(self) -> BlockSizes:
        """Return the sizes of the blocks that have rows."""
        sizes = np.diff(self._begins(np.arange(self.n_blocks + 1)))
        n_blocks = int(np.count_nonzero(sizes))
        squares = float(np.square(sizes, dtype=np.float64).sum())
        return BlockSizes(
            n_blocks=n_blocks,
            mean=self._n / n_blocks,
            largest=int(sizes.max()),
            effective=squares / self._n,
        )

    def _begins(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the visited rows precede blocks; all of them for ``n_blocks``."""
        begins: NDArray[np.int64] = blocks * self._block_size + self._shifts[blocks]
        return np.minimum(begins, self._n)

    def in_random_order(self, key: int) -> EpochOrder:
        """Return the row numbers below ``n``, with the blocks in random order."""
        permute, totals = Permutation(self.n_blocks, key), [np.empty(0, np.int64)]
        for slot in range(0, self.n_blocks, _AT_ONCE):
            blocks = permute(np.arange(slot, min(slot + _AT_ONCE, self.n_blocks)))
            sizes = self._begins(blocks + 1) - self._begins(blocks)
            totals.append(np.add.reduceat(sizes, np.arange(0, sizes.size, _GROUP)))
        group_ends = np.cumsum(np.concatenate(totals))

        def numbers_at(positions: NDArray[np.int64], /) -> NDArray[np.int64]:
            flat = positions.ravel()
            groups = np.unique(np.searchsorted(group_ends, flat, side="right"))
            slots = (groups[:, None] * _GROUP + np.arange(_GROUP)).ravel()
            blocks = permute(slots[slots < self.n_blocks])
            begins = self._begins(blocks)
            sizes = self._begins(blocks + 1) - begins
            # Positions at which blocks end: those of a group follow the end of the one before.
            starts = np.arange(0, sizes.size, _GROUP)
            skipped = group_ends[groups] - np.cumsum(np.add.reduceat(sizes, starts))
            ends = np.cumsum(sizes) + np.repeat(skipped, np.diff(starts, append=sizes.size))
            which = np.searchsorted(ends, flat, side="right")
            numbers: NDArray[np.int64] = (begins + sizes - ends)[which] + flat
            return numbers.reshape(positions.shape)

        return numbers_at


# Purposes of the random streams of one epoch.
_BLOCK_ORDER, _SHORT_BLOCK, _GRID_OFFSET = range(3)


@dataclass(frozen=True, eq=False)
class BlockShuffling(SamplingStrategy):
    """Visit contiguous blocks of rows in random order, and shuffle within each fetch.

    This is the block sampling of scDataset: large blocks read faster, small blocks mix better, and
    a larger fetch factor makes up for large blocks.

    Parameters
    ----------
    block_size
        Number of rows in a block.
    indices
        The rows to visit, one-dimensional integers; all rows if None. A row that is given twice
        counts twice. They are sorted, with a warning if they were not. Blocks are contiguous in
        ``indices``.
    drop_last
        Whether to leave out the rows that do not fill a block. Which rows are left out, at
        the start and at the end, differs from epoch to epoch. If they are kept, they form one
        short block at a random place.
    align
        If "chunks", blocks begin at boundaries of stored chunks, so that each chunk is decompressed
        about once per epoch. Block k begins with the first row, from row ``k * block_size`` on,
        that begins in another chunk or file than the row before it; it ends where block k + 1
        begins. The chunks are those of the first element of the collection; for a sparse
        element, those of whichever of its two arrays has larger chunks. With ``indices``, row k is
        the k-th index, and the row before it is the index before it.

        Blocks then differ in size; see `block_sizes`. If fewer than ``block_size`` rows begin in a
        chunk, blocks have ``block_size`` rows on average, and exceed it by less than the rows of
        one chunk; if more do, each chunk is a block. A block reads the chunks in which its rows
        begin, which belong to no other block, and the head of one more chunk if its last row
        continues there.

        Rows that cellfeed does not decompress in chunks (rows of uncompressed arrays, of a
        database, or in memory) may each begin a block; if this holds for all rows, the order is
        the same as without ``align``. With ``drop_last``, the same number of rows is left out as
        without ``align``, at the end of the epoch's order.

    Raises
    ------
    ParameterError
        ``block_size`` is below one, ``indices`` cannot be used, or ``align`` is something else.
        When a strategy with ``align="chunks"`` is passed to a `CellDataset`: the collection is
        not a `Collection`.

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
    align: Literal["chunks"] | ChunkStarts | None = field(
        default=None, kw_only=True, metadata=ABSENT_BY_DEFAULT
    )

    def __post_init__(self) -> None:
        """Check the block size; check and sort the indices."""
        object.__setattr__(self, "block_size", require_positive("block_size", self.block_size))
        object.__setattr__(self, "indices", sorted_indices(self.indices))
        is_chunks = isinstance(self.align, str) and self.align == "chunks"
        if not is_chunks and not isinstance(self.align, ChunkStarts | None):
            msg = f'`align` must be "chunks" or None, but got {self.align!r}'
            raise ParameterError(msg)

    @property
    def shuffles_fetch(self) -> bool:
        """Always true: blocks are mixed in memory."""
        return True

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits."""
        n = n_available(self.indices, n_rows)
        return n - n % self.block_size if self.drop_last else n

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the order of the blocks in one epoch.

        If blocks are aligned, it takes 4 bytes for each.
        """
        n = n_available(self.indices, n_rows)
        blocks = self._aligned(n_rows)
        if blocks is not None:
            return among(self.indices, blocks.in_random_order(derive_key(epoch_key, _BLOCK_ORDER)))
        order = shuffled_blocks(n, self.block_size, epoch_key, drop_last=self.drop_last)
        return among(self.indices, order)

    def bound_to(self, collection: Any) -> "BlockShuffling":
        """Return the strategy with the chunks of the collection if ``align="chunks"``."""
        if self.align is None:
            return self
        if not hasattr(collection, "chunk_starts"):
            msg = (
                "align='chunks' needs a collection from `open_collection`, but got a "
                f"{type(collection).__name__}; leave `align` out"
            )
            raise ParameterError(msg)
        starts: ChunkStarts = collection.chunk_starts()
        if isinstance(self.align, ChunkStarts) and np.array_equal(starts.chunks, self.align.chunks):
            return self
        return changed(self, align=starts if starts.is_chunked else None)

    def block_sizes(self, n_rows: int) -> BlockSizes:
        """Return the sizes of blocks, including rows that ``drop_last`` leaves out.

        Parameters
        ----------
        n_rows
            Number of rows of the collection.

        Raises
        ------
        ParameterError
            ``n_rows`` is below one, or ``align`` is "chunks" and the chunks are not known yet; call
            ``bound_to(collection)`` first.

        Examples
        --------
        >>> BlockShuffling(4).block_sizes(n_rows=10)  # 4, 4 and 2 rows
        BlockSizes(n_blocks=3, mean=3.3333333333333335, largest=4, effective=3.6)
        """
        require_positive("n_rows", n_rows)
        blocks = self._aligned(n_rows)
        if blocks is not None:
            return blocks.sizes()
        n = n_available(self.indices, n_rows)
        n_whole, n_left = divmod(n, self.block_size)
        n_blocks = n_whole + (n_left > 0)
        return BlockSizes(
            n_blocks=n_blocks,
            mean=n / n_blocks,
            largest=min(n, self.block_size),
            effective=(n_whole * self.block_size**2 + n_left**2) / n,
        )

    def _aligned(self, n_rows: int) -> "AlignedBlocks | None":
        """Return the aligned blocks; None without ``align``."""
        if self.align is None:
            return None
        if not isinstance(self.align, ChunkStarts):
            msg = (
                "align='chunks' does not know the chunks yet; pass the strategy to a "
                "CellDataset, or call bound_to(collection)"
            )
            raise ParameterError(msg)
        if self.align.n_rows != n_rows:
            msg = (
                f"`align` is bound to a collection of {self.align.n_rows:,} rows, but this one "
                f"has {n_rows:,}; make a new strategy with align='chunks'"
            )
            raise ParameterError(msg)
        indices = None if self.indices is None else np.asarray(self.indices)
        return self.align.blocks(indices, self.block_size)


def shuffled_blocks(
    n: int, block_size: int, epoch_key: int, *, drop_last: bool = False
) -> EpochOrder:
    """Return the numbers below ``n`` as contiguous blocks in random order; see `BlockShuffling`."""
    n_blocks, n_left = divmod(n, block_size)
    permute = Permutation(n_blocks, derive_key(epoch_key, _BLOCK_ORDER))

    def in_whole_blocks(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if block_size == 1 or not positions.size:
            return permute(positions)
        slots, within = np.divmod(positions, block_size)
        # A fetch asks for all rows of a block together, so each slot is permuted once.
        first, last = int(slots.min()), int(slots.max())
        if last - first < slots.size:
            blocks = permute(np.arange(first, last + 1))[slots - first]
        else:
            distinct, inverse = np.unique(slots, return_inverse=True)
            blocks = permute(distinct)[inverse.reshape(slots.shape)]
        rows: NDArray[np.int64] = blocks * block_size + within
        return rows

    if drop_last or not n_left:
        first = random_below(derive_key(epoch_key, _GRID_OFFSET), n_left + 1)
        return lambda positions: in_whole_blocks(positions) + first
    # The rows after the last whole block are a short block at a random place.
    short_start = block_size * random_below(derive_key(epoch_key, _SHORT_BLOCK), n_blocks + 1)
    short_stop = short_start + n_left

    def rows_at(positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        in_short = (positions >= short_start) & (positions < short_stop)
        whole = np.where(positions >= short_stop, positions - n_left, positions)
        whole[in_short] = 0
        rows = in_whole_blocks(whole) if n_blocks else whole
        rows[in_short] = positions[in_short] - short_start + n_blocks * block_size
        return rows

    return rows_at


# Rows in storage order.


@dataclass(frozen=True, eq=False)
class Streaming(SamplingStrategy):
    """Visit the rows in storage order.

    Parameters
    ----------
    indices
        The rows to visit, one-dimensional integers; all rows if None. A row that is given twice
        counts twice. They are sorted, with a warning if they were not.
    shuffle
        Whether the rows of a fetch are delivered in random order (a shuffle buffer of
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
        object.__setattr__(self, "indices", sorted_indices(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the rows of a fetch are delivered in random order."""
        return self.shuffle

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits."""
        return n_available(self.indices, n_rows)

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the storage order, which is the same in every epoch."""
        del n_rows, epoch_key
        return among(self.indices, lambda positions: positions)
