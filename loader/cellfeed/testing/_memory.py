"""Memory that detects writes outside of its bounds."""

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import Buffer, BufferPool

__all__ = ["GuardedPool"]

_GUARD_BYTES = 256
_MARK = 0xA5


class GuardedPool(BufferPool):
    """A pool whose buffers have exactly the requested size, with marked bytes on both sides.

    The buffers are filled with marks as well, so unwritten bytes are visible. No buffer is
    reused.

    Examples
    --------
    >>> pool = GuardedPool()
    >>> pool.acquire(3).array(np.dtype("uint8"), 4)[:] = 1
    >>> pool.check()
    Traceback (most recent call last):
    AssertionError: bytes were written outside of 3 bytes of memory
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[NDArray[np.uint8]] = []

    def acquire(self, n_bytes: int) -> Buffer:
        """Return memory of exactly ``n_bytes``."""
        piece = np.full(n_bytes + 2 * _GUARD_BYTES, _MARK, np.uint8)
        self._pieces.append(piece)
        return Buffer(piece[_GUARD_BYTES : _GUARD_BYTES + n_bytes])

    def check(self) -> None:
        """Check that nothing was written outside of the buffers.

        Raises
        ------
        AssertionError
            Bytes outside of a buffer were written.
        """
        for piece in self._pieces:
            sides = piece[:_GUARD_BYTES], piece[piece.size - _GUARD_BYTES :]
            if any((side != _MARK).any() for side in sides):
                n_bytes = piece.size - 2 * _GUARD_BYTES
                msg = f"bytes were written outside of {n_bytes} bytes of memory"
                raise AssertionError(msg)
