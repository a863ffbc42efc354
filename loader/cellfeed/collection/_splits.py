"""Splits of a collection: training, validation and test sets, and folds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import (
    ColumnError,
    ParameterError,
    require_integer,
    require_one_of,
    require_positive,
    require_seed,
)
from cellfeed._lazy import pd
from cellfeed.collection._collection import Collection
from cellfeed.collection._indexables import count_rows
from cellfeed.collection._rounding import as_weights, controlled_rounding, sizes_of_parts
from cellfeed.sampling import derive_key, random_words
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


@dataclass(eq=False, repr=False)
class _Parts:
    """Rows divided into parts.

    Parameters
    ----------
    _split_rows
        The rows that were split, ascending, as often as given, shape (n_rows,); all if None.
    _parts
        Part of each row, shape (n_rows,).
    _requested
        The requested fractions.
    _sizes
        Number of rows in each part, shape (n_parts,).
    _table
        Number of rows of each label of ``stratify`` in each part, if given.
    _n_groups
        Number of groups that were kept whole, if any.
    """

    _split_rows: Rows | None
    _parts: NDArray[np.unsignedinteger]
    _requested: NDArray[np.float64]
    _sizes: NDArray[np.int64]
    _table: pd.DataFrame | None
    _n_groups: int | None

    def _rows_where(self, is_in: NDArray[np.bool_]) -> Rows:
        """Return the rows that a mask of the split rows selects, ascending."""
        places = np.flatnonzero(is_in)
        return places if self._split_rows is None else self._split_rows[places]

    @property
    def fractions(self) -> tuple[float, ...]:
        """Share of the rows in each part, which is the validation set of a fold."""
        return tuple((self._sizes / self._sizes.sum()).tolist())

    def describe(self) -> pd.DataFrame:
        """Return the sizes and shares that were reached.

        Returns
        -------
        A data frame with a row for all rows, and one for each label of ``stratify``. The columns
        are the number of rows, ``n_rows``, and the share of them in each part, or in the
        validation set of each fold, numbered from 0.
        """
        table = every = pd.DataFrame(self._sizes[None], index=pd.Index(["all rows"], dtype=object))
        if self._table is not None:
            table = pd.concat([every, self._table])
            labels = [*every.index, *self._table.index]  # pandas 3 would turn None into NaN
            table.index = pd.Index(labels, dtype=object, tupleize_cols=False)
        n_rows = table.sum(axis=1)
        shares = table.div(n_rows, axis=0)
        shares.insert(0, "n_rows", n_rows)
        return shares

    def _summary(self) -> str:
        """Return the shares in words, for a repr."""
        text, requested = _listed(self.fractions), _listed(self._requested)
        if requested != text:
            text += f" (asked {requested})"
        if self._n_groups is not None:
            text += f", {self._n_groups:,} groups kept whole"
        if self._table is not None:
            furthest = _furthest_stratum(self._table, self._requested)[1]
            text += f", {self._table.index.name} within {furthest:.3f}"
        return text


class Split(_Parts, Sequence[Rows]):
    """The rows of each part of a collection, as `random_split` returns them.

    This is a sequence of arrays, int64, ascending: ``train, validation, test = split``.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._rows = tuple(
            self._rows_where(self._parts == part) for part in range(self._sizes.size)
        )

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, part: int, /) -> Rows: ...

    @overload
    def __getitem__(self, part: slice, /) -> tuple[Rows, ...]: ...

    def __getitem__(self, part: int | slice, /) -> Rows | tuple[Rows, ...]:
        return self._rows[part]

    def __repr__(self) -> str:
        sizes = " + ".join(f"{each:,}" for each in self._sizes)
        return f"Split({sizes} rows: {self._summary()})"


class Folds(_Parts, Sequence[tuple[Rows, Rows]]):
    """The folds of a cross-validation, as `k_folds` returns them.

    This is a sequence of pairs of training rows and validation rows, int64, ascending, each
    computed when accessed. It takes one byte for each row.
    """

    def __len__(self) -> int:
        return int(self._sizes.size)

    @overload
    def __getitem__(self, fold: int, /) -> tuple[Rows, Rows]: ...

    @overload
    def __getitem__(self, fold: slice, /) -> list[tuple[Rows, Rows]]: ...

    def __getitem__(self, fold: int | slice, /) -> tuple[Rows, Rows] | list[tuple[Rows, Rows]]:
        if isinstance(fold, slice):
            return [self[each] for each in range(len(self))[fold]]
        number = range(len(self))[fold]
        is_validation = self._parts == number
        return self._rows_where(~is_validation), self._rows_where(is_validation)

    def __repr__(self) -> str:
        n_rows = int(self._sizes.sum())
        return f"Folds({len(self)} of {n_rows:,} rows: {self._summary()})"


_Kind = TypeVar("_Kind", Split, Folds)


def _table_of(strata: Labels, parts: NDArray[np.unsignedinteger], n_parts: int) -> pd.DataFrame:
    """Return the number of rows of each stratum in each part."""
    counts = np.zeros(len(strata) * n_parts, np.int64)
    for some in _slices(parts.size):
        places = strata.codes[some].astype(np.int64) * n_parts + parts[some]
        counts += np.bincount(places, minlength=counts.size)
    labels = pd.Index(strata.labels, dtype=object, name=strata.name, tupleize_cols=False)
    return pd.DataFrame(counts.reshape(-1, n_parts), index=labels)


