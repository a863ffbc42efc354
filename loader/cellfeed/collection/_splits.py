"""Random splits of a collection, for example into training, validation and test sets."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, cycle, pairwise
from math import isclose, lcm
from numbers import Integral
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import (
    ColumnError,
    ParameterError,
    require_one_of,
    require_positive,
    require_seed,
)
from cellfeed._lazy import pd
from cellfeed.collection._collection import Collection
from cellfeed.collection._indexables import count_rows
from cellfeed.sampling import derive_key, random_below, random_words
from cellfeed.sampling._base import has_masked, require_row_numbers
from cellfeed.sampling._labels import column_of, factorized

# Labels for splits: obs columns by name, or arrays.

LabelsLike = str | Sequence[str] | ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels of rows.

    Parameters
    ----------
    name
        Name of the labels in messages.
    codes
        Code of each row's label in [0, n), shape (n_rows,).
    labels
        The labels by code, each of which occurs, shape (n,); None for missing labels, and tuples
        for several columns.
    counts
        Number of rows with each label, shape (n,).
    """

    name: str
    codes: NDArray[np.integer]
    labels: tuple[Any, ...]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def labels_of(
    collection: Any, given: LabelsLike, parameter: str, rows: slice | NDArray[np.int64], n_rows: int
) -> Labels:
    """Return the labels of the given rows; missing labels count as one more label.

    Parameters
    ----------
    collection
        The collection with the columns.
    given
        The name of an obs column, several names (whose combinations are the labels), or an array
        with a label for each row of the collection.
    parameter
        Name of the parameter, for messages.
    rows
        The rows.
    n_rows
        Number of rows of the collection.

    Raises
    ------
    ColumnError
        obs has no such column, or there is no obs.
    ParameterError
        The number of labels is not the number of rows.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        column = _of_array(given, parameter, n_rows)
        return Labels(f"the labels of `{parameter}`", *_compact(*column, rows))
    if not names:
        raise ParameterError(f"`{parameter}` is empty; name an obs column, or leave it out")
    columns = _columns(collection, names, parameter, n_rows)
    first, *others = (_compact(*column, rows) for column in columns)
    codes, labels, counts = first
    if others:
        labels = tuple((each,) for each in labels)
    for other_codes, other_labels, _ in others:
        n = len(other_labels)
        codes, found = factorized(codes.astype(np.int64) * n + other_codes)
        pairs = (divmod(each, n) for each in found)
        labels = tuple((*labels[i], other_labels[j]) for i, j in pairs)
        counts = np.bincount(codes, minlength=len(labels)).astype(np.int64)
    return Labels(", ".join(names), codes, labels, counts)


def _columns(
    collection: Any, names: Sequence[str], parameter: str, n_rows: int
) -> list[tuple[NDArray[np.integer], Sequence[Any]]]:
    if isinstance(collection, Collection):
        read = collection.read_obs(names)
        return [factorized(read[name]) for name in names]
    columns = (column_of(collection, name, parameter) for name in names)
    return [_of_array(each, parameter, n_rows) for each in columns]


def _of_array(
    given: ArrayLike, parameter: str, n_rows: int
) -> tuple[NDArray[np.integer], Sequence[Any]]:
    values: Any = given
    is_pandas = isinstance(given, pd.Series | pd.Index | pd.api.extensions.ExtensionArray)
    if not is_pandas and not has_masked(given):
        values = np.asarray(given)
    if values.shape != (n_rows,):
        msg = (
            f"`{parameter}` must have a label for each of {n_rows:,} rows, but has shape "
            f"{values.shape}"
        )
        raise ParameterError(msg)
    return factorized(values)


def _compact(
    codes: NDArray[np.integer], values: Sequence[Any], rows: slice | NDArray[np.int64]
) -> tuple[NDArray[np.integer], tuple[Any, ...], NDArray[np.int64]]:
    """Return codes, labels and counts of labels that occur in the rows, with missing ones last."""
    codes = codes[rows]
    known = codes[codes >= 0] if codes.size and codes.min() < 0 else codes
    counts = np.bincount(known, minlength=len(values))
    occur = np.flatnonzero(counts)
    numbers = np.full(len(values) + 1, len(occur), np.min_scalar_type(-max(1, len(occur))))
    numbers[occur] = np.arange(len(occur))
    n_missing = codes.size - known.size
    labels = (*(values[place] for place in occur.tolist()), *([None] if n_missing else []))
    counts = np.append(counts[occur], [n_missing] if n_missing else []).astype(np.int64)
    return numbers[codes], labels, counts  # -1 takes the last number


# Unbiased rounding of fractions to whole numbers of rows. Fractions are represented by integers,
# ``weights / sum(weights)``, so nothing is rounded in floating point.

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


# Assigning rows to parts: one by one, within strata, or as whole groups.

_N_DRAWS = 64  # random orders of groups, the best of which is used
# Rows that are processed together, so that intermediate results take little memory.
_AT_ONCE = 1 << 20


def _slices(n: int) -> Iterator[slice]:
    """Yield all rows, in slices."""
    for start in range(0, n, _AT_ONCE):
        yield slice(start, min(start + _AT_ONCE, n))


def _independent_parts(n: int, weights: Sequence[int], key: int) -> NDArray[np.unsignedinteger]:
    """Draw a part for each of ``n`` rows or groups independently."""
    whole, before = sum(weights), np.cumsum(np.array(weights, object))[:-1]
    bounds = np.array([(int(each) << 64) // whole for each in before], np.uint64)
    parts = np.empty(n, np.min_scalar_type(len(weights)))
    for some in _slices(n):
        words = random_words(key, np.arange(some.start, some.stop))
        parts[some] = np.searchsorted(bounds, words, side="right")
    return parts


def _parts_of_rows(
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
    # The upper bits of a row's word are its stratum.
    head_bits = np.uint64((sizes.shape[0] - 1).bit_length())

    def words_of(rows: slice, key: int) -> NDArray[np.uint64]:
        words = random_words(key, np.arange(rows.start, rows.stop))
        if strata is None or not head_bits:
            return words
        heads = strata[rows].astype(np.uint64) << (np.uint64(64) - head_bits)
        joint: NDArray[np.uint64] = heads | (words >> head_bits)
        return joint

    ends = np.cumsum(sizes.ravel()).reshape(sizes.shape)[:, :-1]
    inside = (ends > 0) & (ends < n_rows)
    words = np.empty(n_rows, np.uint64)
    while True:
        for rows in _slices(n_rows):
            words[rows] = words_of(rows, key)
        words.sort()
        if not np.any(words[ends[inside]] == words[ends[inside] - 1]):
            break
        # The rows on both sides of a bound have the same word, which happens in less than one of
        # 10,000 orders of 10 million rows.
        key = derive_key(key, 0)
    # The first word of each part, except for the first part; no row is behind the last one.
    bounds = np.full(ends.shape, np.iinfo(np.uint64).max)
    bounds[inside] = words[ends[inside]]
    bounds[ends == 0] = 0
    del words  # 8 bytes a row
    parts = np.zeros(n_rows, np.min_scalar_type(n_parts))
    for rows in _slices(n_rows):
        own, of_row = words_of(rows, key), 0 if strata is None else strata[rows]
        for each in bounds.T:
            parts[rows] += own >= each[of_row]
    return parts


def _best_parts_of_groups(
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
    fractions, n_parts = _fractions(weights), len(weights)
    numbers = np.arange(len(groups))
    if strata is not None:  # the number of rows of each pair of group and stratum that occurs
        joint = groups.codes.astype(np.int64) * len(strata) + strata.codes
        codes, found = pd.factorize(joint)
        pair_groups, pair_strata = np.divmod(found, len(strata))
        pair_counts = np.bincount(codes)
    best, least = np.empty(0, np.intp), np.inf
    for draw in range(_N_DRAWS):
        order = np.argsort(random_words(derive_key(key, draw), numbers))
        parts = np.empty(len(groups), np.intp)
        parts[order] = np.searchsorted(_cuts(groups.counts[order], fractions), numbers, "right")
        sizes = np.bincount(parts, weights=groups.counts, minlength=n_parts)
        misplaced = _misplaced_share(sizes[None], fractions)[0]
        if strata is not None:
            places = pair_strata * n_parts + parts[pair_groups]
            table = np.bincount(places, weights=pair_counts, minlength=len(strata) * n_parts)
            misplaced += _misplaced_share(table.reshape(-1, n_parts), fractions).mean()
        if misplaced < least:
            best, least = parts, misplaced
    return best.astype(np.min_scalar_type(n_parts))


def _fractions(weights: Sequence[int]) -> NDArray[np.float64]:
    return np.array([each / sum(weights) for each in weights])


def _misplaced_share(
    table: NDArray[np.floating] | NDArray[np.int64], fractions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of misplaced rows of each stratum."""
    reached = table / table.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.abs(reached - fractions).sum(axis=1) / 2
    return shares


