"""How long a cell takes, from what its stages take when each is done alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["StageModel", "StageName"]

StageName = Literal[
    "planning",  # which rows, from which chunks, to which places
    "disk",  # waiting for bytes that are not in the page cache
    "page cache",  # copying bytes out of the page cache
    "decompression",
    "memory",  # placing rows in the minibatches that they leave in
    "reading",  # by the format's library: decompression and memory, which cannot be told apart
    "transform",  # making tensors of what was placed
    "transfer",  # handing minibatches from worker processes to the training process
    "consumer",  # the training step
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Who does the stages of a fetch, side by side.

    While one fetch is delivered, the next is read by threads; when that begins, the one after it
    is planned and read ahead by the system. So a cell takes as long as the slowest of these lanes,
    and no less than all work of the processors divided among them:

    - reading: ``page cache + decompression + memory``;
    - planning, then waiting for the disk, which fetches from the announcement on, and copying;
    - making tensors; and the training step, which follows on that in the same process;
    - work: ``planning + threads x reading + transform + transfer``, over the cores.

    Every worker process has lanes of its own, all share the disk and the training process, and
    transfer is a part of what that does. What the format's library reads, it reads by one thread,
    and waits for the disk in between.

    Parameters
    ----------
    cores
        Cores that may be used.
    n_workers
        Worker processes.
    n_threads
        Threads that read in each process.
    """

    cores: float
    n_workers: int
    n_threads: int

    def seconds_per_cell(
        self, stages: Mapping[StageName, float], *, without: StageName | None = None
    ) -> float:
        """Return the time of a cell, also if one stage took none.

        Parameters
        ----------
        stages
            Seconds for each cell that a stage takes alone; those that are not there take none.
        without
            The stage that is thought away.
        """

        def of(*names: StageName) -> float:
            return sum(max(0.0, stages.get(name, 0.0)) for name in names if name != without)

        lanes = max(1, self.n_workers)
        decoding = of("page cache", "decompression", "memory")
        by_library, disk = of("reading"), of("disk")
        if "reading" in stages:
            by_library, disk = by_library + disk, 0.0
        training = of("consumer", "transfer" if self.n_workers else "transform")
        work = self.n_threads * decoding + of("planning", "reading", "transform", "transfer")
        return max(
            (decoding + by_library) / lanes,
            of("planning", "page cache") / lanes + disk,
            of("transform") / lanes,
            training,
            work / self.cores,
        )
