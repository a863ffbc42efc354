"""What a search is after: the fastest configuration, or the best mixed that is fast enough."""

from collections.abc import Callable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

__all__ = ["Goal", "best_mixed", "fastest"]

Goal = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From logarithms of cells per second, shape (..., n_candidates), to what is to be maximised."""


def fastest(log_speeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Value a configuration by its throughput; gains are relative."""
    return log_speeds


def best_mixed(need: float, shares: Sequence[float]) -> Goal:
    """Value configurations that give the throughput needed by how well they mix.

    Parameters
    ----------
    need
        Cells per second.
    shares
        Entropy of each candidate as a share of true random sampling's, shape (n_candidates,).

    Examples
    --------
    >>> goal = best_mixed(100.0, [0.9, 1.0])
    >>> goal(np.log([200.0, 100.0])).tolist(), goal(np.log([200.0, 50.0])).round(2).tolist()
    ([0.9, 1.0], [0.9, -0.69])
    """
    mixing = np.asarray(shares, dtype=np.float64)

    def value(log_speeds: NDArray[np.float64]) -> NDArray[np.float64]:
        lacking = log_speeds - log(need)
        # What is too slow is worse than all that is not, and the more so the slower it is.
        return np.where(lacking >= 0, mixing, lacking)

    return value
