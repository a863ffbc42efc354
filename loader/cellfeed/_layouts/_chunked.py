"""How rows are stored in chunks that are decoded here."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray, ChunkReads, RowRanges

__all__ = ["CsrChunks", "DenseChunks", "RaggedChunks", "RaggedRanges", "RaggedRuns", "RowPieces"]


@dataclass(frozen=True, slots=True, eq=False)
class CsrChunks:
    """Sparse rows in chunks.

    Parameters
    ----------
    indptr
        Where each row begins, ascending, int64, shape (n_rows + 1,).
    indices, data
        Column indices and values of all elements, of one dimension.
    n_columns
        Number of columns.
    row_pieces
        Where the arrays lie in pieces that hold whole rows; None if they are in one piece.
    n_skipped
        How many elements each row begins with that are left out.
    """

    indptr: NDArray[np.int64]
    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int
    row_pieces: "RowPieces | None" = None
    n_skipped: int = 0

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where rows begin in the arrays, and how many elements each has.

        Parameters
        ----------
        rows
            Their numbers, int64, shape (n,).
        """
        starts = self.indptr[rows]
        lengths = self.indptr[rows + 1] - starts
        if self.row_pieces is not None:
            starts = starts + self.row_pieces.gaps(rows)
        if self.n_skipped:
            starts, lengths = starts + self.n_skipped, np.maximum(lengths - self.n_skipped, 0)
        return starts, lengths


@dataclass(frozen=True, slots=True, eq=False)
class RowPieces:
    """Which rows the pieces of an array hold; int64 arrays of shape (n_pieces,).

    Parameters
    ----------
    first_rows
        First row of each piece, ascending.
    skipped
        Elements that are numbered, but not there, before each piece.
    """

    first_rows: NDArray[np.int64]
    skipped: NDArray[np.int64]

    def gaps(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many numbers are skipped before each row."""
        return self.skipped[np.searchsorted(self.first_rows, rows, side="right") - 1]


@dataclass(frozen=True, slots=True, eq=False)
class DenseChunks:
    """Dense rows in chunks.

    Parameters
    ----------
    values
        Shape (n_rows, n_columns), or the same in C order in one dimension.
    n_columns
        Number of columns.
    """

    values: ChunkedArray | RowRanges
    n_columns: int


class RaggedChunks(ABC):
    """Rows of any length, whose lengths are known before they are read."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""

    @abstractmethod
    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many values each of these rows has, int64, shape (n,)."""

    @abstractmethod
    def reads_of_rows(
        self, rows: NDArray[np.int64], destinations: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> ChunkReads:
        """Return what to read so that rows, which ascend, come to destinations as a dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRuns(RaggedChunks):
    """Rows that lie one after the other in an array of chunks.

    Parameters
    ----------
    indptr
        Where each row begins, ascending, int64, shape (n_rows + 1,).
    values
        Values of all rows, of one dimension.
    """

    indptr: NDArray[np.int64]
    values: ChunkedArray

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `RaggedChunks`."""
        return self.values.dtype

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `RaggedChunks`."""
        return self.indptr[rows + 1] - self.indptr[rows]

    def reads_of_rows(
        self, rows: NDArray[np.int64], destinations: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> ChunkReads:
        """See `RaggedChunks`."""
        lengths = self.lengths_of(rows)
        return self.values.reads_of_ranges(self.indptr[rows], lengths, destinations, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRanges(RaggedChunks):
    """Rows that each lie in byte ranges of plain files.

    Parameters
    ----------
    values
        The ranges.
    """

    values: RowRanges

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `RaggedChunks`."""
        return self.values.dtype

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `RaggedChunks`."""
        pieces, lengths = self.values.pieces(rows), np.zeros(rows.size, np.int64)
        np.add.at(lengths, pieces.rows, pieces.counts)
        return lengths

    def reads_of_rows(
        self, rows: NDArray[np.int64], destinations: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> ChunkReads:
        """See `RaggedChunks`."""
        return self.values.reads_of_rows(rows, destinations, dtype)
