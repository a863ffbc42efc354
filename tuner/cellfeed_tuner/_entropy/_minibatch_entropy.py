"""Label entropy of minibatches, and of blocks, whose labels are known."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import EpochPlan
from cellfeed_tuner._entropy._label_counts import as_codes
from cellfeed_tuner._entropy._plan_replay import Statistic, minibatches_by_fetch

__all__ = ["entropies_of", "entropy_statistic", "minibatch_entropies", "within_block_bits"]

# Rows of blocks whose entropies are taken at once.
_ROWS_AT_ONCE = 1 << 17


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
    entropies_at = entropy_statistic(as_codes(labels))
    parts = [entropies_at(rows.reshape(-1, rows.shape[-1])) for rows in minibatches_by_fetch(plan)]
    return np.concatenate([np.empty(0), *parts])


def entropies_of(minibatches: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the plug-in entropy of each minibatch in bits, 0 where no label is known.

    From codes, -1 where missing, shape (n_minibatches, batch_size).
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


def within_block_bits(codes: NDArray[np.integer], block_size: int) -> float:
    """Return the mean plug-in entropy of blocks, a short last one too, weighted by their rows.

    Takes codes, block after block, and the memory of some 100,000 rows, or of a larger block.

    Examples
    --------
    >>> sorted_labels = np.repeat([0, 1, 2, 3], 300)
    >>> [round(within_block_bits(sorted_labels, size), 3) for size in (10, 400)]
    [0.0, 0.874]
    """
    at_once = max(1, _ROWS_AT_ONCE // block_size) * block_size
    whole = codes.size - codes.size % block_size
    parts: list[NDArray[np.integer]] = np.split(codes, [*range(at_once, whole, at_once), whole])
    *of_whole, short = parts
    total = sum(float(entropies_of(each.reshape(-1, block_size)).sum()) for each in of_whole)
    in_short = float(entropies_of(short[None])[0]) if short.size else 0.0
    return (total * block_size + in_short * short.size) / codes.size


def entropy_statistic(codes: NDArray[np.integer]) -> Statistic:
    """Return what gives the label entropies of minibatches from their rows."""

    def entropies(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return entropies_of(codes[rows])

    return entropies
