"""Memory that two processes share: pieces of one size, each with a mark while it is lent."""

import contextlib
import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers._pool import Bytes

__all__ = ["MOST_PIECES", "PAGE", "Remains", "Segment"]

PAGE = 4096
MOST_PIECES = PAGE  # of one segment: a byte each in its first page


class Segment:
    """Shared memory, of which a page is taken when it is first written to.

    The system frees it with the last process that has it mapped, however that ends.

    Parameters
    ----------
    descriptor
        A file in memory; may be closed then.
    number
        Which it is of those of its process.
    piece_bytes, n_pieces
        Size of a piece, a multiple of `PAGE`, and how many there are, at most `MOST_PIECES`.
    """

    __slots__ = ("_address", "_all", "_mapped", "is_lent", "n_pieces", "number", "piece_bytes")

    def __init__(self, descriptor: int, number: int, piece_bytes: int, n_pieces: int) -> None:
        self.number, self.piece_bytes, self.n_pieces = number, piece_bytes, n_pieces
        self._mapped = mmap.mmap(descriptor, self.size(piece_bytes, n_pieces))
        self._all = np.frombuffer(self._mapped, np.uint8)
        self._address: int = self._all.ctypes.data
        self.is_lent: NDArray[np.uint8] = self._all[:n_pieces]

    """Which pieces the other process has and clears, uint8, shape (n_pieces,)."""

    @staticmethod
    def size(piece_bytes: int, n_pieces: int) -> int:
        """Return the bytes of such a segment."""
        return PAGE + piece_bytes * n_pieces

    @classmethod
    def create(cls, number: int, piece_bytes: int, n_pieces: int) -> "tuple[Segment, int]":
        """Return a new segment, and the descriptor of its file.

        Raises
        ------
        OSError
            There is no memory or no descriptor left for it.
        """
        descriptor = os.memfd_create("cellfeed", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, cls.size(piece_bytes, n_pieces))
            return cls(descriptor, number, piece_bytes, n_pieces), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def piece(self, index: int) -> Bytes:
        """Return the memory of a piece, which keeps the segment."""
        start = PAGE + index * self.piece_bytes
        return self._all[start : start + self.piece_bytes]

    def address_of(self, index: int) -> int:
        """Return where a piece lies in this process."""
        return self._address + PAGE + index * self.piece_bytes

    def discard(self, index: int) -> None:
        """Give the memory of a piece back to the system; it is zero when it is used again."""
        self.remains(index).discard()

    def remains(self, index: int) -> "Remains":
        """Return what is left of a piece when the segment is gone and arrays over it are not."""
        return Remains(weakref.ref(self._mapped), PAGE + index * self.piece_bytes, self.piece_bytes)


@dataclass(frozen=True, slots=True)
class Remains:
    """A piece of a segment, which does not keep it."""

    mapped: weakref.ref[mmap.mmap]
    start: int
    n_bytes: int

    def discard(self) -> None:
        """Give its memory back to the system, if that is not done."""
        mapped = self.mapped()
        if mapped is not None:
            with contextlib.suppress(OSError):  # of a system that cannot, it is kept
                mapped.madvise(mmap.MADV_REMOVE, self.start, self.n_bytes)
