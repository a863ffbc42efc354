"""Bytes of a fetch that stores bring before it is read."""

from cellfeed._chunks import ChunkReads

__all__ = ["Ahead"]


class Ahead:
    """What stores bring for a fetch: told to them when it begins, given up when it is let go.

    Parameters
    ----------
    reads
        Chunks that stores bring.
    """

    def __init__(self, reads: ChunkReads) -> None:
        self.n_bytes = reads.brought_bytes
        """Bytes of all chunks, compressed; at most, where a chunk is all of its file."""
        self._reads = reads
        self._coming = list[object]()

    def begin(self) -> None:
        """Tell the stores, which do not wait for it."""
        self._coming = self._reads.readahead()

    def let_go(self) -> None:
        """Give up what nobody has read by now."""
        self._coming = []
