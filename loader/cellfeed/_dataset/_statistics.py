"""Counts and times of a dataset's work, stage by stage."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from operator import add, sub
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._decode import Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts of the work done, and the time of each stage in seconds.

    The times of reading stages are sums over all threads and processes, which run concurrently with
    each other and with training. ``waiting`` and ``training`` are times of the training loop, one
    after the other, and show whether training waits for the loader.

    Parameters
    ----------
    n_fetches, n_minibatches, n_cells
        Fetches that were planned, minibatches that the training loop received, and cells that
        were made into minibatches.
    n_chunks, bytes_read, bytes_decompressed, bytes_used
        Chunks that were read, their stored bytes, their bytes after decompression, and how many
        of these were used. Chunks that the format's own library reads are not counted.
    planning
        Choosing rows, chunks and their positions in minibatches; CPU time.
    reading
        Waiting for bytes, from storage or the page cache.
    decompressing
        Decompressing chunks and undoing their filters.
    placing
        Copying elements into minibatches, with casts and transforms.
    library
        Reading by the format's own library, by a custom source, or by your ``fetch_callback``.
    densifying
        Making sparse rows dense.
    making_tensors
        Making tensors from the buffers that were read.
    functions
        Running your functions on fetches and minibatches.
    sending
        Sending minibatches from worker processes.
    waiting
        Time in which the training loop waited for the next minibatch.
    training
        Time of the training loop between minibatches.

    Examples
    --------
    ``after - before`` gives the work done in between.
    """

    n_fetches: int
    n_minibatches: int
    n_cells: int
    n_chunks: int
    bytes_read: int
    bytes_decompressed: int
    bytes_used: int
    planning: float
    reading: float
    decompressing: float
    placing: float
    library: float
    densifying: float
    making_tensors: float
    functions: float
    sending: float
    waiting: float
    training: float

    @classmethod
    def of(cls, counters: NDArray[np.int64]) -> Self:
        """Return the statistics of `Counter` values, with times in seconds."""
        counted = counters.tolist()
        n = Counter.PLANNING
        seconds = [nanoseconds / 1e9 for nanoseconds in counted[n:]]
        names = (each.name for each in fields(cls))
        return cls(**dict(zip(names, [*counted[:n], *seconds], strict=True)))

    def __sub__(self, other: Self) -> Self:
        return self._with(other, sub)

    def __add__(self, other: Self) -> Self:
        return self._with(other, add)

    @property
    def waiting_share(self) -> float:
        """Share of its time that the training loop waited; NaN before the first minibatch."""
        whole = self.waiting + self.training
        return self.waiting / whole if whole else float("nan")

    def __str__(self) -> str:
        waited = f"{self.waiting:,.2f} s ({self.waiting_share:.0%})"
        lines = [
            f"{self.n_cells:,} cells in {self.n_minibatches:,} minibatches",
            f"the training loop waited {waited} and trained {self.training:,.2f} s",
        ]
        per_cell = 1e6 / max(1, self.n_cells)
        names = [each.name for each in fields(self)]
        for name in names[Counter.PLANNING : Counter.WAITING]:
            seconds = getattr(self, name)
            if seconds:
                lines.append(f"{name.replace('_', ' '):<15}{seconds * per_cell:>9.2f} us per cell")
        return "\n".join(lines)

    def _with(self, other: Self, operation: Callable[[float, float], float]) -> Self:
        ours, theirs = asdict(self), asdict(other)
        values: dict[str, Any] = {name: operation(ours[name], theirs[name]) for name in ours}
        return type(self)(**values)
