"""Label entropy of minibatches whose labels are known."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import EpochPlan
from cellfeed_tuner._entropy._label_counts import as_codes
from cellfeed_tuner._entropy._plan_replay import Statistic, minibatches_by_fetch

__all__ = ["entropies_of", "entropy_statistic", "minibatch_entropies"]


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


def entropy_statistic(codes: NDArray[np.integer]) -> Statistic:
    """Return what gives the label entropies of minibatches from their rows."""

    def entropies(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return entropies_of(codes[rows])

    return entropies
