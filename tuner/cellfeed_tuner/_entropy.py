"""How mixed minibatches are: the label entropy of replayed plans."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    EpochPlan,
    MatchedControls,
    ParameterError,
    SamplingStrategy,
)
from cellfeed_tuner import theory
from cellfeed_tuner._interval import Estimate, mean_with_interval

# Fewest fetches for the interval of an entropy. Chosen: minibatches of one fetch resemble each
# other.
LEAST_FETCHES = 16
# Epochs of which parts are replayed for a large collection, parts of each, and most epochs that are
# replayed for a small one.
EPOCHS_OF_PARTS, PARTS_OF_EPOCH, MOST_EPOCHS = 16, 16, 256

# Replaying a plan: the rows of its minibatches, without reading data.

# Rows replayed together: enough to be fast, few enough to stay in the CPU's cache.
_ROWS_AT_ONCE = 1 << 17

Statistic = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""One number for each minibatch, from its rows, shape (n_minibatches, batch_size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReplay:
    """A statistic of minibatches: its mean over each fetch's full minibatches, and their number.

    Both have shape (n_fetches,). A whole fetch has ``fetch_factor`` minibatches. ``n_alike``
    consecutive fetches may resemble each other, as those of one epoch do.
    """

    fetch_means: NDArray[np.float64]
    fetch_sizes: NDArray[np.int64]
    fetch_factor: int
    n_alike: int = 1

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
        """Mean over minibatches with its 95 % interval, from groups of fetches that are alike."""
        starts = np.arange(0, self.fetch_sizes.size, self.n_alike)
        sizes = np.add.reduceat(self.fetch_sizes, starts)
        sums = np.add.reduceat(self.fetch_means * self.fetch_sizes, starts)
        return mean_with_interval(sums / sizes, weights=sizes)

    @property
    def fetch_deviation(self) -> float | None:
        """Standard deviation of the means of whole fetches; None where there are fewer than two."""
        whole = self.fetch_means[self.fetch_sizes == self.fetch_factor]
        return float(whole.std(ddof=1)) if whole.size > 1 else None


def by_round(values: NDArray[np.float64], minibatches_per_round: int) -> NDArray[np.float64]:
    """Return the means of minibatches over whole rounds, shape (n_rounds,)."""
    whole = values.size - values.size % minibatches_per_round
    means: NDArray[np.float64] = values[:whole].reshape(-1, minibatches_per_round).mean(axis=1)
    return means


def replay_plan(
    plan: EpochPlan, statistics: Sequence[Statistic], *, n_rows: int
) -> list[PlanReplay]:
    """Replay epochs, from that of ``plan`` on, until they hold ``n_rows`` rows.

    Rows are drawn once for all statistics. For a small collection, up to 256 whole epochs are
    replayed. For a larger one, whole fetches of 16 epochs are drawn, about evenly over each: where
    blocks begin within a fetch depends on its place, and strategies in a fixed order have other
    cells at each.
    """
    least_rows = max(n_rows, LEAST_FETCHES * min(plan.fetch_size, plan.n_rows))
    means: list[list[NDArray[np.float64]]] = [[] for _ in statistics]
    sizes = list[NDArray[np.int64]]()
    is_small = plan.rows_per_stream < least_rows
    for rows in _whole_epochs(plan, least_rows) if is_small else _parts_of_epochs(plan, least_rows):
        n_fetches, n_minibatches, batch_size = rows.shape
        for statistic, found in zip(statistics, means, strict=True):
            values = statistic(rows.reshape(-1, batch_size))
            found.append(values.reshape(n_fetches, n_minibatches).mean(axis=1))
        sizes.append(np.full(n_fetches, n_minibatches))
    fetch_sizes = np.concatenate(sizes)
    return [
        PlanReplay(
            fetch_means=np.concatenate(found),
            fetch_sizes=fetch_sizes,
            fetch_factor=plan.fetch_factor,
            n_alike=fetches_per_block(plan) if is_small else fetch_sizes.size // EPOCHS_OF_PARTS,
        )
        for found in means
    ]


def _whole_epochs(plan: EpochPlan, least_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield minibatches by fetch until there are enough rows, up to the end of an epoch."""
    for k in range(min(MOST_EPOCHS, -(-least_rows // plan.rows_per_stream))):
        yield from minibatches_by_fetch(replace(plan, epoch=plan.epoch + k))


def _parts_of_epochs(plan: EpochPlan, least_rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield as many whole fetches of each epoch, in runs that begin at random places in its parts.

    A short block shifts the boundaries of those after it, so that fetches of an epoch are alike.
    """
    n_fetches = -(-least_rows // (EPOCHS_OF_PARTS * plan.fetch_size))
    length = min(n_fetches, max(fetches_per_block(plan), -(-n_fetches // PARTS_OF_EPOCH)))
    places = np.arange(0, n_fetches, length)
    draw = np.random.default_rng([plan.seed, plan.epoch])
    parts = np.tile(np.arange(EPOCHS_OF_PARTS)[:, None], places.size)
    # Together, the epochs' places in one part fill it evenly.
    jitter = (draw.permuted(parts, axis=0) + draw.random(parts.shape)) / EPOCHS_OF_PARTS
    starts = ((places + length * jitter) / n_fetches * plan.n_whole_fetches).astype(np.int64)
    for k in range(EPOCHS_OF_PARTS):
        epoch = replace(plan, epoch=plan.epoch + k)
        for start, place in zip(starts[k].tolist(), places.tolist(), strict=True):
            stop = start + min(length, n_fetches - place)
            yield from _whole_fetches(epoch, start, min(stop, plan.n_whole_fetches))
            yield from _whole_fetches(epoch, 0, stop - plan.n_whole_fetches)  # goes around


def fetches_per_block(plan: EpochPlan) -> int:
    """Return how many consecutive fetches a block may fill."""
    strategy, largest = plan.strategy, getattr(plan.strategy, "block_size", 1)
    if isinstance(strategy, BlockShuffling) and strategy.align is not None:
        largest = strategy.block_sizes(plan.n_rows).largest
    return -(-int(largest) // plan.fetch_size)


def effective_block_size(strategy: SamplingStrategy, n_rows: int) -> float:
    """Return the size of equal blocks that mix like a strategy's blocks; see `theory`."""
    strategy = _of_cells(strategy)
    if isinstance(strategy, BlockShuffling) and strategy.align is not None:
        return strategy.block_sizes(n_rows).effective
    return getattr(strategy, "block_size", 1)


def has_random_blocks(strategy: SamplingStrategy) -> bool:
    """Return whether a strategy visits blocks in random order, so that theory applies."""
    return has_weights(strategy) or isinstance(_of_cells(strategy), BlockShuffling)


def has_weights(strategy: SamplingStrategy) -> bool:
    """Return whether a strategy draws cells by weights, other ones in each epoch."""
    return isinstance(_of_cells(strategy), BlockWeightedSampling | ClassBalancedSampling)


def _of_cells(strategy: SamplingStrategy) -> SamplingStrategy:
    """Return the strategy of cells that come with controls, or the strategy itself."""
    return strategy.strategy if isinstance(strategy, MatchedControls) else strategy


def minibatches_by_fetch(plan: EpochPlan) -> Iterator[NDArray[np.int64]]:
    """Yield rows of full minibatches, shape (n_fetches, n_minibatches, batch_size)."""
    yield from _whole_fetches(plan, 0, plan.n_whole_fetches)
    if plan.n_fetches > plan.n_whole_fetches:
        last = plan.delivered_rows(plan.n_fetches - 1)
        # A short minibatch counts only where the epoch has no other.
        size = min(plan.batch_size, plan.rows_per_stream)
        n_full = last.shape[1] // size
        if n_full:
            yield last[:, : n_full * size].reshape(1, n_full, size)


def _whole_fetches(plan: EpochPlan, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
    """Yield minibatches of some whole fetches."""
    at_once = max(1, _ROWS_AT_ONCE // plan.fetch_size)
    for first in range(start, stop, at_once):
        n = min(at_once, stop - first)
        yield plan.delivered_rows(first, n).reshape(n, plan.fetch_factor, plan.batch_size)


# Label counts, and the label entropy of known minibatches.

# Rows that are counted at a time; NumPy needs 8 bytes for each.
_ROWS_PER_PART = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LabelCounts:
    """Rows of each occurring label, int64, shape (n_labels,), and rows without a label."""

    counts: NDArray[np.int64]
    n_missing: int

    @property
    def n_rows(self) -> int:
        """All rows."""
        return int(self.counts.sum()) + self.n_missing

    def random_entropy_bits(self, batch_size: int) -> float:
        """Return the exact expectation of random sampling; 0 if no row has a label."""
        if not self.counts.size:
            return 0.0
        return theory.random_entropy_bits(self.counts, batch_size, n_missing=self.n_missing)


def count_labels(codes: NDArray[np.integer]) -> LabelCounts:
    """Count each label from codes, negative where missing, shape (n_rows,).

    Memory does not grow with the number of rows, unless codes are far larger than that number; they
    are then sorted.
    """
    most = int(codes.max(initial=-1))
    if most > max(_ROWS_PER_PART, codes.size):
        found, counted = np.unique(codes, return_counts=True)
        return LabelCounts(counted[found >= 0], int(counted[found < 0].sum()))
    counts = np.zeros(most + 2, dtype=np.int64)
    at_once = max(_ROWS_PER_PART, most)
    for start in range(0, codes.size, at_once):
        part = codes[start : start + at_once].astype(np.int64)
        counts += np.bincount(np.maximum(part, -1) + 1, minlength=counts.size)
    return LabelCounts(counts[1:][counts[1:] > 0], int(counts[0]))


def as_codes(labels: ArrayLike) -> NDArray[np.integer]:
    """Return labels as one-dimensional integer codes, or raise `ParameterError`."""
    codes = np.asarray(labels)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype.kind not in "iu":
        msg = (
            "`labels` must be one-dimensional integer codes, at least one, "
            f"but got shape {codes.shape} and dtype {codes.dtype}"
        )
        raise ParameterError(msg)
    if codes.max() > np.iinfo(np.int64).max:
        msg = f"`labels` must be less than 2**63, but one is {codes.max()}; number labels from 0"
        raise ParameterError(msg)
    # Of signed codes, some can be marked as missing.
    return codes if codes.dtype.kind == "i" else codes.astype(np.int64)


def require_a_label_for_each(codes: NDArray[np.integer], n_rows: int) -> None:
    """Raise `ParameterError` if there are not as many labels as rows."""
    if codes.size != n_rows:
        msg = f"there must be a label for each of {n_rows:,} rows, but there are {codes.size:,}"
        raise ParameterError(msg)


def minibatch_entropies(labels: ArrayLike, plan: EpochPlan) -> NDArray[np.float64]:
    """Return the entropy of every full minibatch of an epoch, in the order of delivery.

    Parameters
    ----------
    labels
        Code of each row's label, integers, -1 where it is missing, shape (plan.n_rows,).
    plan
        The epoch.

    Returns
    -------
    Entropies in bits, shape (number of full minibatches,).
    """
    codes = as_codes(labels)
    parts = [
        entropies_of(codes[rows.reshape(-1, rows.shape[-1])]) for rows in minibatches_by_fetch(plan)
    ]
    return np.concatenate([np.empty(0), *parts])


def entropies_of(minibatches: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the plug-in entropy of each minibatch in bits, 0 if it has no label.

    Takes codes, -1 where missing, shape (n_minibatches, batch_size).
    """
    labels = np.sort(minibatches, axis=1)
    # H = log2 n - (1 / n) sum c log2 c over the runs of equal labels, c long, n known labels
    starts = np.ones(labels.shape, dtype=bool)
    starts[:, 1:] = labels[:, 1:] != labels[:, :-1]
    places = np.flatnonzero(starts)
    lengths = np.diff(places, append=labels.size)
    lengths[labels.ravel()[places] < 0] = 0
    weighted = lengths * np.log2(np.maximum(lengths, 1))
    minibatch = places // labels.shape[1]
    total = np.bincount(minibatch, weights=weighted, minlength=len(labels))
    known = np.maximum(1, np.bincount(minibatch, weights=lengths, minlength=len(labels)))
    entropies: NDArray[np.float64] = np.maximum(0.0, np.log2(known) - total / known)
    return entropies


def statistic_of(codes: NDArray[np.integer]) -> Statistic:
    """Return a function from minibatches of rows to their entropies."""
    return lambda rows: entropies_of(codes[rows])


def random_of_known_statistic(codes: NDArray[np.integer], counts: NDArray[np.int64]) -> Statistic:
    """Return a function from minibatches to the entropy of random samples with as many labels.

    ``counts`` are the rows of each label, shape (n_labels,).

    Examples
    --------
    >>> random = random_of_known_statistic(np.array([0, 1, -1, -1]), np.array([1, 1]))
    >>> random(np.array([[0, 1], [0, 2], [2, 3]]))
    array([1., 0., 0.])
    """

    @cache
    def bits(n_known: int) -> float:
        return theory.random_entropy_bits(counts, n_known) if n_known else 0.0

    def random_of_known(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        known, place = np.unique((codes[rows] >= 0).sum(axis=1), return_inverse=True)
        found: NDArray[np.float64] = np.array([bits(n) for n in known.tolist()])[place]
        return found

    return random_of_known


# Label entropy of the minibatches that a plan delivers, without reading data.


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
    fetch_deviation
        Standard deviation of the means of whole fetches; None if there are fewer than two.
    """

    block_size: int
    fetch_factor: int
    bits: Estimate
    n_minibatches: int
    fetch_deviation: float | None

    @classmethod
    def of(cls, replay: PlanReplay, block_size: int, fetch_factor: int) -> "LabelEntropy":
        """Return the entropy of a replayed plan."""
        return cls(
            block_size=block_size,
            fetch_factor=fetch_factor,
            bits=replay.mean,
            n_minibatches=replay.n_minibatches,
            fetch_deviation=replay.fetch_deviation,
        )


def label_entropy(
    labels: ArrayLike,
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
        shape (n_rows,). Rows without a label do not count in a minibatch's entropy.
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
    codes = as_codes(labels)
    found = list[LabelEntropy]()
    for block_size, fetch_factor in product(block_sizes, fetch_factors):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size),
            n_rows=codes.size,
            batch_size=batch_size,
            fetch_factor=fetch_factor,
            seed=seed,
        )
        (replay,) = replay_plan(plan, [statistic_of(codes)], n_rows=n_rows)
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
