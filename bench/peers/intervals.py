"""Medians with their uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_FOR_BOOTSTRAP = 5
N_RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A median and how sure it is.

    Attributes
    ----------
    value
        Median of the samples.
    low, high
        The bootstrap's 95 % interval; of fewer than five samples the smallest and the largest.
    n_samples
        How many there were.
    """

    value: float
    low: float
    high: float
    n_samples: int

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n_samples)


def median_with_interval(samples: Sequence[float]) -> Estimate | None:
    """Return the median of some samples with its interval, None if there are no samples."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        return None
    if values.size < FEWEST_FOR_BOOTSTRAP:
        low, high = values.min(), values.max()
    else:
        draws = np.random.default_rng(0).choice(values, size=(N_RESAMPLES, values.size))
        low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return Estimate(float(np.median(values)), float(low), float(high), values.size)


def interval_name(n_samples: int) -> str:
    """Say what the interval of so many samples is."""
    if n_samples < FEWEST_FOR_BOOTSTRAP:
        return "smallest and largest"
    return "95 % bootstrap interval"
