"""How long a cell takes, from how long threads were busy with each of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["StageModel", "StageName"]

# Those of `cellfeed.Statistics`, where each is explained.
StageName = Literal[
    "planning",
    "reading",
    "decompressing",
    "placing",
    "library",
    "densifying",
    "making_tensors",
    "functions",
    "sending",
    "training",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Who does the stages of a fetch, side by side.

    While one fetch is delivered, the next is read by threads, and the one after it is planned. So a
    cell takes as long as the slowest of these lanes, and no less than all work of the processors
    divided among them:

    - reading: ``(reading + decompressing + placing) / threads + library``;
    - planning;
    - rows made dense, by as many threads;
    - the process that trains: tensors, your functions unless they have threads of their own, and
      the training step;
    - work: all of these, without waiting for bytes, functions and the training step, over the
      cores.

    Every worker process has lanes of its own, in which it also makes tensors and sends minibatches.

    Parameters
    ----------
    cores
        Cores that may be used.
    n_workers
        Worker processes.
    n_threads
        Threads that read in each process.
    n_function_threads
        Threads that your functions have in each; 0 if they have none of their own.
    """

    cores: float
    n_workers: int
    n_threads: int
    n_function_threads: int = 0

    def seconds_per_cell(
        self, stages: Mapping[StageName, float], *, without: StageName | None = None
    ) -> float:
        """Return the time of a cell, also if one stage took none.

        Parameters
        ----------
        stages
            Seconds that threads are busy with each stage, for each cell, added up over all
            threads and processes; those that are not there take none.
        without
            The stage that is thought away.
        """

        def of(*names: StageName) -> float:
            return sum(max(0.0, stages.get(name, 0.0)) for name in names if name != without)

        lanes = max(1, self.n_workers)
        decoding = of("reading", "decompressing", "placing") / self.n_threads
        delivering = of("making_tensors", "sending")
        work = of("planning", "decompressing", "placing", "library", "densifying") + delivering
        functions = of("functions")
        if not self.n_function_threads:
            delivering, functions = delivering + functions, 0.0
        return max(
            (decoding + of("library")) / lanes,
            of("planning") / lanes,
            of("densifying") / self.n_threads / lanes,
            functions / max(1, self.n_function_threads) / lanes,
            delivering / lanes if self.n_workers else delivering + of("training"),
            of("training"),
            work / self.cores,
        )
