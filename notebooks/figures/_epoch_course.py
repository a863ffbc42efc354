"""Minibatch entropy over the course of an epoch: is it the same from first to last?

Fetches of block shuffling are exchangeable, so its entropy does not drift, whatever the order of
the files. The exception is a short last block, which shifts all boundaries after it; it shows
where a fetch has hardly a block. Streaming goes through the files in order, and drifts wherever
they differ in mixing.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm
from scipy.stats import t as student_t

from cellfeed import EpochPlan, ParameterError
from cellfeed_tuner._constants import BEYOND_CHANCE
from cellfeed_tuner._entropy import (
    as_codes,
    entropies_of,
    fetches_per_block,
    require_a_label_for_each,
)
from cellfeed_tuner._interval import Estimate, mean_with_interval

__all__ = ["LEAST_MINIBATCHES", "EpochCourse", "entropy_over_epoch"]

_N_DECILES = 10
LEAST_MINIBATCHES = _N_DECILES
"""Fewest full minibatches with which an epoch has tenths."""

_LEAST_FETCHES = 16
# Rounding errors of sums of many logarithms.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCourse:
    """Mean minibatch entropy in each tenth of an epoch, in bits.

    It measures how mixed minibatches are, not what they contain: if each holds only one label, all
    tenths have 0 bits, whichever labels come first.

    Parameters
    ----------
    deciles
        Mean of each tenth of the minibatches with its 95 % interval, in order.
    drift_bits, drift_error_bits
        Last decile minus the first, and the size of a chance difference.
    departure_bits, departure_error_bits
        Difference of one decile from all others that is largest relative to chance, and the size
        of a chance difference.
    departing_decile
        The number of that decile, 0 to 9.
    """

    deciles: tuple[Estimate, ...]
    drift_bits: float
    drift_error_bits: float
    departure_bits: float
    departure_error_bits: float
    departing_decile: int

    @property
    def drifts(self) -> bool:
        """Whether some decile differs by more than chance explains."""
        return (
            abs(self.drift_bits) > self.drift_error_bits
            or abs(self.departure_bits) > self.departure_error_bits
        )

    @property
    def sentence(self) -> str:
        """A summary in one sentence."""
        values = [each.value for each in self.deciles]
        if self.drifts:
            return (
                f"Entropy drifts over an epoch: {values[0]:.3f} bits in its first tenth, "
                f"{values[-1]:.3f} in its last; tenth {self.departing_decile + 1} is the furthest "
                f"off, by {self.departure_bits:+.3f}, where sampling noise explains "
                f"{self.departure_error_bits:.3f}."
            )
        enough = np.isfinite(self.departure_error_bits)
        return (
            "From the first to the last tenth of an epoch, entropy stays within "
            f"{min(values):.3f} to {max(values):.3f} bits"
            + (
                ", within sampling noise."
                if enough
                else "; too few fetches to tell whether it drifts."
            )
        )


def entropy_over_epoch(labels: ArrayLike, plan: EpochPlan, *, n_rows: int = 262_144) -> EpochCourse:
    """Return the minibatch entropy in each tenth of an epoch, from the labels alone.

    A difference between deciles is compared with the spread of fetches within deciles (as in an
    analysis of variance), the only spread there is if fetches are exchangeable.

    Parameters
    ----------
    labels
        Code of each row's label in storage order, -1 where missing, shape (plan.n_rows,).
    plan
        The epoch, of any strategy.
    n_rows
        About how many rows to replay, in evenly spread fetches; at least 16 fetches per decile if
        there are as many.

    Raises
    ------
    ParameterError
        The labels are not a line of ``plan.n_rows`` integers, or the epoch has fewer than ten
        full minibatches.

    Examples
    --------
    >>> from cellfeed import BlockShuffling, Streaming
    >>> labels = np.concatenate([np.repeat([0, 1], 6_400), np.tile([0, 1], 6_400)])
    >>> for strategy in (Streaming(), BlockShuffling(block_size=16)):
    ...     plan = EpochPlan(strategy=strategy, n_rows=25_600, batch_size=64, fetch_factor=4)
    ...     print(entropy_over_epoch(labels, plan).drifts)
    True
    False
    """
    codes = as_codes(labels)
    require_a_label_for_each(codes, plan.n_rows)
    n_minibatches = plan.rows_per_stream // plan.batch_size
    if n_minibatches < LEAST_MINIBATCHES:
        msg = f"an epoch must have at least 10 full minibatches, but it has {n_minibatches}"
        raise ParameterError(msg)
    ends = np.arange(_N_DECILES + 1) * n_minibatches // _N_DECILES
    most = max(_LEAST_FETCHES, n_rows // (_N_DECILES * plan.fetch_size))
    deciles = [_decile(codes, plan, int(start), int(stop), most) for start, stop in pairwise(ends)]
    # Parts of one fetch in several deciles are one sample.
    n_fetches = -(-n_minibatches // (plan.fetch_factor * fetches_per_block(plan)))
    return _course(deciles, n_fetches)


@dataclass(frozen=True, slots=True)
class _Decile:
    """Means over fetches, or their parts in the decile, and the minibatches of each."""

    means: NDArray[np.float64]
    sizes: NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(np.average(self.means, weights=self.sizes))

    @property
    def n(self) -> float:
        """The number of equal fetches whose mean is as precise (Kish's effective sample size)."""
        return float(self.sizes.sum() ** 2 / (self.sizes**2).sum())


def _decile(
    codes: NDArray[np.integer], plan: EpochPlan, start: int, stop: int, most: int
) -> _Decile:
    """Replay evenly spread fetches of the minibatches from ``start`` to ``stop``."""
    first, last = start // plan.fetch_factor, (stop - 1) // plan.fetch_factor
    # Fetches from one block resemble each other: only one of them is used.
    step = max(fetches_per_block(plan), (last - first + 1) // most)
    means, sizes = list[float](), list[int]()
    for fetch in range(first, last + 1, step):
        rows = plan.delivered_rows(fetch)[0]
        before = fetch * plan.fetch_factor
        inside = slice(max(0, start - before), min(stop - before, plan.fetch_factor))
        minibatches = rows[: rows.size - rows.size % plan.batch_size].reshape(-1, plan.batch_size)
        entropies = entropies_of(codes[minibatches[inside]])
        means.append(float(entropies.mean()))
        sizes.append(entropies.size)
    return _Decile(np.array(means), np.array(sizes, dtype=np.float64))


def _course(deciles: list[_Decile], n_fetches: int) -> EpochCourse:
    n = np.array([each.n for each in deciles])
    means = np.array([each.mean for each in deciles])
    n_samples = sum(each.means.size for each in deciles)
    degrees = max(0, min(n_samples, n_fetches) - len(deciles))
    squares = sum(float(((each.means - each.mean) ** 2).sum()) for each in deciles)
    # As far into the tail as BEYOND_CHANCE is of the normal distribution.
    quantile = float(student_t.isf(norm.sf(BEYOND_CHANCE), degrees)) if degrees else np.inf
    deviation = (squares / degrees) ** 0.5 if degrees else 1.0
    others = (n @ means - n * means) / (n.sum() - n)
    departures = means - others
    errors = quantile * deviation * np.sqrt(1 / n + 1 / (n.sum() - n)) + _ROUNDING
    furthest = int(np.argmax(np.abs(departures) / errors)) if degrees else 0
    return EpochCourse(
        deciles=tuple(mean_with_interval(each.means, weights=each.sizes) for each in deciles),
        drift_bits=float(means[-1] - means[0]),
        drift_error_bits=float(quantile * deviation * (1 / n[0] + 1 / n[-1]) ** 0.5 + _ROUNDING),
        departure_bits=float(departures[furthest]),
        departure_error_bits=float(errors[furthest]),
        departing_decile=furthest,
    )
