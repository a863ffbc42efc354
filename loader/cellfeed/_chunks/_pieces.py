"""Uncompressed arrays that are stored in pieces, which are read as chunks."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._array import ChunkedArray, Located

__all__ = ["CHUNK_ELEMENTS", "Pieces", "pieced_array"]

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
        codec=kernels.STORED,
        locations=pieces,
        files=files,
    )
