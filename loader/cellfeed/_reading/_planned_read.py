"""The reads of a fetch, before memory is allocated for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkReads
from cellfeed._reading._ahead import Ahead
from cellfeed._reading._laid_out import ElementRead

__all__ = ["PlannedRead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """The reads of a fetch, before memory is allocated for it.

    Parameters
    ----------
    elements
        The read of each element.
    rows, obs, bounds
        Rows in the order of delivery, their obs columns, and the bounds of groups.
    ahead
        The requests for it, once they are computed.
    """

    elements: Mapping[str, ElementRead]
    rows: NDArray[np.int64]
    obs: Mapping[str, NDArray[Any]]
    bounds: NDArray[np.int64]
    ahead: Ahead | None = None

    @property
    def chunks(self) -> ChunkReads:
        """Chunks of all elements, for reading and decompressing without placing."""
        return ChunkReads.concatenate(self._reads)

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        return all(each.is_decoded_here for each in self.elements.values())

    @property
    def expected_bytes(self) -> int:
        """Number of compressed bytes that are requested for it; 0 before it is `advised`."""
        return 0 if self.ahead is None else self.ahead.n_bytes

    def advised(self) -> "PlannedRead":
        """Announce the reads to the system; return the same read with its requests."""
        reads = self._reads
        are_brought = [each.are_brought for each in reads]
        own = [each for each, is_brought in zip(reads, are_brought, strict=True) if not is_brought]
        if own:
            ChunkReads.advise(own)
        brought = [each.without_placing() for each in compress(reads, are_brought)]
        arriving = [part for each in self.elements.values() for part in each.arriving_parts]
        return replace(self, ahead=Ahead(brought, arriving))

    def begun(self) -> "PlannedRead":
        """Start the requests to stores and sources; return this, which keeps them alive."""
        if self.ahead is not None:
            self.ahead.begin()
        return self

    def readahead(self) -> "PlannedRead":
        """Announce the reads to the system, and start the requests to stores and sources.

        Returns
        -------
        The same read, which keeps the requests alive; read it in place of this one.
        """
        return self.advised().begun()

    def let_go(self) -> None:
        """Cancel requests that have not been read."""
        if self.ahead is not None:
            self.ahead.let_go()

    @property
    def _reads(self) -> list[ChunkReads]:
        return [reads for each in self.elements.values() for reads in each.chunks]
