"""Unbiased rounding of fractions to whole numbers of rows.

Fractions are represented by integers, ``weights / sum(weights)``, so nothing is rounded in floating
point.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import isclose, lcm

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.sampling import derive_key, random_below, random_words

_LARGEST_DENOMINATOR = 10**9
_TOLERANCE = 1e-6
# A random number in [0, 1) is so many bits.
_BITS = 64
# Purpose of a random stream; those that draw one by one begin with 0.
_ALIKE = 1 << 32

_Entry = tuple[int, int]


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
        msg = (
            f"`fractions` must be numbers that sum to 1, such as [0.8, 0.2], but got {fractions!r}"
        )
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
    whole, unit = sum(weights), 1 << _BITS
    u = unit // 2 if key is None else random_below(key, unit)
    bounds = [
        (before * n * unit + u * whole) // (whole * unit)
        for before in itertools.accumulate(weights, initial=0)
    ]
    ends = np.array(bounds, np.int64)
    return ends[1:] - ends[:-1]


def controlled_rounding(
    counts: Sequence[int], weights: Sequence[int], key: int | None
) -> NDArray[np.int64]:
    """Divide each of several strata by the same fractions.

    Every size is one of the two integers next to the stratum's share, and every part's sum is one
    of the two integers next to its share. With a key, the expected size is the share: this is the
    unbiased controlled rounding of Cox, "A constructive procedure for unbiased controlled rounding"
    (JASA 82, 1987), applied to one stratum after another. The entries along a closed path of
    non-integers are raised and lowered in turn, in one direction or the other, until one of them is
    an integer, with probabilities that preserve the expectation.

    If there are many strata, most are divided together. Let the fractions be multiples of 1 / w.
    Among w strata with the same number of rows modulo w, each gets another multiple of 1 / w as u
    (see `sizes_of_parts`), at random: the sums of their parts are then integers, independent of the
    other strata.

    Parameters
    ----------
    counts
        Number of rows of each stratum.
    weights
        The fractions; see `as_weights`.
    key
        Random key for the directions; if None, the shorter direction is taken.

    Returns
    -------
    Sizes, whose rows sum to ``counts``, shape (n_strata, n_parts).
    """
    sizes = np.empty((len(counts), len(weights)), np.int64)
    remaining = _divide_alike(np.array(counts), weights, key, sizes)
    sizes[remaining] = _one_by_one([counts[each] for each in remaining.tolist()], weights, key)
    return sizes


def _divide_alike(
    counts: NDArray[np.int64], weights: Sequence[int], key: int | None, sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Divide sets of equal strata whose parts have integer sums; return the remaining strata."""
    whole, numbers = sum(weights), np.arange(counts.size)
    if whole > counts.size or whole * int(counts.max()) > np.iinfo(np.int64).max // 2:
        return numbers
    order = numbers
    if key is not None:
        order = np.argsort(random_words(derive_key(key, _ALIKE), numbers), kind="stable")
    remainders = counts[order] % whole
    order = order[np.argsort(remainders, kind="stable")]
    n_alike = np.bincount(remainders, minlength=whole)
    ranks = numbers - np.repeat(np.cumsum(n_alike) - n_alike, n_alike)
    is_divided = ranks < np.repeat(n_alike - n_alike % whole, n_alike)
    divided = order[is_divided]
    before = np.cumsum([0, *weights]) * counts[divided][:, None]
    sizes[divided] = np.diff((before + (ranks[is_divided] % whole)[:, None]) // whole, axis=1)
    return np.sort(order[~is_divided])


def _one_by_one(
    counts: Sequence[int], weights: Sequence[int], key: int | None
) -> NDArray[np.int64]:
    """Divide one stratum after another; shares are integers, of which ``whole`` are a row."""
    whole = sum(weights)
    floors = [[n * each // whole for each in weights] for n in counts]
    fractions = [[n * each % whole for each in weights] for n in counts]
    # One more stratum makes the parts' sums integers; its own sizes are what they are rounded by.
    fractions.append([-sum(of_part) % whole for of_part in zip(*fractions, strict=True)])
    sizes = np.array([*floors, [0] * len(weights)], np.int64)
    left = dict[_Entry, int]()  # fractions that are not rounded yet
    n_drawn = 0
    for stratum, own in enumerate(fractions):
        left |= {(stratum, part): each for part, each in enumerate(own) if each}
        while path := _closed_path(left):
            up, down = path[::2], path[1::2]
            most_up = min(*(whole - left[e] for e in up), *(left[e] for e in down))
            most_down = min(*(left[e] for e in up), *(whole - left[e] for e in down))
            if key is None:
                goes_up = most_up <= most_down
            else:
                drawn = random_below(derive_key(key, n_drawn), most_up + most_down)
                goes_up = drawn < most_down
                n_drawn += 1
            change = most_up if goes_up else -most_down
            for k, entry in enumerate(path):
                left[entry] += -change if k % 2 else change
                if left[entry] in (0, whole) and left.pop(entry):
                    sizes[entry] += 1
    return sizes[:-1]


def _closed_path(entries: dict[_Entry, int]) -> list[_Entry]:
    """Return a closed path of entries, alternately in the same row and column; [] if none."""
    open_ends = set(entries)
    while True:
        in_row = Counter(row for row, _ in open_ends)
        in_column = Counter(column for _, column in open_ends)
        lone = {(r, c) for r, c in open_ends if in_row[r] == 1 or in_column[c] == 1}
        if not lone:
            break
        open_ends -= lone
    if not open_ends:
        return []
    path = [min(open_ends)]
    seen = {("row", path[0][0]): 0}
    while True:
        row, column = path[-1]
        along_row = len(path) % 2 == 0
        line = ("row", row) if along_row else ("column", column)
        if line in seen:
            return path[seen[line] :]
        seen[line] = len(path)
        path.append(
            min(
                (r, c)
                for r, c in open_ends
                if (r, c) != (row, column) and (r == row if along_row else c == column)
            )
        )
