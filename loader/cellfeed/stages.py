"""The stages of a fetch, run one by one; a `CellDataset` runs them concurrently.

Use them to find out where the time of a cell goes: the time of a stage, less that of the stage
before it, is what the stage adds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from cellfeed._compiled import compiling_seconds
from cellfeed.bytes._remote import (  # noqa: F401 - which autotune passes between processes
    begin_with_requests,
    requests_under_way,
)
from cellfeed.collection import Collection
from cellfeed.fetch import PlannedRead, Reader
from cellfeed.rows import Cells
from cellfeed.rows._minibatch import Minibatch
from cellfeed.sampling import Fetch

__all__ = ["FetchStages", "Volume", "compiling_seconds"]


@dataclass(frozen=True, slots=True)
class Volume:
    """How much data a fetch decodes and uses, from chunks that are read as a whole.

    Parameters
    ----------
    n_chunks
        Number of chunks that it decodes, each once.
    decoded_bytes
        Bytes that are decompressed from these chunks, once they have been verified.
    useful_bytes
        Bytes of these that are used.
    """

    n_chunks: int
    decoded_bytes: int
    useful_bytes: int


class FetchStages:
    """The stages of a fetch, as methods of a context manager.

    Parameters
    ----------
    collection
        The `Collection` to read.
    batch_size
        Number of cells in a minibatch.
    num_threads
        Number of threads that read and decompress. If None, the number of processors available to
        this process.

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
        """Plan the reads of a fetch and the position of each row, without reading."""
        return self._reader.plan(fetch.rows, *fetch.in_groups(self._batch_size))

    def volume(self, planned: PlannedRead) -> Volume | None:
        """Return how much data of a fetch is decoded, and how much of that is used.

        Returns
        -------
        None if the format's own library reads; `read_bytes` and `decompress` do not exist then.
        """
        if not planned.is_decoded_here:
            return None
        chunks = planned.chunks
        return Volume(chunks.n_chunks, chunks.decoded_bytes, chunks.useful_bytes)

    def readahead(self, planned: PlannedRead) -> PlannedRead:
        """Announce the reads to the system; return the plan to use in place of the given one."""
        return planned.readahead()

    def read_bytes(self, planned: PlannedRead) -> int:
        """Read the compressed bytes of all chunks; return how many bytes these are."""
        return self._reader.read_bytes(planned)

    def decompress(self, planned: PlannedRead) -> None:
        """Read and decompress all chunks."""
        self._reader.decompress(planned)

    def read(self, planned: PlannedRead) -> Iterator[Cells]:
        """Read and decompress all chunks, and write the rows into minibatches.

        Each minibatch is followed by its controls or neighbours, if it has any.
        """
        return self._reader.read_planned(planned)

    def to_minibatches(self, groups: Iterator[Cells]) -> list[Minibatch]:
        """Make torch minibatches from the rows that were read."""
        return [cells.to_torch() for cells in groups]
