"""Assigning rows to parts: one by one, within strata, or as whole groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed._lazy import pd
from cellfeed._splits._labels import Labels
from cellfeed.sampling import derive_key, random_words

__all__ = ["best_parts_of_groups", "independent_parts", "parts_of_rows"]

N_DRAWS = 64
"""Number of random orders of groups, the best of which is used."""


# Rows that are dealt with at once, so that what is made on the way takes little memory.
_AT_ONCE = 1 << 20


def independent_parts(n: int, weights: Sequence[int], key: int) -> NDArray[np.unsignedinteger]:
    """Draw a part for each of ``n`` rows or groups independently."""
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
    """Draw the given number of rows of each stratum for each part.

    Rows are sorted by stratum, and within a stratum by random words: the first rows get into the
    first part, and so on. This takes 8 bytes a row, whatever the number of strata.

    Parameters
    ----------
    sizes
        Number of rows of each stratum in each part, shape (n_strata, n_parts).
    strata
        Stratum of each row, shape (n_rows,); None if there is only one.
    key
        Random key.

    Returns
    -------
    Part of each row, shape (n_rows,).
    """
    n_rows, n_parts = int(sizes.sum()), sizes.shape[1]
    order = _RandomOrder(key, strata, sizes.shape[0])
    while (bounds := order.bounds(sizes)) is None:
        key = derive_key(key, 0)
        order = _RandomOrder(key, strata, sizes.shape[0])
    parts = np.zeros(n_rows, np.min_scalar_type(n_parts))
    for rows in _slices(n_rows):
        words = order.words(rows)
        of_row = 0 if strata is None else strata[rows]
        for each in bounds.T:
            parts[rows] += words >= each[of_row]
    return parts


class _RandomOrder:
    """Random order of rows within strata, by a word per row whose upper bits are the stratum.

    Parameters
    ----------
    key
        Random key.
    strata, n_strata
        Stratum of each row, None if there is only one; and the number of strata.
    """

    def __init__(self, key: int, strata: NDArray[np.integer] | None, n_strata: int) -> None:
        self._key, self._strata = key, strata
        self._head_bits = np.uint64(0 if strata is None else (n_strata - 1).bit_length())

    def words(self, rows: slice) -> NDArray[np.uint64]:
        """Return the words of the given rows."""
        words = random_words(self._key, np.arange(rows.start, rows.stop))
        if self._strata is None or not self._head_bits:
            return words
        heads = self._strata[rows].astype(np.uint64) << (np.uint64(64) - self._head_bits)
        joint: NDArray[np.uint64] = heads | (words >> self._head_bits)
        return joint

    def bounds(self, sizes: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Return the first word of each part of each stratum, except for the first part.

        Returns
        -------
        Shape (n_strata, n_parts - 1); None if the rows on both sides of a bound have the same word,
        which happens in less than one of 10,000 orders of 10 million rows.
        """
        words = np.empty(int(sizes.sum()), np.uint64)
        for rows in _slices(words.size):
            words[rows] = self.words(rows)
        words.sort()
        ends = np.cumsum(sizes.ravel()).reshape(sizes.shape)[:, :-1]
        inside = (ends > 0) & (ends < words.size)
        if np.any(words[ends[inside]] == words[ends[inside] - 1]):
            return None
        bounds = np.full(ends.shape, np.iinfo(np.uint64).max)  # behind the last row begins nothing
        bounds[inside] = words[ends[inside]]
        bounds[ends == 0] = 0
        return bounds


def _slices(n: int) -> Iterator[slice]:
    """Yield all rows, in slices."""
    for start in range(0, n, _AT_ONCE):
        yield slice(start, min(start + _AT_ONCE, n))


def best_parts_of_groups(
    groups: Labels, strata: Labels | None, weights: Sequence[int], key: int
) -> NDArray[np.unsignedinteger]:
    """Draw a part for each group, several times, and return the best.

    Each draw puts the groups into random order and cuts it where the parts' shares of the rows
    are nearest to their fractions. The best draw has the fewest misplaced rows, as a share of all
    rows and, on average, of each stratum.

    Parameters
    ----------
    groups, strata
        Labels of the same rows.
    weights
        The fractions.
    key
        Random key.

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
            f"{len(weights)} parts need at least as many groups, but there are {len(groups)} "
            f"of {groups.name}; give fewer parts"
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
    """Return the share of misplaced rows of each stratum."""
    reached = table / table.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.abs(reached - fractions).sum(axis=1) / 2
    return shares


def _cuts(sizes: NDArray[np.int64], fractions: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the number of groups before each bound, nearest to the fractions; no part is empty."""
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
    """Number of rows of each stratum in each group, for pairs that occur."""

    def __init__(self, groups: Labels, strata: Labels) -> None:
        joint = groups.codes.astype(np.int64) * len(strata) + strata.codes
        codes, found = pd.factorize(joint)
        self._n_strata = len(strata)
        self._groups, self._strata = np.divmod(found, len(strata))
        self._counts = np.bincount(codes)

    def table(self, parts: NDArray[np.intp], n_parts: int) -> NDArray[np.float64]:
        """Return the number of rows of each stratum in each part, shape (n_strata, n_parts)."""
        places = self._strata * n_parts + parts[self._groups]
        flat = np.bincount(places, weights=self._counts, minlength=self._n_strata * n_parts)
        return flat.reshape(self._n_strata, n_parts).astype(np.float64)