def _cuts(sizes: NDArray[np.int64], fractions: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the number of groups before each bound, nearest to the fractions; no part is empty."""
    before = np.append(0, np.cumsum(sizes))
    n_groups, n_parts = sizes.size, fractions.size
    cuts = np.empty(n_parts - 1, np.intp)
    previous = 0
    for part, target in enumerate(np.cumsum(fractions)[:-1] * before[-1]):
        above = int(np.searchsorted(before, target))
        below = max(above - 1, 0)
        nearest = below if target - before[below] <= before[above] - target else above
        previous = min(max(nearest, previous + 1), n_groups - (n_parts - 1 - part))
        cuts[part] = previous
    return cuts


# The rows of each part, and the shares that were reached.

Rows = NDArray[np.int64]


class Split(Sequence[Rows]):
    """The rows of each part of a collection, as `random_split` returns them.

    This is a sequence of arrays, int64, ascending: ``train, validation, test = split``.

    Parameters
    ----------
    rows
        The rows of each part.
    requested
        The requested fractions.
    n_groups
        Number of groups that were kept whole, if any.
    """

    def __init__(
        self, rows: Sequence[Rows], requested: NDArray[np.float64], n_groups: int | None
    ) -> None:
        self._rows, self._requested, self._n_groups = tuple(rows), requested, n_groups

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, part: int, /) -> Rows: ...

    @overload
    def __getitem__(self, part: slice, /) -> tuple[Rows, ...]: ...

    def __getitem__(self, part: int | slice, /) -> Rows | tuple[Rows, ...]:
        return self._rows[part]

    @property
    def fractions(self) -> tuple[float, ...]:
        """Share of the rows in each part."""
        sizes = np.array([each.size for each in self._rows])
        return tuple((sizes / sizes.sum()).tolist())

    def __repr__(self) -> str:
        sizes = " + ".join(f"{each.size:,}" for each in self._rows)
        reached, requested = (
            ", ".join(f"{each:.3g}" for each in shares)
            for shares in (self.fractions, self._requested)
        )
        text = f"{sizes} rows: {reached}"
        if requested != reached:
            text += f" (asked {requested})"
        if self._n_groups is not None:
            text += f", {self._n_groups:,} groups kept whole"
        return f"Split({text})"


Method = Literal["deterministic", "multinomial", "stochastic_rounding"]

# Purposes of the random streams of one seed.
_SIZES, _ROWS, _GROUPS = range(3)
_MOST_OFF = 0.1  # from a fraction, relative to it, without a warning
_LEAST_ROWS_PER_STRATUM = 2


def random_split(
    collection: Any,
    fractions: Sequence[float],
    *,
    seed: int,
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
        The same seed gives the same parts, with any version of NumPy.
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
        The rows to split, each once; all rows if None.

    Returns
    -------
    A sequence with the rows of each part, ``train, test = random_split(...)``; its ``fractions``
    are those that were reached.

    Raises
    ------
    ParameterError
        A fraction is not above 0, the fractions do not sum to 1, a part would be empty, the number
        of labels is not the number of rows, a row is given twice, there are fewer groups than
        parts, or "multinomial" is combined with ``stratify``.
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
    require_one_of("method", method, get_args(Method))
    if method == "multinomial" and stratify is not None:
        msg = "method='multinomial' draws rows independently, which balances nothing; leave out "
        raise ParameterError(msg + "`stratify`, or choose another method")
    seed = require_seed(seed)
    n_rows = count_divided(collection)
    rows: slice | Rows = slice(None) if indices is None else _distinct(indices, n_rows)
    n = n_rows if isinstance(rows, slice) else rows.size
    strata = groups = None
    if stratify is not None:
        strata = labels_of(collection, stratify, "stratify", rows, n_rows)
        _require_few(strata)
    if group is not None:
        groups = labels_of(collection, group, "group", rows, n_rows)
    parts = _parts(n, weights, seed, method, strata, groups)
    requested = _fractions(weights)
    places = [np.flatnonzero(parts == part) for part in range(len(weights))]
    split = Split(
        places if isinstance(rows, slice) else [rows[each] for each in places],
        requested,
        None if groups is None else len(groups),
    )
    for part, each in enumerate(split):
        if not each.size:
            msg = (
                f"part {part} (fraction {requested[part]:.3g}) gets none of {n:,} rows; "
                "give fewer parts, or larger fractions"
            )
            raise ParameterError(msg)
    is_off = np.abs(split.fractions - requested) > _MOST_OFF * requested + 1 / n
    if groups is not None and method != "multinomial" and is_off.any():
        msg = f"whole groups of {groups.name} do not divide as requested: {split}"
        warnings.warn(f"{msg}; try another seed or other fractions", UserWarning, stacklevel=2)
    return split


def count_divided(collection: Any) -> int:
    """Return the number of rows of what is to be divided, or the number that was given.

    Raises
    ------
    ParameterError
        It has none, or it has minibatches in place of rows.
    """
    if hasattr(collection, "load_state_dict"):
        msg = (
            f"`collection` is a {type(collection).__name__}, which has minibatches and no rows; "
            "divide its collection, and give the rows of a part to a strategy as `indices`"
        )
        raise ParameterError(msg)
    if isinstance(collection, Integral):
        return require_positive("collection", collection)
    return count_rows(collection, is_indexed=False)


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
            _independent_parts(len(groups), weights, key)
            if method == "multinomial"
            else _best_parts_of_groups(groups, strata, weights, key)
        )
        parts: NDArray[np.unsignedinteger] = by_group[groups.codes]
        return parts
    if method == "multinomial":
        return _independent_parts(n, weights, derive_key(seed, _ROWS))
    size_key = None if method == "deterministic" else derive_key(seed, _SIZES)
    if strata is None:
        sizes = sizes_of_parts(n, weights, size_key)[None]
    else:
        sizes = controlled_rounding(strata.counts, weights, size_key)
    codes = None if strata is None else strata.codes
    return _parts_of_rows(sizes, codes, derive_key(seed, _ROWS))


def _distinct(indices: ArrayLike, n_rows: int) -> NDArray[np.int64]:
    """Return distinct rows, ascending."""
    rows = np.sort(require_row_numbers(indices)).astype(np.int64)
    if rows[0] < 0 or rows[-1] >= n_rows:
        msg = f"`0 <= indices < {n_rows}` must hold, but got indices from {rows[0]} to {rows[-1]}"
        raise ParameterError(msg)
    twice = rows[1:][rows[1:] == rows[:-1]]
    if twice.size:
        raise ParameterError(f"`indices` has row {twice[0]} twice; give each row once")
    return rows


def _require_few(strata: Labels) -> None:
    n_rows, n_labels = strata.codes.size, len(strata)
    if n_labels > 1 and n_rows < _LEAST_ROWS_PER_STRATUM * n_labels:
        msg = (
            f"{strata.name}: {n_labels:,} labels in {n_rows:,} rows, so almost all rows differ and "
            "there is nothing to balance; choose a label such as the cell type, or make bins "
            "(pandas.cut)"
        )
        raise ColumnError(msg)
