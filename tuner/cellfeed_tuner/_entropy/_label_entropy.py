"""Label entropy of the minibatches that a plan will deliver, without reading any data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, EpochPlan, ParameterError
from cellfeed_tuner._entropy._label_counts import as_codes
from cellfeed_tuner._entropy._plan_replay import (
    FetchSpread,
    Statistic,
    minibatches_by_fetch,
    replay,
)
from cellfeed_tuner._interval import Estimate

__all__ = [
    "LabelEntropy",
    "entropies_of",
    "label_entropies",
    "label_entropy",
    "minibatch_entropies",
    "minibatch_statistic",
    "replayed_grid",
]


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
    labels: ArrayLike,
    *,
    batch_size: int,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    n_rows: int = 1_000_000,
    seed: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> list[LabelEntropy]:
    """Return the minibatch entropy of block shuffling for a whole grid, without any I/O.

    The plan is run over the labels alone, so that runs of labels, blocks that straddle them and
    sampling without replacement are all as they will be.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, integers, -1 where it is missing,
        shape (n_rows,). Rows without a label are left out of a minibatch's entropy.
    batch_size
        Rows of a minibatch.
    block_sizes, fetch_factors
        The grid.
    n_rows
        Rows to replay for each cell of the grid, over as many epochs as that takes, up to 256.
    seed
        Seed of the plans.
    on_progress
        Called with the number of finished cells after each.

    Returns
    -------
    One result for each pair, block sizes outermost.

    Raises
    ------
    ParameterError
        The labels are not a line of integers, or a size is below one.

    Examples
    --------
    >>> labels = np.repeat([0, 1], 6_400)
    >>> for cell in label_entropy(labels, batch_size=64, block_sizes=[64], fetch_factors=[1, 16]):
    ...     print(cell.block_size, cell.fetch_factor, round(cell.bits.value, 2))
    64 1 0.0
    64 16 0.94
    """
    return label_entropies(
        {"": labels},
        batch_size=batch_size,
        block_sizes=block_sizes,
        fetch_factors=fetch_factors,
        n_rows=n_rows,
        seed=seed,
        on_progress=on_progress,
    )[""]


def label_entropies(
    labels: Mapping[str, ArrayLike],
    *,
    batch_size: int,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    n_rows: int = 1_000_000,
    seed: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> dict[str, list[LabelEntropy]]:
    """Return the minibatch entropy of several labels over one replay of each plan.

    Rows are drawn once, and every label is looked up for them.

    Parameters
    ----------
    labels
        Codes of each label, as `label_entropy` takes them, all of the same length.
    batch_size, block_sizes, fetch_factors, n_rows, seed, on_progress
        As in `label_entropy`.

    Returns
    -------
    For each label what `label_entropy` returns.

    Raises
    ------
    ParameterError
        There is no label, labels are not lines of integers or differ in length, or a size is
        below one.

    Examples
    --------
    >>> labels = {"plate": np.repeat([0, 1], 6_400), "drug": np.tile([0, 1], 6_400)}
    >>> found = label_entropies(labels, batch_size=64, block_sizes=[64], fetch_factors=[1])
    >>> for name, (cell,) in found.items():
    ...     print(name, round(cell.bits.value, 2))
    plate 0.0
    drug 1.0
    """
    codes = {name: as_codes(each) for name, each in labels.items()}
    sizes = {name: each.size for name, each in codes.items()}
    if len(set(sizes.values())) != 1:
        msg = f"labels must all have the same number of rows, at least one label, but got {sizes}"
        raise ParameterError(msg)
    found = replayed_grid(
        [minibatch_statistic(each) for each in codes.values()],
        n_cells=next(iter(sizes.values())),
        batch_size=batch_size,
        block_sizes=block_sizes,
        fetch_factors=fetch_factors,
        n_rows=n_rows,
        seed=seed,
        on_progress=on_progress,
    )
    return dict(zip(codes, found, strict=True))


def replayed_grid(
    statistics: Sequence[Statistic],
    *,
    n_cells: int,
    batch_size: int,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    n_rows: int,
    seed: int,
    on_progress: Callable[[int], object] | None = None,
) -> list[list[LabelEntropy]]:
    """Replay block shuffling over a whole grid, and return a list for each statistic.

    Parameters
    ----------
    statistics
        What is taken of each minibatch, in bits.
    n_cells
        Rows of the collection.
    batch_size, block_sizes, fetch_factors, n_rows, seed, on_progress
        As in `label_entropy`.
    """
    results: list[list[LabelEntropy]] = [[] for _ in statistics]
    for number, (block_size, fetch_factor) in enumerate(product(block_sizes, fetch_factors)):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size=block_size),
            n_rows=n_cells,
            batch_size=batch_size,
            fetch_factor=fetch_factor,
            seed=seed,
        )
        for cells, replayed in zip(results, replay(plan, statistics, n_rows=n_rows), strict=True):
            cells.append(
                LabelEntropy(
                    block_size=block_size,
                    fetch_factor=fetch_factor,
                    bits=replayed.mean,
                    n_minibatches=replayed.n_minibatches,
                    whole_fetches=replayed.whole_fetches,
                )
            )
        if on_progress is not None:
            on_progress(number + 1)
    return results


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
    entropies_at = minibatch_statistic(as_codes(labels))
    parts = [entropies_at(rows.reshape(-1, rows.shape[-1])) for rows in minibatches_by_fetch(plan)]
    return np.concatenate([np.empty(0), *parts])


def entropies_of(minibatches: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the plug-in entropy of each row of labels.

    Parameters
    ----------
    minibatches
        Label codes, -1 where missing, shape (n_minibatches, batch_size).

    Returns
    -------
    Entropies in bits, shape (n_minibatches,); 0 where no label is known.
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


def minibatch_statistic(codes: NDArray[np.integer]) -> Statistic:
    """Return what gives the label entropies of minibatches from their rows."""

    def entropies(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return entropies_of(codes[rows])

    return entropies
