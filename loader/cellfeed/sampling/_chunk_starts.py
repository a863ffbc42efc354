"""Which rows are the first to begin in a chunk of storage."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.sampling._chunked_rows import ChunkedRows

if TYPE_CHECKING:
    from cellfeed.sampling._aligned_blocks import AlignedBlocks

__all__ = ["ChunkStarts"]


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
        # It needs numba, which only those wait for who ask for it.
        from cellfeed.sampling._aligned_blocks import AlignedBlocks  # noqa: PLC0415

        n = self.n_rows if indices is None else indices.size
        rows = np.empty(0, np.int64) if indices is None else indices
        return AlignedBlocks(self._files(), rows, n, min(block_size, max(1, n)))

    def _files(self) -> Sequence[ChunkedRows]:
        files: Sequence[ChunkedRows] | None = self.__dict__.get("_rows")
        if files is None:
            files = tuple(self.__dict__["_read"]())
            object.__setattr__(self, "_rows", files)
        return files
