"""Label entropy of the minibatches that a plan will deliver, without reading any data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, EpochPlan, ParameterError
from cellfeed_tuner._interval import Estimate, mean_with_interval

__all__ = ["LabelEntropy", "entropies_of", "label_entropy", "minibatch_entropies"]

# So many rows are replayed at once: enough to be fast, few enough to stay in the CPU's cache.
_ROWS_AT_ONCE = 1 << 17
# Minibatches of one fetch resemble each other, so that fetches are what an interval rests on.
_LEAST_FETCHES = 16
# A handful of cells needs no more epochs than this.
_MOST_EPOCHS = 256


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
    """

    block_size: int
    fetch_factor: int
    bits: Estimate
    n_minibatches: int


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
    codes = _codes(labels)
    results = []
    for block_size, fetch_factor in product(block_sizes, fetch_factors):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size=block_size),
            n_rows=codes.size,
            batch_size=batch_size,
            fetch_factor=fetch_factor,
            seed=seed,
        )
        bits, n_minibatches = _replay(codes, plan, n_rows)
        results.append(
            LabelEntropy(
                block_size=block_size,
                fetch_factor=fetch_factor,
                bits=bits,
                n_minibatches=n_minibatches,
            )
        )
        if on_progress is not None:
            on_progress(len(results))
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
    codes = _codes(labels)
    parts = [entropies.ravel() for entropies in _entropies_by_fetch(codes, plan)]
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


def _codes(labels: ArrayLike) -> NDArray[np.integer]:
    codes = np.asarray(labels)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype.kind not in "iu":
        msg = (
            "`labels` must be one-dimensional integer codes, at least one, "
            f"but got shape {codes.shape} and dtype {codes.dtype}"
        )
        raise ParameterError(msg)
    return codes


def _replay(codes: NDArray[np.integer], plan: EpochPlan, n_rows: int) -> tuple[Estimate, int]:
    """Replay fetches until they hold ``n_rows`` rows and suffice for an interval.

    Blocks are exchangeable, so the first fetches of an epoch stand for all of them.
    """
    least_rows = max(n_rows, _LEAST_FETCHES * min(plan.fetch_size, plan.n_rows))
    by_fetch, replayed, epoch = list[NDArray[np.float64]](), 0, 0
    while replayed < least_rows and epoch < _MOST_EPOCHS:
        for entropies in _entropies_by_fetch(codes, replace(plan, epoch=epoch)):
            by_fetch.extend(entropies)
            replayed += entropies.size * plan.batch_size
            if replayed >= least_rows:
                break
        epoch += 1
    fetch_means = np.array([entropies.mean() for entropies in by_fetch])
    sizes = np.array([entropies.size for entropies in by_fetch])
    return mean_with_interval(fetch_means, weights=sizes), int(sizes.sum())


def _entropies_by_fetch(
    codes: NDArray[np.integer], plan: EpochPlan
) -> Iterator[NDArray[np.float64]]:
    """Yield entropies of full minibatches, shape (n_fetches, n_minibatches), some at a time."""
    at_once = max(1, _ROWS_AT_ONCE // plan.fetch_size)
    for first in range(0, plan.n_whole_fetches, at_once):
        n = min(at_once, plan.n_whole_fetches - first)
        yield _entropies(codes, plan.delivered_rows(first, n), plan.batch_size)
    if plan.n_fetches > plan.n_whole_fetches:
        last = plan.delivered_rows(plan.n_fetches - 1)
        # A short minibatch counts only where the collection has no other.
        size = min(plan.batch_size, plan.n_rows)
        n_full = last.shape[1] // size
        if n_full:
            yield _entropies(codes, last[:, : n_full * size], size)


def _entropies(
    codes: NDArray[np.integer], rows: NDArray[np.int64], batch_size: int
) -> NDArray[np.float64]:
    minibatches = codes[rows].reshape(-1, batch_size)
    return entropies_of(minibatches).reshape(len(rows), -1)
