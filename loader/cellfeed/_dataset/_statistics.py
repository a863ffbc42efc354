"""What a data set has done so far, and how long each stage took."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from operator import add, sub
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import Counter

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What was done, and how long each stage took, in seconds.

    The stages of reading are added up over all threads and processes that do them, side by side
    with each other and with training. Whether training waits for them is said by
    ``waiting`` and ``training``, which follow each other in the training loop.

    Parameters
    ----------
    n_fetches, n_minibatches, n_cells
        Fetches that were planned, minibatches that the training loop has got, and cells that
        were made into minibatches.
    n_chunks, bytes_read, bytes_decompressed, bytes_used
        Chunks that were read, their bytes, those that came out of decompression, and those of
        them that are used; the format's own library may read others.
    planning
        Which rows, from which chunks, to which places; processor time.
    reading
        Waiting for bytes, from storage or the page cache.
    decompressing
        Of chunks, and undoing what else their values went through.
    placing
        Elements copied into minibatches, cast and transformed.
    library
        Reading by the format's own library, by a source of another kind, or by your
        ``fetch_callback``.
    densifying
        Sparse rows made dense.
    making_tensors
        Tensors made over what was read.
    functions
        Your functions of fetches and minibatches.
    sending
        Minibatches handed over by worker processes.
    waiting
        The training loop waited for the next minibatch.
    training
        What the training loop did in between.

    Examples
    --------
    ``after - before`` is what was done in between.
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
        """Return what `Counter` names, times in seconds."""
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
        """Share of the training loop's time in which it waited; NaN before the first minibatch."""
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
