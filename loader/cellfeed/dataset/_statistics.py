"""Counts and times of a dataset's work, stage by stage."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add, sub
from typing import Any, Self

from cellfeed.decode import Counter, Counters


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
        were made into minibatches, without controls and neighbours.
    n_chunks, bytes_read, bytes_decompressed, bytes_used
        Chunks that were read, their stored bytes, their bytes after decompression, and how many
        of these were used. Chunks that the format's own library reads are not counted.
    n_tokens, n_unknown
        Tokens that tokenizers made, without padding, and values other than 0 that they left out
        since their genes are not in the vocabulary.
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
    tokenizing
        Making tokens of rows.
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
    n_tokens: int
    n_unknown: int
    planning: float
    reading: float
    decompressing: float
    placing: float
    library: float
    densifying: float
    tokenizing: float
    making_tensors: float
    functions: float
    sending: float
    waiting: float
    training: float

    def __sub__(self, other: Self) -> Self:
        return self._with(other, sub)

    def __add__(self, other: Self) -> Self:
        return self._with(other, add)

    @property
    def waiting_share(self) -> float:
        """Share of its time that the training loop waited; NaN before the first minibatch."""
        whole = self.waiting + self.training
        return self.waiting / whole if whole else float("nan")

    def scalars(self) -> dict[str, float]:
        """Return what is worth a curve: throughput, and the times of all stages.

        Returns
        -------
        ``cellfeed/cells_per_second`` of the training loop, ``cellfeed/waiting_share``, and for each
        stage its microseconds per cell, summed over threads, such as
        ``cellfeed/decompressing_us_per_cell``. Empty before the first minibatch.
        """
        seconds = self.waiting + self.training
        if not seconds:
            return {}
        found = {"cells_per_second": self.n_cells / seconds, "waiting_share": self.waiting_share}
        found |= {f"{name}_us_per_cell": each for name, each in self._stages().items()}
        return {f"cellfeed/{name}": float(value) for name, value in found.items()}

    def __str__(self) -> str:
        waited = f"{self.waiting:,.2f} s ({self.waiting_share:.0%})"
        lines = [
            f"{self.n_cells:,} cells in {self.n_minibatches:,} minibatches",
            f"the training loop waited {waited} and trained {self.training:,.2f} s",
        ]
        lines += [
            f"{name.replace('_', ' '):<15}{each:>9.2f} us per cell"
            for name, each in self._stages().items()
            if each
        ]
        return "\n".join(lines)

    def _stages(self) -> dict[str, float]:
        """Return the microseconds per cell of each stage."""
        names, per_cell = _NAMES[Counter.PLANNING : Counter.WAITING], 1e6 / max(1, self.n_cells)
        return {name: getattr(self, name) * per_cell for name in names}

    def _with(self, other: Self, operation: Callable[[float, float], float]) -> Self:
        values: dict[str, Any] = {
            name: operation(getattr(self, name), getattr(other, name)) for name in _NAMES
        }
        return type(self)(**values)


_NAMES = [each.name for each in fields(Statistics)]


def statistics_of(counters: Counters) -> Statistics:
    """Return the work of a dataset, and of datasets that it is made of; times in seconds."""
    values = counters.values
    # What only the dataset counts that the training loop iterates over.
    of_loop = [Counter.MINIBATCHES, Counter.WAITING, Counter.TRAINING]
    own = values[of_loop]
    for each in counters.parts:
        values += each.values
    values[of_loop] = own
    counted, n = values.tolist(), Counter.PLANNING
    seconds = [nanoseconds / 1e9 for nanoseconds in counted[n:]]
    return Statistics(**dict(zip(_NAMES, [*counted[:n], *seconds], strict=True)))
