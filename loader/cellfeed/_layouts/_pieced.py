"""Sparse rows in chunks, of which each lies in several ranges of the stored arrays."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray, ChunkReads
from cellfeed._layouts._csr import CsrTarget

__all__ = ["CsrPieces", "PiecedCsr"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CsrPieces:
    """The ranges that some rows lie in; arrays are int64, those of pieces of shape (n_pieces,).

    Parameters
    ----------
    indices, data
        Column indices and values of all elements, of one dimension.
    n_columns
        Number of columns.
    lengths
        Elements of each row, shape (n_rows,).
    rows
        Which of the rows each piece belongs to; of one row, in their order.
    index_starts, data_starts
        Where pieces begin in the arrays, ascending.
    counts
        Their elements.
    before
        Elements of their rows that come before them.
    """

    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    index_starts: NDArray[np.int64]
    data_starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    before: NDArray[np.int64]

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that the rows take, of which nothing can be placed."""
        nowhere = np.zeros_like(self.counts)
        return [
            array.reads_of_ranges(starts, self.counts, nowhere, array.dtype)
            for array, starts in ((self.indices, self.index_starts), (self.data, self.data_starts))
        ]

    def reads_to(self, target: CsrTarget, column_map: NDArray[np.int32] | None) -> list[ChunkReads]:
        """Return what to read so that the rows come to a target.

        Parameters
        ----------
        target
            Where they go, as a dtype that the values can be cast to.
        column_map
            What each stored column becomes, none of which is left out; None if they stay.
        """
        size = target.index_dtype.itemsize
        destinations = target.index_destinations[self.rows] + self.before * size
        indices = self.indices.reads_of_ranges(
            self.index_starts,
            self.counts,
            destinations,
            target.index_dtype,
            index_limit=self.n_columns,
            column_map=column_map,
        )
        crossings = np.concatenate([indices.crossings[size], destinations[self.before > 0]])
        data = self.data.reads_of_ranges(
            self.data_starts,
            self.counts,
            target.data_destinations[self.rows] + self.before * target.dtype.itemsize,
            target.dtype,
        )
        return [replace(indices, crossings={size: crossings}), data]

    def reads_selecting(self, column_map: NDArray[np.int32]) -> ChunkReads:
        """Return what to read for `ChunkReads.select`, with pieces in place of rows.

        Parameters
        ----------
        column_map
            What each stored column becomes, -1 if it is left out.
        """
        return self.indices.reads_selecting(self.index_starts, self.counts, column_map=column_map)


class PiecedCsr(ABC):
    """Sparse rows in chunks that lie in several ranges each."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""

    @abstractmethod
    def pieces(self, rows: NDArray[np.int64]) -> CsrPieces:
        """Return where rows lie.

        Parameters
        ----------
        rows
            Ascending, int64, shape (n,).

        Raises
        ------
        FormatError
            The storage is damaged.
        """
