"""Uncompressed rows in plain files, each in one byte range or a few."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._decode._array import ChunkedArray, Located
from cellfeed._decode._kernels import _fields as fields
from cellfeed._decode._kernels._codecs import STORED
from cellfeed._decode._placing import array_row
from cellfeed._decode._reads import ChunkReads

# Uncompressed arrays that are stored in pieces, which are read as chunks.

CHUNK_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of a one-dimensional array, each of which is read as chunks of `CHUNK_ELEMENTS`.

    The last chunk of each piece counts as whole, so the elements of the next piece are numbered
    from `firsts` times `CHUNK_ELEMENTS`.

    Parameters
    ----------
    files, offsets
        Number of each piece's file, and its position there in bytes, int64, shape (n_pieces,).
    sizes
        Number of elements in each piece, int64, shape (n_pieces,).
    itemsize
        Bytes per element.

    Attributes
    ----------
    firsts
        Number of the first chunk of each piece, and of all chunks, int64, shape (n_pieces + 1,).
    """

    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    itemsize: int
    firsts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        n_chunks = -(-self.sizes // CHUNK_ELEMENTS)
        object.__setattr__(self, "firsts", np.concatenate([[0], np.cumsum(n_chunks)]))

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Return the locations of the chunks with these numbers."""
        pieces = np.searchsorted(self.firsts, chunks, side="right") - 1
        first = (chunks - self.firsts[pieces]) * CHUNK_ELEMENTS
        n_elements = np.minimum(CHUNK_ELEMENTS, self.sizes[pieces] - first)
        return Located(
            files=self.files[pieces],
            offsets=self.offsets[pieces] + first * self.itemsize,
            sizes=n_elements * self.itemsize,
            flags=np.zeros(len(chunks), np.int64),
        )


def pieced_array(name: str, pieces: Pieces, dtype: np.dtype[Any], files: ByteStore) -> ChunkedArray:
    """Return an array that is stored in pieces.

    Parameters
    ----------
    name
        Its name in messages.
    pieces
        The pieces.
    dtype
        Native dtype of its elements.
    files
        The files of the pieces.
    """
    return ChunkedArray(
        name=name,
        shape=(int(pieces.firsts[-1]) * CHUNK_ELEMENTS,),
        dtype=dtype,
        chunk_shape=(CHUNK_ELEMENTS,),
        codec=STORED,
        locations=pieces,
        files=files,
    )


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
        chunks = np.zeros((n_pieces, fields.N_CHUNK_COLUMNS), np.int64)
        handles, in_memory = self.files.handles(pieces.files), 0
        if handles is None:  # the bytes are brought to memory before they are placed
            handles, in_memory = (pieces.files, None), fields.IN_MEMORY
        chunks[:, fields.FD], keep_alive = handles
        chunks[:, fields.OFFSET] = pieces.firsts * self.dtype.itemsize
        chunks[:, fields.SIZE] = pieces.counts * self.dtype.itemsize
        chunks[:, fields.FLAGS] = in_memory
        chunks[:, fields.FIRST_SEGMENT] = np.arange(n_pieces)
        chunks[:, fields.END_SEGMENT] = np.arange(n_pieces) + 1
        chunks[:, fields.NUMBER] = rows[pieces.rows]
        segments = np.zeros((n_pieces, fields.N_SEGMENT_COLUMNS), np.int64)
        segments[:, fields.COUNT] = pieces.counts
        segments[:, fields.TO] = destinations[pieces.rows] + pieces.within * out_dtype.itemsize
        segments[:, fields.WITHIN] = pieces.within
        array = array_row(self.dtype, out_dtype)
        array[fields.DECODED_BYTES] = int(chunks[:, fields.SIZE].max(initial=0))
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