def _furthest_stratum(table: pd.DataFrame, requested: NDArray[np.float64]) -> tuple[Any, float]:
    """Return the stratum in which a share is furthest from its fraction, and the distance."""
    counts = table.to_numpy()
    off = np.abs(counts / counts.sum(axis=1, keepdims=True) - requested).max(axis=1)
    furthest = int(off.argmax())
    return table.index[furthest], float(off[furthest])


def _listed(fractions: Sequence[float] | NDArray[np.float64]) -> str:
    return ", ".join(f"{each:.3g}" for each in fractions)


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
        The rows to split; all rows if None. A row that is given twice counts twice, as in
        strategies, and both are in the same part. Fractions are then those of distinct rows.

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
    return _divided(Split, collection, weights, seed, method, stratify, group, indices)


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
    return _divided(Folds, collection, weights, seed, "deterministic", stratify, group, indices)


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


def _divided(
    kind: type[_Kind],
    collection: Any,
    weights: Sequence[int],
    seed: int | None,
    method: Method,
    stratify: LabelsLike | None,
    group: LabelsLike | None,
    indices: ArrayLike | None,
) -> _Kind:
    require_one_of("method", method, get_args(Method))
    if method == "multinomial" and stratify is not None:
        msg = "method='multinomial' draws rows independently, which balances nothing; leave out "
        raise ParameterError(msg + "`stratify`, or choose another method")
    seed = require_seed(seed)
    n_rows = count_divided(collection)
    rows, copies = (None, None) if indices is None else _distinct(indices, n_rows)
    n = n_rows if rows is None else rows.size
    selected: slice | NDArray[np.int64] = slice(None) if rows is None else rows
    strata = groups = None
    if stratify is not None:
        strata = labels_of(collection, stratify, "stratify", selected, n_rows)
        _require_few(strata)
    if group is not None:
        groups = labels_of(collection, group, "group", selected, n_rows)
    parts = _parts(n, weights, seed, method, strata, groups)
    n_parts, requested = len(weights), _fractions(weights)
    if rows is not None and copies is not None:
        rows, parts = np.repeat(rows, copies), np.repeat(parts, copies)
        if strata is not None:
            strata = replace(strata, codes=np.repeat(strata.codes, copies))
    sizes = np.bincount(parts, minlength=n_parts)
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        msg = (
            f"part {empty[0]} (fraction {requested[empty[0]]:.3g}) gets none of {n:,} "
            "rows; give fewer parts, or larger fractions"
        )
        raise ParameterError(msg)
    table = None if strata is None else _table_of(strata, parts, n_parts)
    if groups is not None and method != "multinomial":
        _warn_if_far_off(sizes / parts.size, requested, table, groups)
    n_groups = None if groups is None else len(groups)
    return kind(rows, parts, requested, sizes, table, n_groups)


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


def _distinct(
    indices: ArrayLike, n_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return distinct rows, ascending, and how often each is given; None if each is once."""
    rows = np.sort(require_row_numbers(indices)).astype(np.int64)
    if rows[0] < 0 or rows[-1] >= n_rows:
        msg = f"`0 <= indices < {n_rows}` must hold, but got indices from {rows[0]} to {rows[-1]}"
        raise ParameterError(msg)
    if (rows[1:] > rows[:-1]).all():
        return rows, None
    distinct, copies = np.unique(rows, return_counts=True)
    return distinct, copies.astype(np.int64)


def _require_few(strata: Labels) -> None:
    n_rows, n_labels = strata.codes.size, len(strata)
    if n_labels > 1 and n_rows < _LEAST_ROWS_PER_STRATUM * n_labels:
        msg = (
            f"{strata.name}: {n_labels:,} labels in {n_rows:,} rows, so almost all rows differ and "
            "there is nothing to balance; choose a label such as the cell type, or make bins "
            "(pandas.cut)"
        )
        raise ColumnError(msg)


def _warn_if_far_off(
    reached: NDArray[np.float64],
    requested: NDArray[np.float64],
    table: pd.DataFrame | None,
    groups: Labels,
) -> None:
    said = []
    if np.any(np.abs(reached - requested) > _MOST_OFF * requested + 1 / groups.codes.size):
        shares = [" + ".join(f"{each:.3g}" for each in found) for found in (reached, requested)]
        said.append(f"have {shares[0]} of the rows, not {shares[1]}")
    if table is not None:
        misplaced = float(_misplaced_share(table.to_numpy(), requested).mean())
        if misplaced > _MOST_MISPLACED:
            said.append(
                f"have {misplaced:.0%} of a label's rows, on average, that belong in another "
                f"part, most of {_furthest_stratum(table, requested)[0]!r}"
            )
    if said:
        warnings.warn(
            f"{len(groups):,} groups of {groups.name} were kept whole, so parts "
            f"{', and '.join(said)}; see `describe()`, and try another seed or other fractions",
            UserWarning,
            stacklevel=4,
        )
