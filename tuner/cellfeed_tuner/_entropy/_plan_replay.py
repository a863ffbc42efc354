"""Replaying a plan: the rows of its minibatches, without reading data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    EpochPlan,
    SamplingStrategy,
)
from cellfeed_tuner._constants import EPOCHS_OF_ENDS, LEAST_FETCHES, MOST_EPOCHS
from cellfeed_tuner._interval import Estimate, mean_with_interval

__all__ = [
    "FetchSpread", "PlanReplay", "Statistic", "by_round", "effective_block_size",
    "fetches_per_block", "has_random_blocks", "minibatches_by_fetch", "replay_plan",
]  # fmt: skip

# Rows replayed together: enough to be fast, few enough to stay in the CPU's cache.
_ROWS_AT_ONCE = 1 << 17

Statistic = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""One number for each minibatch, from its rows, shape (n_minibatches, batch_size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSpread:
    """Mean of a statistic over ``n`` >= 2 whole fetches, and the deviation of fetches."""

    mean: float
    deviation: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReplay:
    """A statistic of minibatches: its mean over each fetch's full minibatches, and their number.

    Both have shape (n_fetches,). A whole fetch has ``fetch_factor`` minibatches. One block may fill
    ``fetches_per_block`` consecutive fetches, which therefore resemble each other.
    """

    fetch_means: NDArray[np.float64]
    fetch_sizes: NDArray[np.int64]
    fetch_factor: int
    fetches_per_block: int = 1

    @classmethod
    def of(cls, values: NDArray[np.float64], fetch_factor: int) -> "PlanReplay":
        """Return the replay of minibatches in order, by fetch if there are two whole ones."""
        n = values.size // fetch_factor
        means, size = (values, 1) if n < 2 else (by_round(values, fetch_factor), fetch_factor)  # noqa: PLR2004
        return cls(fetch_means=means, fetch_sizes=np.full(means.size, size), fetch_factor=size)

    @property
    def n_minibatches(self) -> int:
        """Number of minibatches."""
        return int(self.fetch_sizes.sum())

    @property
    def mean(self) -> Estimate:
        """Mean over minibatches with its 95 % interval.

        The interval rests on groups of fetches that share no blocks, except at their ends.
        """
        starts = np.arange(0, self.fetch_sizes.size, self.fetches_per_block)
        sizes = np.add.reduceat(self.fetch_sizes, starts)
        sums = np.add.reduceat(self.fetch_means * self.fetch_sizes, starts)
        return mean_with_interval(sums / sizes, weights=sizes)

    @property
    def whole_fetches(self) -> FetchSpread | None:
        """Mean and spread of whole fetches; None where there are fewer than two."""
        whole = self.fetch_means[self.fetch_sizes == self.fetch_factor]
        if whole.size < 2:  # noqa: PLR2004 - a spread needs two
            return None
        return FetchSpread(
            mean=float(whole.mean()), deviation=float(whole.std(ddof=1)), n=whole.size
        )


def by_round(values: NDArray[np.float64], minibatches_per_round: int) -> NDArray[np.float64]:
    """Return the means of minibatches over whole rounds, shape (n_rounds,)."""
    whole = values.size - values.size % minibatches_per_round
    means: NDArray[np.float64] = values[:whole].reshape(-1, minibatches_per_round).mean(axis=1)
    return means


def replay_plan(
    plan: EpochPlan, statistics: Sequence[Statistic], *, n_rows: int
) -> list[PlanReplay]:
    """Replay fetches until they hold ``n_rows`` rows and suffice for an interval.

    Rows are drawn once for all statistics. For a large collection, the first and the last whole
    fetches of some epochs represent all: blocks are exchangeable, except for a short one, which
    shifts the boundaries of later blocks and mostly lies between the two ends. For a smaller
    collection, up to 256 whole epochs are replayed, from the epoch of ``plan`` on.
    """
    least_rows = max(n_rows, LEAST_FETCHES * min(plan.fetch_size, plan.n_rows))
    means: list[list[NDArray[np.float64]]] = [[] for _ in statistics]
    sizes = list[NDArray[np.int64]]()
    for rows in _parts(plan, least_rows):
        n_fetches, n_minibatches, batch_size = rows.shape
        for statistic, found in zip(statistics, means, strict=True):
            values = statistic(rows.reshape(-1, batch_size))
            found.append(values.reshape(n_fetches, n_minibatches).mean(axis=1))
        sizes.append(np.full(n_fetches, n_minibatches))
    return [
        PlanReplay(
            fetch_means=np.concatenate(found),
            fetch_sizes=np.concatenate(sizes),
            fetch_factor=plan.fetch_factor,
            fetches_per_block=fetches_per_block(plan),
        )
        for found in means
    ]


def _parts(plan: EpochPlan, least_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield minibatches by fetch until there are enough rows."""
    if plan.n_delivered >= least_rows:
        half = -(-least_rows // (2 * EPOCHS_OF_ENDS * plan.fetch_size))
        for epoch in range(plan.epoch, plan.epoch + EPOCHS_OF_ENDS):
            this_epoch = replace(plan, epoch=epoch)
            yield from _whole_fetches(this_epoch, 0, half)
            yield from _whole_fetches(this_epoch, -half, 0)
        return
    replayed = 0
    for epoch in range(plan.epoch, plan.epoch + MOST_EPOCHS):
        for rows in minibatches_by_fetch(replace(plan, epoch=epoch)):
            yield rows
            replayed += rows.shape[0] * rows.shape[1] * plan.batch_size
            if replayed >= least_rows:
                return


def fetches_per_block(plan: EpochPlan) -> int:
    """Return how many consecutive fetches a block may fill."""
    strategy, largest = plan.strategy, getattr(plan.strategy, "block_size", 1)
    if isinstance(strategy, BlockShuffling) and strategy.align is not None:
        largest = strategy.block_sizes(plan.n_rows).largest
    return -(-int(largest) // plan.fetch_size)


def effective_block_size(strategy: SamplingStrategy, n_rows: int) -> float:
    """Return the size of equal blocks that mix like a strategy's blocks; see `theory`."""
    if isinstance(strategy, BlockShuffling) and strategy.align is not None:
        return strategy.block_sizes(n_rows).effective
    return getattr(strategy, "block_size", 1)


def has_random_blocks(strategy: SamplingStrategy) -> bool:
    """Return whether a strategy visits blocks in random order, so that theory applies."""
    return isinstance(strategy, BlockShuffling | BlockWeightedSampling | ClassBalancedSampling)


def minibatches_by_fetch(plan: EpochPlan) -> Iterator[NDArray[np.int64]]:
    """Yield rows of full minibatches, shape (n_fetches, n_minibatches, batch_size)."""
    yield from _whole_fetches(plan, 0, plan.n_whole_fetches)
    if plan.n_fetches > plan.n_whole_fetches:
        last = plan.delivered_rows(plan.n_fetches - 1)
        # A short minibatch counts only where the epoch has no other.
        size = min(plan.batch_size, plan.n_delivered)
        n_full = last.shape[1] // size
        if n_full:
            yield last[:, : n_full * size].reshape(1, n_full, size)


def _whole_fetches(plan: EpochPlan, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
    """Yield minibatches of some whole fetches; up to 0, of the last ones of the epoch."""
    if stop <= 0:
        start, stop = plan.n_whole_fetches + start, plan.n_whole_fetches + stop
    at_once = max(1, _ROWS_AT_ONCE // plan.fetch_size)
    for first in range(start, stop, at_once):
        n = min(at_once, stop - first)
        yield plan.delivered_rows(first, n).reshape(n, plan.fetch_factor, plan.batch_size)
