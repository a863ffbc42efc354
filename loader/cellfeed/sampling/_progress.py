"""How far an epoch has come, on given numbers of ranks and workers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, require_integer, require_positive

__all__ = ["Progress", "delivered_by_worker", "next_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an epoch has come, and how it was divided.

    Parameters
    ----------
    world_size
        Number of ranks.
    num_workers
        Number of workers of each rank, each of which takes every n-th fetch; at least 1.
    n_minibatches
        Number of minibatches that each rank has delivered.

    Raises
    ------
    ParameterError
        ``world_size`` or ``num_workers`` is below one, or ``n_minibatches`` is negative.
    """

    world_size: int = 1
    num_workers: int = 1
    n_minibatches: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("world_size", "num_workers"):
            object.__setattr__(self, name, require_positive(name, getattr(self, name)))
        n = require_integer("n_minibatches", self.n_minibatches)
        object.__setattr__(self, "n_minibatches", n)
        if n < 0:
            msg = f"`n_minibatches >= 0` must hold, but got {n}"
            raise ParameterError(msg)


def delivered_by_worker(totals: NDArray[np.int64], n_delivered: int) -> NDArray[np.int64]:
    """Return how many minibatches came from each worker.

    A DataLoader takes one minibatch from each worker in turn, and skips workers that have no more.

    Parameters
    ----------
    totals
        Number of minibatches of each worker in the epoch, int64, shape (n_workers,).
    n_delivered
        Number of delivered minibatches of all workers; at most ``totals.sum()``.

    Returns
    -------
    int64, shape (n_workers,), with the sum ``n_delivered``.

    Examples
    --------
    >>> delivered_by_worker(np.array([4, 1, 3]), 6)
    array([3, 1, 2])
    """
    low, high = 0, int(totals.max(initial=0))  # whole turns
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(totals, middle).sum() <= n_delivered:
            low = middle
        else:
            high = middle - 1
    delivered = np.minimum(totals, low)
    next_ones = np.flatnonzero(totals > low)[: n_delivered - int(delivered.sum())]
    delivered[next_ones] += 1
    return delivered


def next_worker(totals: NDArray[np.int64], delivered: NDArray[np.int64]) -> int:
    """Return the worker that delivers next; 0 if none has minibatches left.

    Parameters
    ----------
    totals, delivered
        Number of minibatches of each worker, and of its delivered ones, shape (n_workers,).

    Examples
    --------
    >>> next_worker(np.array([4, 1, 3]), np.array([3, 1, 2]))
    2
    """
    has_more = np.flatnonzero(delivered < totals)
    return int(has_more[delivered[has_more].argmin()]) if has_more.size else 0
