"""Random splits and folds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._collection._indexables import count_rows
from cellfeed._collection._splits._result import Folds, Labels, LabelsLike, Parts, Split, labels_of
from cellfeed._collection._splits._rounding import as_weights, controlled_rounding, sizes_of_parts
from cellfeed._errors import ColumnError, ParameterError, require_integer, require_positive
from cellfeed._lazy import pd
from cellfeed.sampling import derive_key, random_words

# Assigning rows to parts: one by one, within strata, or as whole groups.

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


Method = Literal["deterministic", "multinomial", "stochastic_rounding"]

# Purposes of the random streams of one seed.
_SIZES, _ROWS, _GROUPS = range(3)
# A split by groups that is further off is warned of: a part's share, relative to its fraction, and
# the share of a stratum's rows that are in another part than they should be, on average.
_MOST_OFF, _MOST_MISPLACED = 0.1, 0.1
_LEAST_ROWS_PER_STRATUM = 2


def random_split(
    collection: Any,
    fractions: Sequence[float],
    *,
    seed: int | None = None,
    method: Method = "stochastic_rounding",
    stratify: LabelsLike | None = None,
    group: LabelsLike | None = None,
    indices: ArrayLike | None = None,
) -> Split:
    """Split the rows of a collection at random, for example into training, validation and test.

    Parameters
    ----------
    collection
        A `Collection`, any other object with a length, or a number of rows.
    fractions
        Share of the rows for each part; they must sum to 1.
    seed
        Required: the same seed gives the same parts, with any version of NumPy.
    method
        How many rows a part gets, as in TileDB-SOMA-ML. "deterministic": always its share, rounded
        to the nearest integer. "stochastic_rounding": one of the two integers next to its share, at
        random, so that the expected number is the share. "multinomial": the part of each row (or
        group) is drawn independently, so sizes vary.
    stratify
        The name of an obs column, a list of names, or an array with a label for each row. Each part
        gets its share of the rows of each label, rounded up or down. Rows without a label count as
        one more label. Columns that a `Collection` was not opened with are read.
    group
        Labels such as the donor, given like ``stratify``: all rows of a label get into the same
        part, and rows without a label stay together. Unless groups are drawn independently
        ("multinomial"), the best of 64 random orders of the groups is used: the one nearest to the
        fractions and, with ``stratify``, to the fractions within each label, on average.
    indices
        The distinct rows to split; all rows if None.

    Returns
    -------
    A sequence with the rows of each part, ``train, test = random_split(...)``, which also reports
    the sizes that were reached.

    Raises
    ------
    ParameterError
        A fraction is not above 0, the fractions do not sum to 1, a part would be empty, the number
        of labels is not the number of rows, there are fewer groups than parts, or "multinomial" is
        combined with ``stratify``.
    ColumnError
        obs has no such column, or almost all rows have different labels to stratify by.

    Warns
    -----
    UserWarning
        The parts of whole groups are far from the requested fractions.

    Examples
    --------
    >>> train, test = random_split(10, [0.8, 0.2], seed=0)
    >>> train.size, test.size
    (8, 2)
    >>> donor = np.repeat(["a", "b", "c", "d", "e"], 20)
    >>> random_split(100, [0.8, 0.2], seed=0, group=donor)
    Split(80 + 20 rows: 0.8, 0.2, 5 groups kept whole)
    """
    weights = as_weights(fractions)
    return Split(_divided(collection, weights, seed, method, stratify, group, indices))


def k_folds(
    collection: Any,
    k: int,
    *,
    seed: int | None = None,
    stratify: LabelsLike | None = None,
    group: LabelsLike | None = None,
    indices: ArrayLike | None = None,
) -> Folds:
    """Split the rows of a collection into ``k`` folds, each of which is used once for validation.

    Parameters
    ----------
    collection, seed, stratify, group, indices
        See `random_split`.
    k
        Number of folds, at least 2. Their sizes differ by at most one row, except with ``group``.

    Returns
    -------
    A sequence of pairs of training rows and validation rows, each computed when accessed.

    Raises
    ------
    ParameterError, ColumnError
        See `random_split`; or ``k`` is below 2.

    Warns
    -----
    UserWarning
        See `random_split`.

    Examples
    --------
    >>> for train, validation in k_folds(9, 3, seed=0):
    ...     print(train.size, validation.size)
    6 3
    6 3
    6 3
    """
    if require_integer("k", k) < 2:  # noqa: PLR2004 - one fold leaves nothing to train with
        raise ParameterError(f"`k >= 2` must hold, but got k={k}")
    weights = (1,) * int(k)
    return Folds(_divided(collection, weights, seed, "deterministic", stratify, group, indices))


def _divided(
    collection: Any,
    weights: Sequence[int],
    seed: int | None,
    method: Method,
    stratify: LabelsLike | None,
    group: LabelsLike | None,
    indices: ArrayLike | None,
) -> Parts:
    if method not in get_args(Method):
        msg = f"`method` must be one of {', '.join(get_args(Method))}, but got {method!r}"
        raise ParameterError(msg)
    if method == "multinomial" and stratify is not None:
        msg = "method='multinomial' draws rows independently, which balances nothing; leave out "
        raise ParameterError(msg + "`stratify`, or choose another method")
    if seed is None:
        msg = "`seed` is missing; give one, such as seed=0, so that every run has the same parts"
        raise ParameterError(msg)
    seed = require_integer("seed", seed)
    if hasattr(collection, "load_state_dict"):
        msg = (
            f"`collection` is a {type(collection).__name__}, which has minibatches and no rows; "
            "divide its collection, and give the rows of a part to a strategy as `indices`"
        )
        raise ParameterError(msg)
    n_rows = _n_rows(collection)
    rows = None if indices is None else _distinct(indices, n_rows)
    n = n_rows if rows is None else rows.size
    selected: slice | NDArray[np.int64] = slice(None) if rows is None else rows
    strata = groups = None
    if stratify is not None:
        strata = labels_of(collection, stratify, "stratify", selected, n_rows)
        _require_few(strata)
    if group is not None:
        groups = labels_of(collection, group, "group", selected, n_rows)
    parts = _parts(n, weights, seed, method, strata, groups)
    found = Parts(
        rows=rows,
        parts=parts,
        fractions=np.array([each / sum(weights) for each in weights]),
        strata=strata,
        n_groups=None if groups is None else len(groups),
    )
    _require_none_empty(found, weights)
    if groups is not None and method != "multinomial":
        _warn_if_far_off(found, weights, groups)
    return found


def _parts(
    n: int,
    weights: Sequence[int],
    seed: int,
    method: Method,
    strata: Labels | None,
    groups: Labels | None,
) -> NDArray[np.unsignedinteger]:
    """Return the part of each row."""
    if groups is not None:
        key = derive_key(seed, _GROUPS)
        by_group = (
            independent_parts(len(groups), weights, key)
            if method == "multinomial"
            else best_parts_of_groups(groups, strata, weights, key)
        )
        parts: NDArray[np.unsignedinteger] = by_group[groups.codes]
        return parts
    if method == "multinomial":
        return independent_parts(n, weights, derive_key(seed, _ROWS))
    size_key = None if method == "deterministic" else derive_key(seed, _SIZES)
    if strata is None:
        sizes = sizes_of_parts(n, weights, size_key)[None]
    else:
        sizes = controlled_rounding(strata.counts.tolist(), weights, size_key)
    codes = None if strata is None else strata.codes
    return parts_of_rows(sizes, codes, derive_key(seed, _ROWS))


def _n_rows(collection: Any) -> int:
    if isinstance(collection, Integral):
        return require_positive("collection", collection)
    return count_rows(collection, is_indexed=False)


def _distinct(indices: ArrayLike, n_rows: int) -> NDArray[np.int64]:
    given = np.asarray(indices)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        msg = (
            "`indices` must be one-dimensional integers, at least one, "
            f"but got shape {given.shape} and dtype {given.dtype}"
        )
        raise ParameterError(msg)
    rows = np.sort(given)
    if rows[0] < 0 or rows[-1] >= n_rows:
        msg = f"`0 <= indices < {n_rows}` must hold, but got indices from {rows[0]} to {rows[-1]}"
        raise ParameterError(msg)
    twice = rows[1:][rows[1:] == rows[:-1]]
    if twice.size:
        msg = f"`indices` have row {twice[0]} twice, which could get into two parts; give it once"
        raise ParameterError(msg)
    return rows.astype(np.int64)


def _require_few(strata: Labels) -> None:
    if len(strata) > 1 and strata.codes.size < _LEAST_ROWS_PER_STRATUM * len(strata):
        msg = (
            f"{strata.name}: {len(strata):,} labels in {strata.codes.size:,} rows, so almost "
            "all rows differ and there is nothing to balance; choose a label such as the "
            "cell type, or make bins (pandas.cut)"
        )
        raise ColumnError(msg)


def _require_none_empty(found: Parts, weights: Sequence[int]) -> None:
    empty = np.flatnonzero(found.sizes == 0)
    if empty.size:
        fraction = weights[empty[0]] / sum(weights)
        msg = (
            f"part {empty[0]} (fraction {fraction:.3g}) gets none of {found.sizes.sum():,} "
            "rows; give fewer parts, or larger fractions"
        )
        raise ParameterError(msg)


def _warn_if_far_off(found: Parts, weights: Sequence[int], groups: Labels) -> None:
    asked = np.array([each / sum(weights) for each in weights])
    reached = np.array(found.fractions)
    said = []
    if np.any(np.abs(reached - asked) > _MOST_OFF * asked + 1 / groups.codes.size):
        shares = " + ".join(f"{each:.3g}" for each in reached)
        said.append(f"have {shares} of the rows, not {' + '.join(f'{e:.3g}' for e in asked)}")
    if found.strata is not None:
        misplaced = float(misplaced_share(found.strata.to_numpy(), asked).mean())
        if misplaced > _MOST_MISPLACED:
            said.append(
                f"have {misplaced:.0%} of a label's rows, on average, that belong in another "
                f"part, most of {found.worst_stratum()[0]!r}"
            )
    if said:
        warnings.warn(
            f"{len(groups):,} groups of {groups.name} were kept whole, so parts "
            f"{', and '.join(said)}; see `describe()`, and try another seed or other fractions",
            UserWarning,
            stacklevel=4,
        )
