"""Memory that detects writes outside of its bounds."""

import numpy as np

from cellfeed.bytes import BufferPool
from cellfeed.bytes._buffers import Buffer

__all__ = ["GuardedPool"]

GUARD_BYTES = 256
MARK = 0xA5


class GuardedPool(BufferPool):
    """A pool whose buffers have exactly the requested size, with marked bytes on both sides.

    The buffers are filled with marks as well, so unwritten bytes are visible. No buffer is reused.
    """

    def __init__(self):
        super().__init__()
        self.pieces = []

    def acquire(self, n_bytes):
        piece = np.full(n_bytes + 2 * GUARD_BYTES, MARK, np.uint8)
        self.pieces.append(piece)
        return Buffer(piece[GUARD_BYTES : GUARD_BYTES + n_bytes])

    def check(self):
        for piece in self.pieces:
            for side in (piece[:GUARD_BYTES], piece[piece.size - GUARD_BYTES :]):
                assert (side == MARK).all(), "bytes were written outside of a buffer"
