"""What is timed of a loader, and for how long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellfeed import CellDataset, SamplingStrategy
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import EPOCHS_APART, SLICE_SECONDS
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._ranks._world import Ranks

__all__ = ["SLICE_SECONDS", "MakeDataset", "Step", "TimingSettings"]

Step = Callable[[Any], object]
"""A training step, called with a minibatch."""

MakeDataset = Callable[..., CellDataset]
"""What makes the data set that is measured; called as `CellDataset` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSettings:
    """What to time, and for how long.

    Parameters
    ----------
    configuration, batch_size
        The settings.
    labels
        The obs columns whose entropies are taken; may be none.
    given
        Another, within whose values that of the first is taken too; may be none.
    cache
        "cold": pages are dropped before each epoch and once they were used, so that no round
        profits from an earlier one, as where the files are larger than memory. "warm": pages
        stay.
    seed
        Fixes which rows are read.
    least_rounds, most_rounds
        Rounds that count, after the first; with none, one round is read all the same.
    seconds
        Stop after this time, once there are `least_rounds`.
    number
        Which measurement of the collection it is: each reads other rows, as the epochs of a
        training do.
    step_seconds
        How long a training loop computes on each minibatch, without the processor: it sleeps.
    step
        What is called with each minibatch instead, if there is anything.
    strategy
        How cells are visited; in shuffled blocks of the configuration's size, of the rows that
        are selected, if None.
    make_dataset
        What is called for the data set.
    prefetch
        Fetches that are read ahead; as many as that reads by itself if None.
    n_requests
        Requests under way at a server to begin with; 0 to find out how many it takes.
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
    seconds: float = SLICE_SECONDS
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
