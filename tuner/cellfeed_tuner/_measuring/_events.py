"""What a child of the measuring process is asked to time, and what it reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import CellDataset, SamplingStrategy, Statistics
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import EPOCHS_APART, REPLICATE_SECONDS
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._machine._processes import BytesRead
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._subject._labels import LabelWithin

__all__ = [
    "Findings", "Infeasible", "MakeDataset", "Round", "Started", "Step", "TimingSettings",
]  # fmt: skip

Step = Callable[[Any], object]
"""A training step, called with a minibatch."""

MakeDataset = Callable[..., CellDataset]
"""What makes the data set that is measured; called as `CellDataset` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSettings:
    """What to time, and for how long; what is not said here is as in `measure` or `autotune`.

    Parameters
    ----------
    labels, given
        The obs columns whose entropies are taken, and another, within whose values that of the
        first is taken too.
    least_rounds, most_rounds, seconds
        Rounds that count; measuring stops once they took so many seconds, and there are
        the least. With none, one round is read all the same.
    number
        Which measurement of the collection it is: each reads other rows, as the epochs of a
        training do.
    step_seconds, step
        How long a training loop sleeps on each minibatch; what is called with each instead.
    prefetch, n_requests
        Fetches that are read ahead, and requests under way at a server to begin with; None and 0
        to leave that to the data set.
    ranks, rank
        How many ranks are timed side by side, and which of them this is.
    """

    configuration: Configuration
    batch_size: int
    labels: Sequence[str]
    cache: CacheState
    seed: int
    least_rounds: int
    most_rounds: int = 64
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

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels, and what the first is taken within."""
        return (*self.labels, *([] if self.given is None else [self.given]))

    @property
    def cells_per_round(self) -> int:
        """Cells of a whole fetch of each worker of each rank that is measured."""
        minibatches = self.configuration.minibatches_per_round
        return minibatches * self.batch_size * self.ranks.n_local

    @property
    def first_epoch(self) -> int:
        """The epoch to begin with."""
        return EPOCHS_APART * self.number


@dataclass(frozen=True, slots=True)
class Started:
    """The first minibatch is there; ``first_minibatch_seconds`` after the workers were.

    Parameters
    ----------
    waiting_bytes
        Memory of minibatches that wait for a training loop slower than the workers, and of what
        several ranks hold, each by itself, but the processes measured share.
    n_threads, n_function_threads
        Threads of each process that read, and that the user's functions have.
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
    """One timed round, and what the data set counted meanwhile, if it counts.

    It ``counts`` if it is free of start-up. In ``waiting_seconds`` of it, the training loop waited
    for minibatches. ``read`` is None where it is not as much as was delivered, since more or less
    was read ahead, or is not counted, as of a server. Measuring may not end with every round.
    """

    seconds: float
    counts: bool
    waiting_seconds: float
    read: BytesRead | None
    may_end: bool = True
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Findings:
    """What is known at the end.

    Parameters
    ----------
    fault
        The first minibatch whose rows or labels are not those of the plan; empty if all are.
    n_requests
        How many requests were under way at a server; 0 if this process asked none.
    cells
        Some cells of the last minibatch, with all that it has of them.
    entropies
        Mean entropy of each label, and of one within another, in each round, shape (n_rounds,).
    """

    fault: str = ""
    n_requests: int = 0
    cells: tuple[DeliveredCell, ...] = ()
    entropies: Mapping[str | LabelWithin, NDArray[np.float64]] = field(default_factory=dict)
