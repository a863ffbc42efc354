"""Label entropy of the minibatches that a plan will deliver, without reading any data."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, TypeVar

from numpy.typing import ArrayLike

from cellfeed import BlockShuffling, EpochPlan, ParameterError, SamplingStrategy
from cellfeed_tuner._entropy._conditional_entropy import (
    Conditional,
    conditional_statistic,
    label_pair,
)
from cellfeed_tuner._entropy._label_counts import RandomOfKnown, as_codes, random_of_known_statistic
from cellfeed_tuner._entropy._minibatch_entropy import entropy_statistic
from cellfeed_tuner._entropy._plan_replay import FetchSpread, Statistic, replay_plan
from cellfeed_tuner._interval import Estimate

__all__ = ["LabelEntropy", "LabelReplay", "Name", "label_entropy", "shuffled_blocks"]

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelEntropy:
    """Mean minibatch entropy of one cell of the grid.

    Parameters
    ----------
    block_size, fetch_factor
        The cell of the grid.
    bits
        Mean entropy of minibatches with its 95 % interval.
    n_minibatches
        How many the mean rests on.
    whole_fetches
        Mean and spread without a partial last fetch, which is what can be measured; None if
        there are fewer than two whole fetches.
    """

    block_size: int
    fetch_factor: int
    bits: Estimate
    n_minibatches: int
    whole_fetches: FetchSpread | None


def label_entropy(
    labels: ArrayLike | Conditional,
    *,
    batch_size: int,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    n_rows: int = 1_000_000,
    seed: int = 0,
) -> list[LabelEntropy]:
    """Return the minibatch entropy of block shuffling for a whole grid, without any I/O.

    The plan is run over the labels alone, so that runs of labels, blocks that straddle them and
    sampling without replacement are all as they will be.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, integers, -1 where it is missing,
        shape (n_rows,). Rows without a label are left out of a minibatch's entropy. Or a
        `Conditional` of two labels.
    batch_size
        Rows of a minibatch.
    block_sizes, fetch_factors
        The grid.
    n_rows
        Rows to replay for each cell of the grid, over as many epochs as that takes, up to 256.
    seed
        Seed of the plans.

    Returns
    -------
    One result for each pair, block sizes outermost.

    Raises
    ------
    ParameterError
        The labels are not a line of integers, or a size is below one.

    Examples
    --------
    >>> import numpy as np
    >>> labels = np.repeat([0, 1], 6_400)
    >>> for cell in label_entropy(labels, batch_size=64, block_sizes=[64], fetch_factors=[1, 16]):
    ...     print(cell.block_size, cell.fetch_factor, round(cell.bits.value, 2))
    64 1 0.0
    64 16 0.94
    """
    replay = LabelReplay({"": labels}, batch_size=batch_size, seed=seed)
    return [replay.of(*sizes, n_rows=n_rows)[""] for sizes in product(block_sizes, fetch_factors)]


def shuffled_blocks(block_size: int, align: Any) -> SamplingStrategy:
    """Return the strategy of labels alone, of which no chunks are known."""
    del align
    return BlockShuffling(block_size)


class LabelReplay(Generic[Name]):
    """Replays one plan after the other over the same labels, by any name.

    Rows are drawn once, and every label is looked up for them; `ParameterError` if labels differ in
    length. ``strategy_of`` gives the strategy for a block size, and for how blocks are aligned.
    """

    def __init__(
        self,
        labels: Mapping[Name, ArrayLike | Conditional | RandomOfKnown],
        *,
        batch_size: int,
        seed: int,
        strategy_of: Callable[[int, Any], SamplingStrategy] = shuffled_blocks,
    ) -> None:
        replayed = {name: _statistic(each) for name, each in labels.items()}
        sizes = {name: n_rows for name, (n_rows, _) in replayed.items()}
        if len(set(sizes.values())) != 1:
            msg = (
                f"labels must all have the same number of rows, at least one label, but got {sizes}"
            )
            raise ParameterError(msg)
        self._n_cells = next(iter(sizes.values()))
        self._statistics = {name: statistic for name, (_, statistic) in replayed.items()}
        self._batch_size, self._seed = batch_size, seed
        self._strategy_of = strategy_of

    def plan(self, block_size: int, fetch_factor: int, align: Any = None) -> EpochPlan:
        """Return the plan of these settings, at its first epoch."""
        return EpochPlan(
            strategy=self._strategy_of(block_size, align),
            n_rows=self._n_cells,
            batch_size=self._batch_size,
            fetch_factor=fetch_factor,
            seed=self._seed,
        )

    def of(
        self, block_size: int, fetch_factor: int, align: Any = None, *, n_rows: int
    ) -> dict[Name, LabelEntropy]:
        """Return the minibatch entropy of each label in the plan of these settings."""
        plan = self.plan(block_size, fetch_factor, align)
        found = replay_plan(plan, list(self._statistics.values()), n_rows=n_rows)
        return {
            name: LabelEntropy(
                block_size=block_size,
                fetch_factor=fetch_factor,
                bits=replay.mean,
                n_minibatches=replay.n_minibatches,
                whole_fetches=replay.whole_fetches,
            )
            for name, replay in zip(self._statistics, found, strict=True)
        }


def _statistic(labels: ArrayLike | Conditional | RandomOfKnown) -> tuple[int, Statistic]:
    """Return how many rows labels have, and what is taken of each minibatch of them."""
    if isinstance(labels, RandomOfKnown):
        codes = as_codes(labels.labels)
        return codes.size, random_of_known_statistic(codes, labels.counts)
    if isinstance(labels, Conditional):
        first, second = label_pair(*labels)
        return first.size, conditional_statistic(first, second)
    codes = as_codes(labels)
    return codes.size, entropy_statistic(codes)
