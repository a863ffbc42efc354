"""Unbiased rounding of fractions to whole numbers of rows.

Fractions are represented by integers, ``weights / sum(weights)``, so nothing is rounded in floating
point.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, cycle, pairwise
from math import isclose, lcm

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.sampling import derive_key, random_below, random_words

_LARGEST_DENOMINATOR = 10**9
_TOLERANCE = 1e-6


def as_weights(fractions: Sequence[float]) -> tuple[int, ...]:
    """Return integers in the same proportions as the fractions.

    0.7 becomes 7/10, and the float nearest to 1/3 becomes 1/3.

    Raises
    ------
    ParameterError
        There are none, one is not above 0, or they do not sum to 1.

    Examples
    --------
    >>> as_weights([0.7, 0.2, 0.1])
    (7, 2, 1)
    """
    try:
        given = [float(each) for each in fractions]
    except (TypeError, ValueError) as error:
        msg = f"`fractions` must be numbers such as [0.8, 0.2], but got {fractions!r}"
        raise ParameterError(msg) from error
    if not given or not all(each > 0 for each in given):
        msg = f"`fractions` must be numbers above 0, at least one, but got {given}"
        raise ParameterError(msg)
    if not isclose(sum(given), 1, abs_tol=_TOLERANCE):
        msg = f"`fractions` must sum to 1, but {given} sum to {sum(given):g}"
        raise ParameterError(msg)
    exact = [Fraction(each).limit_denominator(_LARGEST_DENOMINATOR) for each in given]
    if min(exact) == 0:
        msg = f"each of `fractions` must be at least {1 / _LARGEST_DENOMINATOR:g}, but got {given}"
        raise ParameterError(msg)
    common = lcm(*(each.denominator for each in exact))
    return tuple(int(each * common) for each in exact)


def sizes_of_parts(n: int, weights: Sequence[int], key: int | None) -> NDArray[np.int64]:
    """Divide ``n`` rows by fractions; each part gets one of the two integers next to its share.

    The bounds between parts are rounded together: a bound is rounded up if its fractional part is
    at least 1 - u, with the same u for all. With random u, the expected sizes are the exact shares
    (systematic sampling, Madow 1949, of the parts that are rounded up).

    Parameters
    ----------
    n
        Number of rows.
    weights
        The fractions; see `as_weights`.
    key
        Random key for u; if None, u is 1/2, so bounds are rounded to the nearest integer.

    Returns
    -------
    Sizes, which sum to ``n``, shape (n_parts,).
    """
    whole, unit = sum(weights), 1 << 64
    u = unit // 2 if key is None else random_below(key, unit)
    before = np.array([*accumulate(weights, initial=0)], object)  # exact integers
    return np.diff((before * n * unit + u * whole) // (whole * unit)).astype(np.int64)


def controlled_rounding(
    counts: NDArray[np.int64], weights: Sequence[int], key: int | None
) -> NDArray[np.int64]:
    """Divide each of several strata by the same fractions.

    Every size is one of the two integers next to the stratum's share, and every part's sum is one
    of the two integers next to its share. With a key, the expected size is the share.

    Strata with equally many rows are rounded together: `_rounded` returns how many of them are
    rounded up in each part. Which of them is systematic (Madow 1949): part after part takes the
    next ones in turn, so no part takes a stratum twice, and all are taken equally often.

    Parameters
    ----------
    counts
        Number of rows of each stratum, shape (n_strata,).
    weights
        The fractions; see `as_weights`.
    key
        Random key; if None, strata are taken in order, and `_rounded` changes as little as it can.

    Returns
    -------
    Sizes, whose rows sum to ``counts``, shape (n_strata, n_parts).
    """
    whole = sum(weights)
    distinct, which, n_alike = np.unique(counts, return_inverse=True, return_counts=True)
    shares = distinct.astype(object)[:, None] * np.array(weights, object)  # integers of any size
    n_up = _rounded(shares % whole * n_alike[:, None], whole, key)
    words = np.arange(counts.size)
    if key is not None:
        words = random_words(derive_key(key, 0), words).astype(np.int64)
    alike = np.split(np.lexsort([words, which]), np.cumsum(n_alike)[:-1])
    sizes: NDArray[np.int64] = (shares // whole).astype(np.int64)[which]
    for strata, n_of_parts in zip(alike, n_up, strict=True):
        taken = np.repeat(np.arange(len(weights)), n_of_parts)
        sizes[strata, taken.reshape(-1, strata.size)] += 1
    return sizes


def _rounded(table: NDArray[np.object_], whole: int, key: int | None) -> NDArray[np.int64]:
    """Round multiples of 1 / ``whole``, and the sums of their columns; rows have integer sums.

    This is the unbiased controlled rounding of Cox, "A constructive procedure for unbiased
    controlled rounding" (JASA 82, 1987). Entries that are no integers are visited one by one. Once
    some of them form a closed path, alternately along a row and a column, they are raised and
    lowered in turn, in one direction or the other, until one of them is an integer, with
    probabilities that preserve the expectation.
    """
    table = np.vstack([table, -table.sum(axis=0) % whole])  # columns have integer sums, too
    floors, left = table // whole, table % whole
    crossing = defaultdict[int, set[int]](set)  # of rows and of columns, which are ~column
    for number, (row, column) in enumerate(np.argwhere(left).tolist()):
        path = _path(crossing, row, ~column)
        crossing[row].add(~column)
        crossing[~column].add(row)
        if not path:
            continue
        entries = [(max(each), ~min(each)) for each in pairwise([*path, row])]
        room = [left[each] if k % 2 else whole - left[each] for k, each in enumerate(entries)]
        most_up, most_down = min(room), whole - max(room)
        goes_up = most_up <= most_down
        if key is not None:
            goes_up = random_below(derive_key(key, 1, number), most_up + most_down) < most_down
        change = most_up if goes_up else -most_down
        for sign, each in zip(cycle([1, -1]), entries):
            left[each] += sign * change
            if left[each] in (0, whole):
                crossing[each[0]].remove(~each[1])
                crossing[~each[1]].remove(each[0])
    rounded: NDArray[np.int64] = (floors + left // whole)[:-1].astype(np.int64)
    return rounded


def _path(crossing: Mapping[int, set[int]], start: int, end: int) -> list[int]:
    """Return the lines from one to another; [] if they are not connected."""
    paths = [[start]]
    for path in paths:
        if path[-1] == end:
            return path
        paths += [[*path, each] for each in crossing[path[-1]].difference(path[-2:-1])]
    return []
