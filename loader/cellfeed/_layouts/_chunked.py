"""Rows in chunked arrays that cellfeed decodes."""

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
        Row pointers, ascending, int64, shape (n_rows + 1,).
    indices, data
        Column indices and values of all elements, one-dimensional.
    n_columns
        Number of columns.
    row_pieces
        Pieces of the arrays, each with whole rows; None if the arrays are in one piece.
    n_skipped
        Number of elements at the beginning of each row that are left out.
    """

    indptr: NDArray[np.int64]
    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int
    row_pieces: "RowPieces | None" = None
    n_skipped: int = 0

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the starts of rows in the arrays, and the number of elements in each.

        Parameters
        ----------
        rows
            Row numbers, int64, shape (n,).
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
    """The rows of each piece of an array; int64 arrays of shape (n_pieces,).

    Parameters
    ----------
    first_rows
        First row of each piece, ascending.
    skipped
        Number of elements before each piece that are numbered but not stored.
    """

    first_rows: NDArray[np.int64]
    skipped: NDArray[np.int64]

    def gaps(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many element numbers are skipped before each row."""
        return self.skipped[np.searchsorted(self.first_rows, rows, side="right") - 1]


@dataclass(frozen=True, slots=True, eq=False)
class DenseChunks:
    """Dense rows in chunks.

    Parameters
    ----------
    values
        Array of shape (n_rows, n_columns), or the same values in C order in one dimension.
    n_columns
        Number of columns.
    """

    values: ChunkedArray | RowRanges
    n_columns: int


class RaggedChunks(ABC):
    """Ragged rows, whose lengths are known before they are read."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""

    @abstractmethod
    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of values in each of these rows, int64, shape (n,)."""

    @abstractmethod
    def reads_of_rows(
        self, rows: NDArray[np.int64], destinations: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> ChunkReads:
        """Return the reads of ascending rows to destinations, as a dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRuns(RaggedChunks):
    """Rows that are concatenated in a chunked array.

    Parameters
    ----------
    indptr
        Start of each row, and end of the last; ascending, int64, shape (n_rows + 1,).
    values
        Values of all rows, one-dimensional.
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
    """Rows that are each stored in byte ranges of plain files.

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
