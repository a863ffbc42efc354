"""Counts and times of a dataset's work, stage by stage."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from operator import add, sub
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, require_positive
from cellfeed._torch import require_torch, torch
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

    def scalars(self) -> dict[str, float]:
        """Return what is worth a curve: throughput, and the times of all stages.

        Returns
        -------
        ``cellfeed/cells_per_second`` of the training loop, ``cellfeed/waiting_share``, and for each
        stage its microseconds per cell, summed over threads, such as
        ``cellfeed/decompressing_us_per_cell``. Empty before the first minibatch.
        """
        seconds, per_cell = self.waiting + self.training, 1e6 / max(1, self.n_cells)
        if not seconds:
            return {}
        found = {"cells_per_second": self.n_cells / seconds, "waiting_share": self.waiting_share}
        for name in [each.name for each in fields(self)][Counter.PLANNING : Counter.WAITING]:
            found[f"{name}_us_per_cell"] = getattr(self, name) * per_cell
        return {f"cellfeed/{name}": float(value) for name, value in found.items()}

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


def ranges_of(profiler: str) -> Callable[[str], AbstractContextManager[Any]]:
    """Return a function that makes a named range for a profiler; see `CellDataset.annotate`.

    Raises
    ------
    ParameterError
        There is no such profiler.
    ImportError
        torch is not installed.
    """
    require_torch("`annotate`")
    if profiler == "torch":
        return torch.profiler.record_function
    if profiler != "nvtx":
        msg = f"`profiler` must be 'torch', 'nvtx' or None, but got {profiler!r}"
        raise ParameterError(msg)
    if not hasattr(torch._C, "_nvtx"):  # noqa: SLF001 - there is no other way
        msg = "this torch has no NVTX, as it is built without CUDA; use annotate('torch')"
        raise ParameterError(msg)
    return torch.cuda.nvtx.range


class StatisticsLog:
    """Logs the statistics of every so many minibatches.

    Parameters
    ----------
    counters
        Counters of a dataset, and of datasets that it is made of.
    log
        See `CellDataset.log_statistics`.
    every
        Number of minibatches.
    """

    def __init__(self, counters: Sequence[Counters], log: Any, every: int) -> None:
        if not (callable(log) or hasattr(log, "add_scalar")):
            msg = (
                "`log` must be a function of (values, step), such as `wandb.log` or "
                f"`logger.log_metrics`, or a SummaryWriter of TensorBoard, but got {log!r}"
            )
            raise ParameterError(msg)
        self._counters, self._log = counters, log
        self._every = require_positive("every", every)
        self._before = self._now()

    def __call__(self) -> None:
        """Log, if a minibatch that was just delivered is due."""
        step = int(self._counters[0].values[Counter.MINIBATCHES])
        if step % self._every:
            return
        now = self._now()
        values, self._before = (now - self._before).scalars(), now
        if callable(self._log):
            self._log(values, step)
            return
        for name, value in values.items():
            self._log.add_scalar(name, value, step)

    def _now(self) -> Statistics:
        return statistics_of(self._counters)


def statistics_of(counters: Sequence[Counters]) -> Statistics:
    """Return the work of a dataset, and of datasets that it is made of.

    Parameters
    ----------
    counters
        Counters of the one that the training loop iterates over, and of the others.
    """
    return Statistics.of(_values_of(counters))


def _values_of(counters: Sequence[Counters]) -> NDArray[np.int64]:
    own, *parts = [each.values for each in counters]
    if not parts:
        return own
    of_loop = own[_OF_LOOP]
    own += np.sum(parts, axis=0)
    own[_OF_LOOP] = of_loop
    return own


# What only the dataset counts that the training loop iterates over.
_OF_LOOP = [Counter.MINIBATCHES, Counter.WAITING, Counter.TRAINING]
# Fetches that are kept, and the end of the one before them.
_SIZE = 1 + 1000
# Fewest and most fetches that are compared with those before, and seconds that they take unless
# they are the most; those before are at least so many times as many. Chosen: a single slow fetch
# says nothing, and 2 s are short beside a training.
_FEWEST_COMPARED, _MOST_COMPARED, _SECONDS_COMPARED, _TIMES_BEFORE = 16, 250, 2.0, 3
# Throughput that has fallen to this share is warned of, if this share of the longer time is
# waiting. Chosen.
_FALLEN, _MOSTLY = 0.5, 0.5
_SECOND = 1e9

_logger = logging.getLogger("cellfeed")


class StatisticsHistory:
    """Counts at the end of each of the last fetches that the training loop received.

    Warns if throughput falls by half because of loading.

    Parameters
    ----------
    counters
        Counters of a dataset, and of datasets that it is made of.
    """

    def __init__(self, counters: Sequence[Counters]) -> None:
        self.counters, self.every = counters, 1
        self._n_minibatches = 0  # since the last entry
        self._times = np.zeros(_SIZE)
        self._counted = np.zeros((_SIZE, len(Counter)), np.int64)
        self._n = 1  # entries so far; the first one is the start
        self._compared, self._since = 1, 0  # up to where, and since when, fetches were compared
        self._times[0] = time.time()

    def __call__(self) -> None:
        """Count a minibatch; called after each."""
        self._n_minibatches += 1
        if self._n_minibatches < self.every:
            return
        self._n_minibatches = 0
        place = self._n % _SIZE
        self._times[place], self._counted[place] = time.time(), _values_of(self.counters)
        self._n += 1
        if self._n - self._compared >= _FEWEST_COMPARED:
            self._compare()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what was counted in each fetch; see `CellDataset.history`."""
        places = self._places(max(0, self._n - _SIZE), self._n)
        counted = np.diff(self._counted[places], axis=0)
        found: dict[str, NDArray[Any]] = {"time": self._times[places[1:]]}
        for counter, name in enumerate(each.name for each in fields(Statistics)):
            is_time = counter >= Counter.PLANNING
            found[name] = counted[:, counter] / _SECOND if is_time else counted[:, counter]
        return found

    def _places(self, begin: int, end: int) -> NDArray[np.intp]:
        return np.arange(begin, end) % _SIZE

    def _compare(self) -> None:
        """Compare the latest fetches with those before, once they are enough."""
        begin, n = self._compared - 1, self._n - self._compared
        taken = self._counted[(self._n - 1) % _SIZE] - self._counted[begin % _SIZE]
        seconds = (taken[Counter.WAITING] + taken[Counter.TRAINING]) / _SECOND
        if n < _MOST_COMPARED and seconds < _SECONDS_COMPARED:
            return
        self._compared = self._n
        first = max(self._since, self._n - _SIZE)
        if begin - first < _TIMES_BEFORE * n:
            return
        before, latest = (
            np.diff(self._counted[self._places(*ends)], axis=0)
            for ends in ((first, begin + 1), (begin, self._n))
        )
        fallen = _fallen(before, latest)
        if fallen:
            self._since = begin
            _logger.warning("%s", fallen)


