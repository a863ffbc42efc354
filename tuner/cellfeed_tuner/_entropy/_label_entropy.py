"""Label entropy of the minibatches that a plan delivers, without reading data."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, EpochPlan
from cellfeed_tuner import theory
from cellfeed_tuner._entropy._minibatch_entropy import (
    Conditional,
    as_codes,
    entropies_of,
    require_a_label_for_each,
    statistic_of,
)
from cellfeed_tuner._entropy._plan_replay import (
    FetchSpread,
    PlanReplay,
    effective_block_size,
    has_random_blocks,
    replay_plan,
)
from cellfeed_tuner._interval import BEYOND_CHANCE, Estimate

__all__ = [
    "LabelEntropy", "StorageOrder", "StrategyEntropy", "label_entropy", "storage_order",
    "strategy_entropy",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelEntropy:
    """Mean minibatch entropy at one block size and fetch factor.

    Parameters
    ----------
    block_size, fetch_factor
        The settings.
    bits
        Mean entropy of minibatches with its 95 % interval.
    n_minibatches
        Number of minibatches in the mean.
    whole_fetches
        Mean and spread without a partial last fetch, comparable with a measurement; None if there
        are fewer than two whole fetches.
    """

    block_size: int
    fetch_factor: int
    bits: Estimate
    n_minibatches: int
    whole_fetches: FetchSpread | None

    @classmethod
    def of(cls, replay: PlanReplay, block_size: int, fetch_factor: int) -> "LabelEntropy":
        """Return the entropy of a replayed plan."""
        return cls(
            block_size=block_size,
            fetch_factor=fetch_factor,
            bits=replay.mean,
            n_minibatches=replay.n_minibatches,
            whole_fetches=replay.whole_fetches,
        )


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

    The plan is replayed over the labels alone. So runs of labels, blocks that straddle them, and
    sampling without replacement are accounted for exactly.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, integers, -1 where it is missing,
        shape (n_rows,). Rows without a label do not count in a minibatch's entropy. Or a
        `Conditional` of two labels.
    batch_size
        Rows of a minibatch.
    block_sizes, fetch_factors
        The grid.
    n_rows
        Rows to replay for each pair of settings, over up to 256 epochs.
    seed
        Seed of the plans.

    Returns
    -------
    One result for each pair, block sizes outermost.

    Raises
    ------
    ParameterError
        The labels are not one-dimensional integers, or a size is below one.

    Examples
    --------
    >>> import numpy as np
    >>> labels = np.repeat([0, 1], 6_400)
    >>> for cell in label_entropy(labels, batch_size=64, block_sizes=[64], fetch_factors=[1, 16]):
    ...     print(cell.block_size, cell.fetch_factor, round(cell.bits.value, 2))
    64 1 0.0
    64 16 0.94
    """
    statistic, n_labelled = statistic_of(labels)
    found = list[LabelEntropy]()
    for block_size, fetch_factor in product(block_sizes, fetch_factors):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size),
            n_rows=n_labelled,
            batch_size=batch_size,
            fetch_factor=fetch_factor,
            seed=seed,
        )
        (replay,) = replay_plan(plan, [statistic], n_rows=n_rows)
        found.append(LabelEntropy.of(replay, block_size, fetch_factor))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEntropy:
    """Minibatch entropy of a strategy, in bits, with its limits.

    Parameters
    ----------
    bits
        Mean entropy of minibatches with its 95 % interval.
    n_minibatches
        Number of minibatches in the mean.
    drawn_bits
        Entropy of the labels that the strategy draws in an epoch. A minibatch has less, however
        well it is mixed, since it is small.
    random_bits
        Exact expectation of minibatches whose cells are drawn independently at random with these
        frequencies. A strategy that draws no cell twice may have a little more.
    homogeneous_bits
        Exact expectation if every block held one label, the worst case of storage; see
        `theory.expected_entropy_bits`. Blocks of unequal size are replaced by equal ones of their
        effective size, which mix the same to first order. None for strategies without blocks in
        random order: those in the order of storage, or of sets.
    """

    bits: Estimate
    n_minibatches: int
    drawn_bits: float
    random_bits: float
    homogeneous_bits: float | None

    @property
    def share_of_random(self) -> float:
        """1 if minibatches are as mixed as the drawn labels allow, 0 if each has one label."""
        return self.bits.value / self.random_bits if self.random_bits else 1.0


def strategy_entropy(
    labels: ArrayLike, plan: EpochPlan, *, n_rows: int = 1_000_000
) -> StrategyEntropy:
    """Return the minibatch entropy of any strategy, and of random sampling to compare it with.

    A weighted strategy changes how frequent labels are. Its minibatches are therefore compared with
    random sampling at the frequencies that it draws, not at the collection's.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, -1 where missing, shape (plan.n_rows,).
        Rows without a label do not count in a minibatch's entropy.
    plan
        The first epoch, of any strategy.
    n_rows
        Rows to replay, over up to 256 epochs.

    Raises
    ------
    ParameterError
        The labels are not one-dimensional, ``plan.n_rows`` integers.

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

    def counted(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        nonlocal counts, n_missing
        drawn = codes[rows.ravel()]
        known = drawn[drawn >= 0]
        counts += np.bincount(known, minlength=counts.size)
        n_missing += drawn.size - known.size
        return entropies_of(codes[rows])

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOrder:
    """The entropy that large blocks cost in the worst case, with one minibatch to a fetch.

    Parameters
    ----------
    block_size
        Rows of a block.
    expected_bits
        Mean entropy of minibatches at that block size and fetch factor 1, replayed over the
        labels in their order of storage.
    random_bits
        Exact expectation of random sampling.
    tolerance_bits
        How far below it rows in random order may fall by chance.
    """

    block_size: int
    expected_bits: float
    random_bits: float
    tolerance_bits: float

    @property
    def already_shuffled(self) -> bool:
        """Whether large blocks cost no more entropy than chance may."""
        return self.expected_bits >= self.random_bits - self.tolerance_bits

    @property
    def sentence(self) -> str:
        """The conclusion in one sentence."""
        bits = (
            f"blocks of {self.block_size:,} give {self.expected_bits:.3f} bits with one "
            f"minibatch to a fetch, where random sampling gives {self.random_bits:.3f}"
        )
        if self.already_shuffled:
            return (
                "The files are already shuffled, so large blocks cost nothing: "
                f"{bits} (chance alone may take {self.tolerance_bits:.3f})."
            )
        return f"The files are not shuffled: {bits}."


def storage_order(
    in_blocks: LabelEntropy, single_rows: LabelEntropy, *, random_bits: float, n_distinct: int
) -> StorageOrder:
    """Return the entropy that large blocks cost, and whether it is more than chance.

    If rows are stored in random order, the minibatches of one epoch are random samples without
    common rows. The mean of G of them has the deviation of one, taken from a replay of single rows,
    divided by the root of G. Further epochs add no new minibatches, so G is at most the
    ``n_distinct`` of an epoch. Both replays are at fetch factor 1.
    """
    # One minibatch to a fetch, so that fetches are minibatches.
    deviation = single_rows.whole_fetches.deviation if single_rows.whole_fetches else 0.0
    n = min(in_blocks.n_minibatches, max(1, n_distinct))
    return StorageOrder(
        block_size=in_blocks.block_size,
        expected_bits=in_blocks.bits.value,
        random_bits=random_bits,
        tolerance_bits=BEYOND_CHANCE * deviation / n**0.5,
    )
