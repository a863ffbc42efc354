"""A fetch done stage by stage: what a `CellDataset` does side by side, each by itself.

For whoever wants to know where the time of a cell goes: by what a stage takes longer than the
one before it, what it adds is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from cellfeed._cells import Cells
from cellfeed._cells._minibatch import Minibatch
from cellfeed._collection import Collection
from cellfeed._reading import PlannedRead, Reader
from cellfeed._remote import begin_with_requests, requests_under_way
from cellfeed.sampling import Fetch

__all__ = ["FetchStages", "Volume", "begin_with_requests", "requests_under_way"]


@dataclass(frozen=True, slots=True)
class Volume:
    """What a fetch makes of chunks that are read as a whole.

    Parameters
    ----------
    n_chunks
        How many it decodes, each once.
    decoded_bytes
        Size of all its chunks as far as they are decompressed, once they have been checked.
    useful_bytes
        Size of what is used of them.
    """

    n_chunks: int
    decoded_bytes: int
    useful_bytes: int


class FetchStages:
    """The stages of one fetch; a context manager.

    Parameters
    ----------
    collection
        What is read.
    batch_size
        Cells of a minibatch.
    num_threads
        Threads that read and decompress; as many as the process may use processors if None.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from cellfeed import BlockShuffling, EpochPlan, open_collection
    >>> from cellfeed.synthetic import write_tahoe_like
    >>> paths = write_tahoe_like(
    ...     Path(tempfile.mkdtemp()), n_cells=100, n_genes=500, n_plates=2, n_drugs=4
    ... )
    >>> plan = EpochPlan(
    ...     strategy=BlockShuffling(block_size=5), n_rows=100, batch_size=10, fetch_factor=4, seed=0
    ... )
    >>> with FetchStages(open_collection(paths), batch_size=10) as stages:
    ...     planned = stages.plan(plan.fetch(0))
    ...     n_bytes = stages.read_bytes(planned)
    ...     stages.decompress(planned)
    ...     minibatches = stages.to_minibatches(stages.read(planned))
    >>> [len(minibatch) for minibatch in minibatches]
    [10, 10, 10, 10]
    """

    def __init__(
        self, collection: Collection, batch_size: int, *, num_threads: int | None = None
    ) -> None:
        self._reader = Reader(collection, num_threads=num_threads)
        self._batch_size = batch_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()

    def plan(self, fetch: Fetch) -> PlannedRead:
        """Plan what is read for a fetch, and where each row goes; nothing is read."""
        return self._reader.plan(fetch.rows, fetch.order, self._batch_size)

    def volume(self, planned: PlannedRead) -> Volume | None:
        """Return what the chunks of a fetch hold, and what is used of that.

        Returns
        -------
        None where the format's own library reads, so that the next two stages do not exist.
        """
        if not planned.is_decoded_here:
            return None
        chunks = planned.chunks
        return Volume(chunks.n_chunks, chunks.decoded_bytes, chunks.useful_bytes)

    def readahead(self, planned: PlannedRead) -> PlannedRead:
        """Tell the system what will be read; return what to read in place of what was planned."""
        return planned.readahead()

    def read_bytes(self, planned: PlannedRead) -> int:
        """Read the bytes of all chunks, which stay compressed; return how many there are."""
        return self._reader.read_bytes(planned)

    def decompress(self, planned: PlannedRead) -> None:
        """Read and decompress all chunks."""
        self._reader.decompress(planned)

    def read(self, planned: PlannedRead) -> Iterator[Cells]:
        """Read, decompress, and place the rows in the minibatches that they leave in."""
        return self._reader.read_planned(planned)

    def to_minibatches(self, groups: Iterator[Cells]) -> list[Minibatch]:
        """Make the rows that were read into minibatches of torch."""
        return [cells.to_torch() for cells in groups]
