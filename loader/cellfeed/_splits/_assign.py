"""Which part each row gets: rows one by one, within strata, or groups as a whole."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed._splits._labels import Labels
from cellfeed.sampling import derive_key, random_words

__all__ = ["best_parts_of_groups", "independent_parts", "parts_of_rows"]

N_DRAWS = 64
"""Draws of groups of which the best is taken."""


# Rows that are dealt with at once, so that what is made on the way takes little memory.
_AT_ONCE = 1 << 20


def independent_parts(n: int, weights: Sequence[int], key: int) -> NDArray[np.unsignedinteger]:
    """Draw a part for each of ``n`` rows or groups by itself."""
    whole, ahead = sum(weights), np.cumsum(np.array(weights, object))[:-1]
    bounds = np.array([(int(each) << 64) // whole for each in ahead], np.uint64)
    parts = np.empty(n, np.min_scalar_type(len(weights)))
    for start in range(0, n, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, n))
        parts[numbers] = np.searchsorted(bounds, random_words(key, numbers), side="right")
    return parts


def parts_of_rows(
    sizes: NDArray[np.int64], strata: NDArray[np.integer] | None, key: int
) -> NDArray[np.unsignedinteger]:
    """Draw rows of each stratum for each part, as many as it is to have.

    The random words of different rows differ, so that their order does not hang on how they are
    sorted.

    Parameters
    ----------
    sizes
        Rows of each stratum in each part, shape (n_strata, n_parts).
    strata
        Stratum of each row, shape (n_rows,); None if there is one only.
    key
        Draws the rows.

    Returns
    -------
    Part of each row, shape (n_rows,).
    """
    n_rows = int(sizes.sum())
    by_stratum = None if strata is None else np.argsort(strata, kind="stable")
    parts = np.empty(n_rows, np.min_scalar_type(sizes.shape[1]))
    start = 0
    for each in sizes:
        stop = start + int(each.sum())
        bounds = _bounds(each, by_stratum, start, key)
        for rows in _rows_between(by_stratum, start, stop):
            parts[rows] = np.searchsorted(bounds, random_words(key, rows), side="right")
        start = stop
    return parts


def _bounds(
    sizes: NDArray[np.int64], by_stratum: NDArray[np.int64] | None, start: int, key: int
) -> NDArray[np.uint64]:
    """Return the random words that the parts of a stratum, but for the first, begin with."""
    n = int(sizes.sum())
    cuts = np.cumsum(sizes)[:-1]
    cuts = cuts[cuts < n]
    if not cuts.size:
        return np.empty(0, np.uint64)
    words, filled = np.empty(n, np.uint64), 0
    for rows in _rows_between(by_stratum, start, start + n):
        words[filled : filled + rows.size] = random_words(key, rows)
        filled += rows.size
    words.partition(np.unique(cuts))
    return words[cuts]


def _rows_between(
    by_stratum: NDArray[np.int64] | None, start: int, stop: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows at some places of the order by strata, some at a time."""
    for first in range(start, stop, _AT_ONCE):
        last = min(first + _AT_ONCE, stop)
        yield np.arange(first, last) if by_stratum is None else by_stratum[first:last]


def best_parts_of_groups(
    groups: Labels, strata: Labels | None, weights: Sequence[int], key: int
) -> NDArray[np.unsignedinteger]:
    """Draw a part for each group, several times, and return the best.

    Each draw puts the groups into random order and divides it where the parts' shares of the rows
    are nearest to their fractions. The best is that of which the fewest rows are in another part
    than they should be, as a share of all rows and, on average, of each stratum.

    Parameters
    ----------
    groups, strata
        Labels of the same rows.
    weights
        The fractions.
    key
        Draws the orders.

    Returns
    -------
    Part of each group, shape (n_groups,).

    Raises
    ------
    ParameterError
        There are fewer groups than parts.
    """
    if len(groups) < len(weights):
        msg = (
            f"{len(weights)} parts need as many groups, but there are {len(groups)} of "
            f"{groups.name}; ask for fewer parts"
        )
        raise ParameterError(msg)
    fractions = np.array([each / sum(weights) for each in weights])
    pairs = None if strata is None else _Pairs(groups, strata)
    numbers = np.arange(len(groups))
    best, least = None, np.inf
    for draw in range(N_DRAWS):
        order = np.argsort(random_words(derive_key(key, draw), numbers))
        parts = np.empty(len(groups), np.intp)
        parts[order] = np.searchsorted(_cuts(groups.counts[order], fractions), numbers, "right")
        sizes = np.bincount(parts, weights=groups.counts, minlength=fractions.size)
        misplaced = misplaced_share(sizes[None], fractions)[0]
        if pairs is not None:
            misplaced += misplaced_share(pairs.table(parts, fractions.size), fractions).mean()
        if misplaced < least:
            best, least = parts, misplaced
    assert best is not None  # noqa: S101 - for type checkers
    return best.astype(np.min_scalar_type(fractions.size))


def misplaced_share(
    table: NDArray[np.floating] | NDArray[np.int64], fractions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of each stratum's rows that are in another part than they should be."""
    reached = table / table.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.abs(reached - fractions).sum(axis=1) / 2
    return shares


def _cuts(sizes: NDArray[np.int64], fractions: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return how many groups come before each bound, nearest to the fractions; none is empty."""
    ahead = np.append(0, np.cumsum(sizes))
    n_groups, n_parts = sizes.size, fractions.size
    cuts = np.empty(n_parts - 1, np.intp)
    previous = 0
    for part, target in enumerate(np.cumsum(fractions)[:-1] * ahead[-1]):
        above = int(np.searchsorted(ahead, target))
        below = max(above - 1, 0)
        nearest = below if target - ahead[below] <= ahead[above] - target else above
        previous = min(max(nearest, previous + 1), n_groups - (n_parts - 1 - part))
        cuts[part] = previous
    return cuts


class _Pairs:
    """How many rows of each stratum each group has, where it has some."""

    def __init__(self, groups: Labels, strata: Labels) -> None:
        joint = groups.codes.astype(np.int64) * len(strata) + strata.codes
        codes, found = pd.factorize(joint)
        self._n_strata = len(strata)
        self._groups, self._strata = np.divmod(found, len(strata))
        self._counts = np.bincount(codes)

    def table(self, parts: NDArray[np.intp], n_parts: int) -> NDArray[np.float64]:
        """Return rows of each stratum in each part, shape (n_strata, n_parts)."""
        places = self._strata * n_parts + parts[self._groups]
        flat = np.bincount(places, weights=self._counts, minlength=self._n_strata * n_parts)
        return flat.reshape(self._n_strata, n_parts).astype(np.float64)
