"""Random splits of the rows of any collection, and the labels by which rows are divided."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.collection import Collection, count_rows
from cellfeed.extending import ParameterError, require_one_of, require_positive, require_seed, sp
from cellfeed.sampling import column_of, factorized, require_row_numbers

__all__ = ["Labels", "LabelsLike", "Rows", "count_divided", "labels_of", "random_split"]

# Labels: obs columns by name, or arrays.

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
    if np.shape(given) != (n_rows,):
        msg = f"`{parameter}` must have a label for each of {n_rows:,} rows, but has shape "
        raise ParameterError(msg + str(np.shape(given)))
    return factorized(given)


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


Rows = NDArray[np.int64]
Method = Literal["deterministic", "multinomial", "stochastic_rounding"]

_N_DRAWS = 64  # random orders of groups, the best of which is used
_MOST_OFF = 0.1  # from a fraction, relative to it, without a warning
_TOLERANCE = 1e-6  # of the sum of fractions


def random_split(
    collection: Any,
    fractions: Sequence[float],
    *,
    seed: int,
    method: Method = "stochastic_rounding",
    stratify: LabelsLike | None = None,
    group: LabelsLike | None = None,
    indices: ArrayLike | None = None,
) -> tuple[Rows, ...]:
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
        How many rows a part gets, as in TileDB-SOMA-ML. "deterministic": its share, rounded, with
        any seed. "stochastic_rounding": its share, rounded up or down at random, so that the
        expected number is the share. "multinomial": the part of each row (or group) is drawn
        independently, so sizes vary.
    stratify
        The name of an obs column, a list of names, or an array with a label for each row. Each part
        gets its share of the rows of each label, rounded up or down; of more than two parts, some
        may get a row more or less. Rows without a label count as one more label. Columns that a
        `Collection` was not opened with are read.
    group
        Labels such as the donor, given like ``stratify``: all rows of a label get into the same
        part, and rows without a label stay together. Unless groups are drawn independently
        ("multinomial"), the best of 64 random orders of the groups is used: the one nearest to the
        fractions and, with ``stratify``, to the fractions within each label, on average.
    indices
        The rows to split, each once; all rows if None.

    Returns
    -------
    The rows of each part, int64, ascending: ``train, test = random_split(...)``.

    Raises
    ------
    ParameterError
        A fraction is not above 0, the fractions do not sum to 1, a part would be empty, the number
        of labels is not the number of rows, a row is given twice, there are fewer groups than
        parts, or "multinomial" is combined with ``stratify``.
    ColumnError
        obs has no such column.

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
    >>> train, test = random_split(100, [0.8, 0.2], seed=0, group=donor)
    >>> np.unique(donor[test]).size
    1
    """
    shares = _shares_of(fractions)
    require_one_of("method", method, get_args(Method))
    if method == "multinomial" and stratify is not None:
        msg = "method='multinomial' draws rows independently, which balances nothing; leave out "
        raise ParameterError(msg + "`stratify`, or choose another method")
    # The stream of a RandomState is the same in all versions of NumPy (NEP 19).
    random = np.random.RandomState(np.random.MT19937(require_seed(seed)))
    n_rows = count_divided(collection)
    rows: slice | Rows = slice(None) if indices is None else _distinct(indices, n_rows)
    n = n_rows if isinstance(rows, slice) else rows.size
    strata = groups = None
    if stratify is not None:
        strata = labels_of(collection, stratify, "stratify", rows, n_rows)
    if group is not None:
        groups = labels_of(collection, group, "group", rows, n_rows)
    places = _places(n, shares, method, strata, groups, random)
    reached = np.array([each.size / n for each in places])
    if not reached.all():
        part = int(reached.argmin())
        msg = f"part {part} (fraction {shares[part]:.3g}) gets none of {n:,} rows; "
        raise ParameterError(msg + "give fewer parts, or larger fractions")
    is_off = np.abs(reached - shares) > _MOST_OFF * shares + 1 / n
    if groups is not None and method != "multinomial" and is_off.any():
        found, asked = (", ".join(f"{each:.3g}" for each in some) for some in (reached, shares))
        msg = f"whole groups of {groups.name} do not divide as requested: {found} instead of"
        warnings.warn(f"{msg} {asked}; try another seed or other fractions", stacklevel=2)
    return tuple(places if isinstance(rows, slice) else (rows[each] for each in places))


