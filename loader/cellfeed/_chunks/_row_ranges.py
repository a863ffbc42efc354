"""Uncompressed rows in plain files, each in one byte range or a few."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._placing import array_row
from cellfeed._chunks._reads import ChunkReads

__all__ = ["RowExtents", "RowRanges"]


@dataclass(frozen=True, slots=True, eq=False)
class RowExtents:
    """Byte ranges of rows, row by row; arrays are int64, shape (n_pieces,).

    Parameters
    ----------
    rows
        Index of each piece's row among the requested rows, ascending.
    files, firsts
        File of each piece, and its first element there.
    counts
        Number of elements in each piece, above zero.
    within
        Position of its first element in the row.
    """

    rows: NDArray[np.int64]
    files: NDArray[np.int64]
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    within: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowRanges:
    """Rows of uncompressed elements, each in one byte range or a few.

    The ranges need not form a grid, and may overlap. Each piece takes one read; adjacent pieces are
    read together.

    Parameters
    ----------
    name
        Name of the array, for messages.
    shape
        Number of rows and, if all rows have equally many, of elements per row.
    dtype
        Native dtype of the elements, which may be structured.
    files
        The files.
    pieces
        Returns the byte ranges of ascending rows, int64, shape (n,).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    files: ByteStore
    pieces: Callable[[NDArray[np.int64]], RowExtents]

    def reads_of_rows(
        self,
        rows: NDArray[np.int64],
        destinations: NDArray[np.int64],
        out_dtype: np.dtype[Any],
    ) -> ChunkReads:
        """Return the reads for rows.

        Parameters
        ----------
        rows
            Ascending rows, int64, shape (n,).
        destinations
            Destination address of each row, int64, shape (n,).
        out_dtype
            Dtype at the destinations.
        """
        pieces = self.pieces(rows)
        n_pieces = pieces.rows.size
        chunks = np.zeros((n_pieces, kernels.N_CHUNK_COLUMNS), np.int64)
        handles, in_memory = self.files.handles(pieces.files), 0
        if handles is None:  # the bytes are brought to memory before they are placed
            handles, in_memory = (pieces.files, None), kernels.IN_MEMORY
        chunks[:, kernels.FD], keep_alive = handles
        chunks[:, kernels.OFFSET] = pieces.firsts * self.dtype.itemsize
        chunks[:, kernels.SIZE] = pieces.counts * self.dtype.itemsize
        chunks[:, kernels.FLAGS] = in_memory
        chunks[:, kernels.FIRST_SEGMENT] = np.arange(n_pieces)
        chunks[:, kernels.END_SEGMENT] = np.arange(n_pieces) + 1
        chunks[:, kernels.NUMBER] = rows[pieces.rows]
        segments = np.zeros((n_pieces, kernels.N_SEGMENT_COLUMNS), np.int64)
        segments[:, kernels.COUNT] = pieces.counts
        segments[:, kernels.TO] = destinations[pieces.rows] + pieces.within * out_dtype.itemsize
        segments[:, kernels.WITHIN] = pieces.within
        array = array_row(self.dtype, out_dtype)
        array[kernels.DECODED_BYTES] = int(chunks[:, kernels.SIZE].max(initial=0))
        return ChunkReads(
            arrays=array[None],
            chunks=chunks,
            segments=segments,
            owners=(self,),
            keep_alive=(keep_alive,),
        )

    def describe(self, chunk: int) -> str:
        """Return the location of a row, for a message."""
        pieces = self.pieces(np.array([chunk], np.int64))
        where = {str(self.files.location_of(file)): None for file in pieces.files.tolist()}
        first = int(pieces.firsts[0]) * self.dtype.itemsize
        size = int(pieces.counts[0]) * self.dtype.itemsize
        return f"{', '.join(where)}: `{self.name}`, row {chunk} (bytes {first} to {first + size})"
