"""Memory: a pool of it, and destinations in memory that is not there yet."""

from cellfeed._buffers._destinations import bind, destination
from cellfeed._buffers._pool import Buffer, BufferPool, array_at

__all__ = ["Buffer", "BufferPool", "array_at", "bind", "destination"]