def _shares_of(fractions: Sequence[float]) -> NDArray[np.float64]:
    try:
        shares = np.array([float(each) for each in fractions])
    except (TypeError, ValueError) as error:
        msg = f"`fractions` must be numbers such as [0.8, 0.2], but got {fractions!r}"
        raise ParameterError(msg) from error
    if not shares.size or not (shares > 0).all():
        msg = f"`fractions` must be numbers above 0, at least one, but got {shares.tolist()}"
        raise ParameterError(msg)
    if abs(shares.sum() - 1) > _TOLERANCE:
        msg = f"`fractions` must sum to 1, but {shares.tolist()} sum to {shares.sum():g}"
        raise ParameterError(msg)
    return shares


def _places(
    n: int,
    shares: NDArray[np.float64],
    method: Method,
    strata: Labels | None,
    groups: Labels | None,
    random: np.random.RandomState,
) -> list[Rows]:
    """Return which of ``n`` rows each part has, ascending.

    Without groups, rows are in random order, and those of a stratum together. The first part takes
    its share at equal distances (systematic sampling, Madow 1949), so that it gets its share of any
    rows that lie together, rounded up or down; the next part takes its share of the others in the
    same way, and so on. If the distances begin at random, expected numbers are the shares.
    """
    if method == "multinomial":
        drawn = random.random_sample(n if groups is None else len(groups))
        part_of = np.searchsorted(np.cumsum(shares)[:-1], drawn, "right")
    elif groups is not None:
        part_of = _best_parts(groups, strata, shares, random)
    else:
        left, starts = random.permutation(n), np.full(shares.size, 0.5)
        if method == "stochastic_rounding":
            starts = random.random_sample(shares.size)
        if strata is not None:
            left = left[np.argsort(strata.codes[left], kind="stable")]
        parts = list[Rows]()
        for k, start in enumerate(starts[:-1]):
            steps = np.arange(left.size + 1) * (shares[k] / shares[k:].sum())
            steps += start
            is_taken = np.diff(np.floor(steps, out=steps)) > 0
            parts.append(np.sort(left[is_taken]))
            left = left[~is_taken]
        return [*parts, np.sort(left)]
    part_of = part_of if groups is None else part_of[groups.codes]
    return [np.flatnonzero(part_of == part) for part in range(shares.size)]


def _best_parts(
    groups: Labels,
    strata: Labels | None,
    shares: NDArray[np.float64],
    random: np.random.RandomState,
) -> NDArray[np.intp]:
    """Draw a part for each group, several times, and return the best, shape (n_groups,).

    Each draw puts the groups into random order and cuts it where the parts' shares of the rows
    are nearest to their fractions. The best draw has the fewest misplaced rows, as a share of all
    rows and, on average, of each stratum.

    Raises
    ------
    ParameterError
        There are fewer groups than parts.
    """
    n_groups, n_parts = len(groups), shares.size
    if n_groups < n_parts:
        msg = (
            f"{n_parts} parts need at least as many groups, but there are {n_groups} of "
            f"{groups.name}; give fewer parts"
        )
        raise ParameterError(msg)
    tables: list[Any] = [groups.counts[None]]  # rows of each group; and of each stratum in it
    if strata is not None:
        ones = np.ones(groups.codes.size, np.int64)
        tables.append(sp.csr_array((ones, (strata.codes, groups.codes))))
    bounds, steps = np.cumsum(shares)[:-1] * groups.codes.size, np.arange(1, n_parts)
    best, least = np.empty(0, np.intp), np.inf
    for _ in range(_N_DRAWS):
        order = random.permutation(n_groups)
        sizes = groups.counts[order]
        cuts = np.searchsorted(np.cumsum(sizes) - sizes / 2, bounds)
        cuts = np.maximum.accumulate(np.maximum(cuts - steps, 0)) + steps  # no part is empty
        parts = np.empty(n_groups, np.intp)
        parts[order] = np.searchsorted(
            np.minimum(cuts, n_groups - n_parts + steps), np.arange(n_groups), "right"
        )
        misplaced = 0.0
        for table in tables:
            in_parts = table @ (parts[:, None] == np.arange(n_parts)).astype(np.int64)
            off = np.abs(in_parts / in_parts.sum(axis=1, keepdims=True) - shares)
            misplaced += off.sum(axis=1).mean()
        if misplaced < least:
            best, least = parts, misplaced
    return best


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
