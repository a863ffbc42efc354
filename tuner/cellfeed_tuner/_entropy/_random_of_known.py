"""Random sampling of as many labelled rows as minibatches have, where labels are missing.

Minibatches of which few rows have a label have little entropy however they were drawn, and the
more of these rows lie together, the more minibatches have none and others many. The entropy that
minibatches have is a share of that of random samples which have as many labelled rows: at most
all of it, but for chance.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed_tuner import theory
from cellfeed_tuner._entropy._label_counts import count_labels
from cellfeed_tuner._entropy._plan_replay import Statistic

__all__ = ["RandomOfKnown", "random_of_known_statistic"]


class RandomOfKnown(NamedTuple):
    """Random samples of as many labelled rows, in place of the labels of minibatches.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, -1 where missing, shape (n_rows,).
    counts
        How often each label is drawn, shape (n_labels,); as often as it occurs if None.
    """

    labels: ArrayLike
    counts: NDArray[np.int64] | None = None


def random_of_known_statistic(
    codes: NDArray[np.integer], counts: NDArray[np.int64] | None = None
) -> Statistic:
    """Return what gives, from rows, the entropy of random samples with as many labelled rows.

    Examples
    --------
    >>> random = random_of_known_statistic(np.array([0, 1, -1, -1]))
    >>> random(np.array([[0, 1], [0, 2], [2, 3]]))
    array([1., 0., 0.])
    """
    rows = count_labels(codes).counts if counts is None else counts

    @cache
    def bits(n_known: int) -> float:
        return theory.random_entropy_bits(rows, n_known) if n_known else 0.0

    def random_of_known(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        known, place = np.unique((codes[rows] >= 0).sum(axis=1), return_inverse=True)
        found: NDArray[np.float64] = np.array([bits(n) for n in known.tolist()])[place]
        return found

    return random_of_known
