"""What of a fetch is brought before it is read: by stores of bytes, and by sources."""

from collections.abc import Sequence

from cellfeed._chunks import ChunkReads
from cellfeed._reading._parts import Part

__all__ = ["Ahead"]


class Ahead:
    """What is brought for a fetch: asked for when it begins, given up when it is let go.

    Parameters
    ----------
    reads
        Chunks that stores bring.
    parts
        Rows that sources bring; those of others are left out.
    """

    def __init__(self, reads: Sequence[ChunkReads], parts: Sequence[Part]) -> None:
        # All elements at once, so that what is side by side in a file comes together.
        self._reads = ChunkReads.concatenate(list(reads)) if reads else None
        self._parts = [part for part in parts if part.expected_bytes]
        self._coming = list[object]()
        chunks = 0 if self._reads is None else self._reads.brought_bytes
        self.n_bytes = chunks + sum(part.expected_bytes for part in self._parts)
        """Bytes of all, compressed; at most, where a chunk is all of its file."""

    def begin(self) -> None:
        """Tell stores and sources, which do not wait for it."""
        if self._reads is not None:
            self._coming += self._reads.readahead()
        self._coming += [part.stored.expect(part.runs) for part in self._parts]

    def let_go(self) -> None:
        """Give up what nobody has read by now."""
        self._coming = []