def _fallen(before: NDArray[np.int64], latest: NDArray[np.int64]) -> str:
    """Return that throughput has fallen by half because of loading; empty if it has not.

    Parameters
    ----------
    before, latest
        What was counted in each fetch before, and in each of the latest, shape
        (n_fetches, n_counters).
    """

    def median(counted: NDArray[np.int64], *counters: Counter) -> float:
        times = counted[:, counters].sum(axis=1) / np.maximum(1, counted[:, Counter.MINIBATCHES])
        return float(np.median(times))

    whole = (Counter.WAITING, Counter.TRAINING)
    usual, now = median(before, *whole), median(latest, *whole)
    longer = median(latest, Counter.WAITING) - median(before, Counter.WAITING)
    if usual < _FALLEN * now and longer >= _MOSTLY * (now - usual):
        last = latest[len(latest) // 2 :]  # it may have fallen within the first half
        usually, lately = (Statistics.of(each.sum(axis=0)) for each in (before, last))
        return _in_words(usually, lately, len(last))
    return ""


def _in_words(before: Statistics, latest: Statistics, n_fetches: int) -> str:
    stages = [each.name for each in fields(Statistics)][Counter.PLANNING : Counter.WAITING]
    own, usual = (
        {name: 1e6 * getattr(each, name) / max(1, each.n_cells) for name in stages}
        for each in (latest, before)
    )
    stage = max(stages, key=lambda name: own[name] - usual[name])
    speeds = [each.n_cells / (each.waiting + each.training) for each in (latest, before)]
    said = (
        f"throughput has fallen by half: {speeds[0]:,.0f} cells/s in the last {n_fetches} fetches, "
        f"{speeds[1]:,.0f} before; training waits {latest.waiting_share:.0%} of the time"
    )
    if own[stage] <= usual[stage]:
        return f"{said}; no stage takes longer"
    return (
        f"{said}; what takes longer is {stage.replace('_', ' ')}: {own[stage]:,.1f} us per cell, "
        f"{usual[stage]:,.1f} before"
    )
