"""Means with their 95 % intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, log

import numpy as np
from numpy.typing import ArrayLike

# Confidence level of intervals. Chosen: the field's convention.
CONFIDENCE = 0.95
# Prior spread of replicates on a machine that does little else, and its weight in degrees of
# freedom. Chosen: replicates of one configuration soon outweigh it.
USUAL_SPREAD, USUAL_FREEDOM = 0.05, 2.0
# A ratio is unknown if its interval is wider than this factor on both sides.
UNKNOWN_TIMES = 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval.

    Parameters
    ----------
    value
        The estimate.
    low, high
        Ends of the interval; infinite if there are too few samples for one.
    """

    value: float
    low: float
    high: float


def mean_with_interval(samples: ArrayLike, *, weights: ArrayLike | None = None) -> Estimate:
    """Return the weighted mean of independent samples, shape (n,), with Student's 95 % interval.

    Examples
    --------
    >>> mean_with_interval([1.0, 2.0, 3.0]).value
    2.0
    """
    values = np.asarray(samples, dtype=np.float64)
    shares = np.ones(values.size) if weights is None else np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum()
    mean = float(shares @ values)
    if values.size < 2:  # noqa: PLR2004 - a spread needs two
        return Estimate(mean, -np.inf, np.inf)
    # Variance of a weighted mean; for equal weights, the sample variance over n.
    variance = float((shares**2) @ (values - mean) ** 2) * values.size / (values.size - 1)
    half = _half_width(values.size - 1) * variance**0.5
    return Estimate(mean, mean - half, mean + half)


def positive_estimate(mean: float, relative_error: float, freedom: float) -> Estimate:
    """Return the mean of a positive quantity, with Student's 95 % interval of its logarithm."""
    times = exp(_half_width(freedom) * relative_error)
    return Estimate(mean, mean / times, mean * times)


def pooled_estimate(mean: float, n: int, replicates: Iterable[Sequence[float]]) -> Estimate:
    """Return the mean of ``n`` positive replicates, with its 95 % interval.

    The relative spread is pooled over the replicates of several measurements, because each has few.
    That of an idle machine (5 %) enters with two degrees of freedom.

    Examples
    --------
    >>> found = pooled_estimate(2.0, 2, [[1.0, 1.1, 0.9], [2.0], [3.0, 3.3]])
    >>> found.value, round(found.high / found.value, 2)
    (2.0, 1.15)
    """
    squares, freedom = USUAL_FREEDOM * USUAL_SPREAD**2, USUAL_FREEDOM
    for values in map(np.asarray, replicates):
        squares += float(((values / values.mean() - 1) ** 2).sum())
        freedom += values.size - 1
    return positive_estimate(mean, (squares / freedom / n) ** 0.5, freedom)


def quotient(one: Estimate, other: Estimate) -> Estimate:
    """Return the quotient of two positive values with independent errors.

    Examples
    --------
    >>> quotient(Estimate(2.0, 2.0, 2.0), Estimate(4.0, 4.0, 4.0))
    Estimate(value=0.5, low=0.5, high=0.5)
    """
    half = hypot(*(_log_half_width(each) for each in (one, other)))
    value = one.value / other.value
    return Estimate(value, value * exp(-half), value * exp(half) if half < inf else inf)


def scaled(one: Estimate, by: Estimate) -> Estimate:
    """Return the product of two positive values with independent errors.

    Examples
    --------
    >>> scaled(Estimate(2.0, 2.0, 2.0), Estimate(4.0, 4.0, 4.0))
    Estimate(value=8.0, low=8.0, high=8.0)
    """
    inverse = Estimate(1 / by.value, 1 / by.high, 1 / by.low if by.low > 0 else inf)
    return quotient(one, inverse)


def _log_half_width(estimate: Estimate) -> float:
    if estimate.low <= 0 or estimate.high == inf:
        return inf
    return log(estimate.high / estimate.low) / 2


def _half_width(freedom: float) -> float:
    """Return half of Student's 95 % interval, in standard errors."""
    from scipy.special import stdtrit  # noqa: PLC0415 - showing intervals needs no SciPy

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def interval(speed: Estimate) -> str:
    """Return a throughput with its interval, formatted.

    Examples
    --------
    >>> interval(Estimate(43_932.4, 41_612.0, 46_525.0))
    '43,932 [41,612, 46,525]'
    """
    return f"{speed.value:,.0f} [{speed.low:,.0f}, {speed.high:,.0f}]"


def is_unknown(ratio: Estimate) -> bool:
    """Return whether the interval of a ratio reaches beyond half and twice its value."""
    return ratio.low < ratio.value / UNKNOWN_TIMES and ratio.high > UNKNOWN_TIMES * ratio.value


def times(ratio: Estimate) -> str:
    """Return a ratio with its interval, formatted, unless it is unknown.

    Examples
    --------
    >>> times(Estimate(1.105, 1.01, 1.2085)), times(Estimate(1.2, 0.4, 3.6))
    ('1.10x [1.01x, 1.21x]', 'an unknown number of times')
    """
    if is_unknown(ratio):
        return "an unknown number of times"
    return f"{ratio.value:.2f}x [{ratio.low:.2f}x, {ratio.high:.2f}x]"


SAME_SPEED_SHARE = 0.02
"""A throughput more than this share below the highest is slower, however wide the intervals."""

EQUALLY_FAST = "equally fast"
"""What `is_as_fast` and `are_equally_fast` mean, in words."""


def is_same(ratio: Estimate) -> bool:
    """Return whether two throughputs are known to differ by at most 2 %."""
    return ratio.low >= 1 - SAME_SPEED_SHARE and ratio.high <= 1 + SAME_SPEED_SHARE


def is_undecided(ratio: Estimate) -> bool:
    """Return whether it is open which throughput of a ratio is higher, and whether they differ."""
    return ratio.low <= 1 <= ratio.high and not is_same(ratio)


def is_as_fast(ratio: Estimate) -> bool:
    """Return whether the first throughput of a ratio is at most 2 % and not clearly lower."""
    return ratio.value >= 1 - SAME_SPEED_SHARE and ratio.high >= 1


def are_equally_fast(ratio: Estimate) -> bool:
    """Return whether each of two throughputs is at most 2 % and not clearly lower."""
    return is_as_fast(ratio) and ratio.low <= 1 and ratio.value * (1 - SAME_SPEED_SHARE) <= 1
