"""The rows of an epoch by a strategy alone, and how often each of them comes."""

from dataclasses import dataclass

import numpy as np

from cellfeed import SamplingStrategy
from cellfeed.sampling import EpochOrder, MatchedOrder, WithOthers


def epoch_of(strategy: SamplingStrategy, n_rows: int, key: int = 0) -> np.ndarray:
    positions = np.arange(strategy.n_positions(n_rows))
    return strategy.epoch_order(n_rows=n_rows, epoch_key=key)(positions)


def counts_of(strategy: SamplingStrategy, n_rows: int, key: int = 0) -> np.ndarray:
    return np.bincount(epoch_of(strategy, n_rows, key), minlength=n_rows)


def totals_of(strategy: SamplingStrategy, n_rows: int, n_epochs: int) -> np.ndarray:
    epochs = [epoch_of(strategy, n_rows, key) for key in range(n_epochs)]
    return np.bincount(np.concatenate(epochs), minlength=n_rows)


@dataclass(frozen=True)
class WithNext(WithOthers):
    """Cells that come with the rows after them, as a user may write a strategy."""

    strategy: SamplingStrategy
    k: int = 2
    block_size: int | None = None

    @property
    def n_companions(self) -> int:
        return self.k

    def n_positions(self, n_rows: int) -> int:
        return self.strategy.n_positions(n_rows)

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> MatchedOrder:
        return Next(self.strategy.epoch_order(n_rows=n_rows, epoch_key=epoch_key), n_rows, self.k)


@dataclass(frozen=True)
class Next:
    order: EpochOrder
    n_rows: int
    k: int

    def __call__(self, positions):
        return self.order(positions)

    def companions(self, positions, *, together):
        assert together > 0
        return (self.order(positions)[..., None] + 1 + np.arange(self.k)) % self.n_rows
