"""How rows are stored in chunks that are decoded here."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray

__all__ = ["CsrChunks", "DenseChunks", "RowPieces"]


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

    values: ChunkedArray
    n_columns: int
