"""Requests for a fetch before it is read, to byte stores and to sources."""

from collections.abc import Sequence

from cellfeed._chunks import ChunkReads
from cellfeed._reading._parts import Part

__all__ = ["Ahead"]


class Ahead:
    """Requests for a fetch, which start with `begin` and are cancelled with `let_go`.

    Parameters
    ----------
    reads
        Chunks to request from byte stores.
    parts
        Rows to request from sources; sources without requests are left out.
    """

    def __init__(self, reads: Sequence[ChunkReads], parts: Sequence[Part]) -> None:
        # All elements at once, so that what is side by side in a file comes together.
        self._reads = ChunkReads.concatenate(list(reads)) if reads else None
        self._parts = [part for part in parts if part.expected_bytes]
        self._coming = list[object]()
        chunks = 0 if self._reads is None else self._reads.brought_bytes
        self.n_bytes = chunks + sum(part.expected_bytes for part in self._parts)
        """Number of compressed bytes; an upper bound for files of one chunk."""

    def begin(self) -> None:
        """Start the requests, without waiting."""
        if self._reads is not None:
            self._coming += self._reads.readahead()
        self._coming += [part.stored.expect(part.runs) for part in self._parts]

    def let_go(self) -> None:
        """Cancel requests that have not been read."""
        self._coming = []
