"""Memory pools, and destinations in memory that is not allocated yet."""

from cellfeed._buffers._destinations import bind, destination, groups_of
from cellfeed._buffers._pool import Buffer, BufferPool, Lease, array_at
from cellfeed._buffers._segment import Remains, Segment
from cellfeed._buffers._shared_pool import Piece, SharedPool

__all__ = [
    "Buffer",
    "BufferPool",
    "Lease",
    "Piece",
    "Remains",
    "Segment",
    "SharedPool",
    "array_at",
    "bind",
    "destination",
    "groups_of",
]
