"""Label entropy of any strategy, held against that of the labels it draws."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import EpochPlan
from cellfeed_tuner import theory
from cellfeed_tuner._entropy._label_counts import as_codes, require_a_label_for_each
from cellfeed_tuner._entropy._minibatch_entropy import entropy_statistic
from cellfeed_tuner._entropy._plan_replay import (
    effective_block_size,
    has_random_blocks,
    replay_plan,
)
from cellfeed_tuner._interval import Estimate

__all__ = ["StrategyEntropy", "strategy_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEntropy:
    """Minibatch entropy of a strategy, in bits, and what that could be.

    Parameters
    ----------
    bits
        Mean entropy of minibatches with its 95 % interval.
    n_minibatches
        How many the mean rests on.
    drawn_bits
        Entropy of the labels that the strategy draws, with their frequencies in an epoch. A
        minibatch has less, however it is mixed, since it is small.
    random_bits
        Exact expectation of minibatches whose cells are drawn at random with these frequencies,
        each for itself. A strategy that draws no cell twice may have a little more.
    homogeneous_bits
        Exact expectation if every block held one label, the least that storage can do to it; see
        `theory.expected_entropy_bits`; of blocks of unequal size, that of equal ones of their
        effective size, which is the same to first order. None where that does not apply: it is of
        blocks in random order, neither of cells in the order of storage nor of sets.
    """

    bits: Estimate
    n_minibatches: int
    drawn_bits: float
    random_bits: float
    homogeneous_bits: float | None

    @property
    def share_of_random(self) -> float:
        """1 where minibatches are as mixed as what is drawn allows, 0 where each has one label."""
        return self.bits.value / self.random_bits if self.random_bits else 1.0


def strategy_entropy(
    labels: ArrayLike, plan: EpochPlan, *, n_rows: int = 1_000_000
) -> StrategyEntropy:
    """Return the minibatch entropy of any strategy, and what that is held against.

    A weighted strategy changes how frequent labels are. Its minibatches are therefore held
    against those of random sampling with the frequencies that it draws, not of the collection.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, -1 where missing, shape (plan.n_rows,).
        Rows without a label are left out of a minibatch's entropy.
    plan
        The first epoch, of any strategy.
    n_rows
        Rows to replay, over as many epochs as that takes, up to 256.

    Raises
    ------
    ParameterError
        The labels are not a line of ``plan.n_rows`` integers.

    Examples
    --------
    >>> from cellfeed import BlockShuffling, ClassBalancedSampling
    >>> labels = np.repeat([0, 1], [63_000, 1_000])
    >>> for strategy in (BlockShuffling(4), ClassBalancedSampling(labels, 4)):
    ...     plan = EpochPlan(strategy=strategy, n_rows=64_000, batch_size=64, fetch_factor=64)
    ...     found = strategy_entropy(labels, plan)
    ...     print(round(found.drawn_bits, 2), found.share_of_random > 0.9)
    0.12 True
    1.0 True
    """
    codes = as_codes(labels)
    require_a_label_for_each(codes, plan.n_rows)
    counts = np.zeros(max(0, int(codes.max())) + 1, np.int64)
    n_missing = 0
    entropies = entropy_statistic(codes)

    def counted(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        nonlocal counts, n_missing
        drawn = codes[rows.ravel()]
        known = drawn[drawn >= 0]
        counts += np.bincount(known, minlength=counts.size)
        n_missing += drawn.size - known.size
        return entropies(rows)

    (replay,) = replay_plan(plan, [counted], n_rows=n_rows)
    drawn = counts[counts > 0]
    return StrategyEntropy(
        bits=replay.mean,
        n_minibatches=replay.n_minibatches,
        drawn_bits=theory.entropy_bits(drawn) if drawn.size else 0.0,
        random_bits=theory.independent_entropy_bits(drawn, plan.batch_size, n_missing=n_missing),
        homogeneous_bits=_homogeneous_bits(drawn, plan),
    )


def _homogeneous_bits(drawn: NDArray[np.int64], plan: EpochPlan) -> float | None:
    if not has_random_blocks(plan.strategy):
        return None
    if not drawn.size:
        return 0.0
    block_size = effective_block_size(plan.strategy, plan.n_rows)
    return theory.expected_entropy_bits(drawn, plan.batch_size, block_size, plan.fetch_factor)
