"""What a child of the measuring process is to time, and what it reports."""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import CellDataset, ParameterError, SamplingStrategy, Statistics
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import MOST_ROUNDS_OF_REPLICATE, REPLICATE_SECONDS
from cellfeed_tuner._machine import BytesRead, CacheState, ProcessorTime
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._subject import LabelWithin

# Distance between the first epochs of two measurements. Chosen: no measurement runs through as
# many, so each reads different rows.
EPOCHS_APART = 1000

# Keeping the processes of several ranks in step, as ranks are in training.
#
# They wait for each other at the end of every round, so that a round takes as long as on the
# slowest
# rank, and delivers the cells of all.


class Pace:
    """One rank's place in step with the others; the only rank if there is no ``barrier``.

    A context manager: the others stop waiting if this rank fails. All methods that wait raise
    `threading.BrokenBarrierError` if another rank has failed.

    Parameters
    ----------
    rank
        The local rank.
    barrier, has_ended, n_rounds
        Memory shared with the other ranks, which are forked after it is made.
    """

    def __init__(
        self, rank: int = 0, barrier: Any = None, has_ended: Any = None, n_rounds: Any = None
    ) -> None:
        self._rank, self._barrier = rank, barrier
        self._has_ended, self._n_rounds = has_ended, n_rounds
        self.is_first, self.is_alone = rank == 0, barrier is None

    @classmethod
    def of_ranks(cls, n: int) -> "list[Pace]":
        """Return one for each of ``n`` ranks."""
        context = multiprocessing.get_context("fork")
        shared = context.Barrier(n), context.RawValue("b", 0), context.RawArray("q", n)
        return [cls(rank, *shared) for rank in range(n)]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.leave()

    def require_equal_epochs(self, n_rounds: int) -> None:
        """Refuse epochs of different lengths, in which ranks would wait for each other forever."""
        if self.is_alone:
            return
        self._n_rounds[self._rank] = n_rounds
        self.meet()
        found = list(self._n_rounds)
        if len(set(found)) > 1:
            msg = (
                f"an epoch has {found} rounds of whole fetches on ranks 0 to {len(found) - 1}, "
                "which would wait for each other for ever; give each rank as many minibatches"
            )
            raise ParameterError(msg)

    def meet(self) -> float:
        """Wait for all ranks, and return for how many seconds."""
        if self.is_alone:
            return 0.0
        began = time.perf_counter()
        self._barrier.wait()
        return time.perf_counter() - began

    def agreed(self, *, ended: bool) -> bool:
        """Wait for all ranks, and return what the first one passed."""
        if self.is_alone:
            return ended
        if self.is_first:
            self._has_ended.value = ended
        self.meet()
        return bool(self._has_ended.value)

    def leave(self) -> None:
        """Stop the others from waiting for this rank."""
        if not self.is_alone:
            self._barrier.abort()


Step = Callable[[Any], object]
"""A training step, called with a minibatch."""

MakeDataset = Callable[..., CellDataset]
"""Makes the dataset to measure; called as `CellDataset` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSettings:
    """What to time, and for how long; see `measure` and `autotune` for the rest.

    Parameters
    ----------
    given
        Another obs column, within whose values the entropy of the first label is also computed.
    least_rounds, most_rounds, seconds
        Counted rounds. Measuring stops when they took so many seconds, if it has the least. One
        round is always read.
    number
        The number of this replicate. Each replicate reads other rows, as epochs of a training do.
    step_seconds, step
        How long a training loop sleeps on each minibatch; or a function to call with each instead.
    prefetch, n_requests
        Fetches to read ahead, and the first number of concurrent requests to a server; None and 0
        leave them to the dataset.
    ranks, rank, pace
        How many ranks are timed side by side, which of them this is, and how they keep in step.
    """

    configuration: Configuration
    batch_size: int
    labels: Sequence[str]
    cache: CacheState
    seed: int
    least_rounds: int
    most_rounds: int = MOST_ROUNDS_OF_REPLICATE
    seconds: float = REPLICATE_SECONDS
    number: int = 0
    given: str | None = None
    step_seconds: float = 0.0
    step: Step | None = None
    strategy: SamplingStrategy | None = None
    make_dataset: MakeDataset = CellDataset
    prefetch: int | None = None
    n_requests: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    rank: int = 0
    pace: Pace = field(default_factory=Pace)

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels, and ``given``."""
        return (*self.labels, *([] if self.given is None else [self.given]))

    @property
    def cells_per_round(self) -> int:
        """Cells of a whole fetch of each worker of each rank of this machine."""
        minibatches = self.configuration.minibatches_per_round
        return minibatches * self.batch_size * self.ranks.n_local

    @property
    def first_epoch(self) -> int:
        """The first epoch to read."""
        return EPOCHS_APART * self.number


@dataclass(frozen=True, slots=True)
class Started:
    """The first minibatch has come, ``first_minibatch_seconds`` after the workers started.

    Minibatches that wait for a training loop slower than the workers take ``waiting_bytes``. Each
    process reads with ``n_threads``, and the user's functions have ``n_function_threads``.
    """

    worker_seconds: float
    first_minibatch_seconds: float
    waiting_bytes: int
    n_threads: int = 1
    n_function_threads: int = 0


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The configuration cannot be timed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """One timed round, and what the dataset counted in it, if it counts.

    It ``counts`` if it is free of start-up. The training loop waited ``waiting_seconds`` for its
    minibatches. ``read`` is None where the bytes differ from what was delivered, because more or
    less was read ahead, and for servers. Measuring does not end after a round unless it
    ``may_end``. ``processor`` is the processor time of all threads; None if unknown.
    """

    seconds: float
    counts: bool
    waiting_seconds: float
    read: BytesRead | None
    may_end: bool = True
    statistics: Statistics | None = None
    processor: ProcessorTime | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Findings:
    """What is known at the end.

    Parameters
    ----------
    fault
        The first minibatch whose rows or labels differ from the plan; empty if none does.
    n_requests
        Concurrent requests to a server; 0 if this process sent none.
    cells
        Some cells of the last minibatch.
    entropies
        Mean entropy of each label, and of one within another, in each round, shape (n_rounds,).
    """

    fault: str = ""
    n_requests: int = 0
    cells: tuple[DeliveredCell, ...] = ()
    entropies: Mapping[str | LabelWithin, NDArray[np.float64]] = field(default_factory=dict)
