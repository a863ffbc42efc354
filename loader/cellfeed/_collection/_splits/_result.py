"""The result of a split: rows of each part, and the shares that were reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._collection._collection import Collection
from cellfeed._errors import ColumnError, ParameterError
from cellfeed._lazy import pd
from cellfeed.sampling._labels import factorized

# Labels for splits: obs columns by name, or arrays.

LabelsLike = str | Sequence[str] | ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
        obs has no such column.
    ParameterError
        The number of labels is not the number of rows, or the collection has no obs.
    """
    if isinstance(given, str):
        names = [given]
    elif isinstance(given, list | tuple) and all(isinstance(each, str) for each in given):
        names = list(given)
        if not names:
            raise ParameterError(f"`{parameter}` is empty; name an obs column, or leave it out")
    else:
        return _compact(f"the labels of `{parameter}`", *_of_array(given, parameter, n_rows), rows)
    columns = _columns(collection, names, parameter, n_rows)
    found = _compact(names[0], *columns[0], rows)
    for name, column in zip(names[1:], columns[1:], strict=True):
        found = _combined(found, _compact(name, *column, rows))
    return found


def _columns(
    collection: Any, names: Sequence[str], parameter: str, n_rows: int
) -> list[tuple[NDArray[np.integer], Sequence[Any]]]:
    if isinstance(collection, Collection):
        read = collection.read_obs(names)
        return [factorized(read[name]) for name in names]
    obs = getattr(collection, "obs", None)
    if obs is None:
        msg = (
            f"`{parameter}` names the obs column {names[0]!r}, but a "
            f"{type(collection).__name__} has no obs; give an array with a label for each row"
        )
        raise ParameterError(msg)
    for name in names:
        if name not in obs:
            there = ", ".join(map(str, obs)) or "none"
            msg = f"`{parameter}`: obs has no column {name!r}; its columns are: {there}"
            raise ColumnError(msg)
    return [_of_array(obs[name], parameter, n_rows) for name in names]


def _of_array(
    given: ArrayLike, parameter: str, n_rows: int
) -> tuple[NDArray[np.integer], Sequence[Any]]:
    values: Any = given
    if not isinstance(given, pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        values = np.asarray(given)
    if values.shape != (n_rows,):
        msg = (
            f"`{parameter}` must have a label for each of {n_rows:,} rows, but has shape "
            f"{values.shape}"
        )
        raise ParameterError(msg)
    return factorized(values)


def _compact(
    name: str,
    codes: NDArray[np.integer],
    values: Sequence[Any],
    rows: slice | NDArray[np.int64],
) -> Labels:
    """Keep only labels that occur in the given rows, with missing labels last."""
    codes = codes[rows]
    known = codes[codes >= 0] if codes.size and codes.min() < 0 else codes
    counts = np.bincount(known, minlength=len(values))
    occur = np.flatnonzero(counts)
    numbers = np.full(len(values) + 1, len(occur), np.min_scalar_type(-max(1, len(occur))))
    numbers[occur] = np.arange(len(occur))
    n_missing = codes.size - known.size
    return Labels(
        name=name,
        codes=numbers[codes],  # -1 takes the last
        labels=(*(values[place] for place in occur.tolist()), *([None] if n_missing else [])),
        counts=np.append(counts[occur], [n_missing] if n_missing else []).astype(np.int64),
    )


def _combined(first: Labels, second: Labels) -> Labels:
    codes, found = factorized(first.codes.astype(np.int64) * len(second) + second.codes)
    ahead = first.labels if isinstance(first, _Combined) else [(each,) for each in first.labels]
    labels = tuple(
        (*ahead[i], second.labels[j]) for i, j in (divmod(each, len(second)) for each in found)
    )
    return _Combined(
        name=f"{first.name}, {second.name}",
        codes=codes,
        labels=labels,
        counts=np.bincount(codes, minlength=len(labels)).astype(np.int64),
    )


class _Combined(Labels):
    """Labels that are tuples, one value for each of several columns."""

    __slots__ = ()


Rows = NDArray[np.int64]

_AT_ONCE = 1 << 20


class Parts:
    """Rows divided into parts.

    Parameters
    ----------
    rows
        The rows that were split, ascending, shape (n_rows,); all rows if None.
    parts
        Part of each row, shape (n_rows,).
    fractions
        The requested fractions.
    strata
        The labels of ``stratify``, if given.
    n_groups
        Number of groups that were kept whole, if any.
    """

    def __init__(
        self,
        *,
        rows: Rows | None,
        parts: NDArray[np.unsignedinteger],
        fractions: NDArray[np.float64],
        strata: Labels | None,
        n_groups: int | None,
    ) -> None:
        self._rows, self._parts = rows, parts
        self._asked = fractions
        n_parts = fractions.size
        self.sizes = np.bincount(parts, minlength=n_parts)
        self._n_groups = n_groups
        self._table: pd.DataFrame | None = None
        if strata is not None:
            counts = np.zeros(len(strata) * n_parts, np.int64)
            for start in range(0, parts.size, _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                places = strata.codes[some].astype(np.int64) * n_parts + parts[some]
                counts += np.bincount(places, minlength=counts.size)
            labels = pd.Index(strata.labels, dtype=object, name=strata.name, tupleize_cols=False)
            self._table = pd.DataFrame(counts.reshape(-1, n_parts), index=labels)

    def rows_where(self, is_in: NDArray[np.bool_]) -> Rows:
        """Return the rows that a mask of the split rows selects, ascending."""
        places = np.flatnonzero(is_in)
        return places if self._rows is None else self._rows[places]

    def rows_of(self, part: int) -> Rows:
        """Return the rows of a part, ascending."""
        return self.rows_where(self._parts == part)

    def rows_without(self, part: int) -> Rows:
        """Return the rows of all other parts, ascending."""
        return self.rows_where(self._parts != part)

    @property
    def fractions(self) -> tuple[float, ...]:
        """Share of the rows in each part."""
        return tuple((self.sizes / self.sizes.sum()).tolist())

    @property
    def strata(self) -> pd.DataFrame | None:
        """Number of rows of each stratum in each part; None without ``stratify``."""
        return self._table

    def describe(self) -> pd.DataFrame:
        """Return the number of rows and the shares of the parts, in total and for each stratum."""
        every = pd.DataFrame(self.sizes[None], index=pd.Index(["all rows"], dtype=object))
        table = every
        if self._table is not None:
            table = pd.concat([every, self._table])
            labels = [*every.index, *self._table.index]  # pandas 3 would turn None into NaN
            table.index = pd.Index(labels, dtype=object, tupleize_cols=False)
        n_rows = table.sum(axis=1)
        shares = table.div(n_rows, axis=0)
        shares.insert(0, "n_rows", n_rows)
        return shares

    def summary(self) -> str:
        """Return the shares in words, for a repr."""
        text = _listed(self.fractions)
        if _listed(self._asked) != text:
            text += f" (asked {_listed(self._asked)})"
        if self._n_groups is not None:
            text += f", {self._n_groups:,} groups kept whole"
        if self._table is not None:
            text += f", {self._table.index.name} within {self.worst_stratum()[1]:.3f}"
        return text

    def worst_stratum(self) -> tuple[Any, float]:
        """Return the stratum in which a share is furthest from its fraction, and the distance."""
        assert self._table is not None  # noqa: S101 - for type checkers
        counts = self._table.to_numpy()
        off = np.abs(counts / counts.sum(axis=1, keepdims=True) - self._asked).max(axis=1)
        worst = int(off.argmax())
        return self._table.index[worst], float(off[worst])


class Split(Sequence[Rows]):
    """The rows of each part of a collection, as `random_split` returns them.

    This is a sequence of arrays, int64, ascending: ``train, validation, test = split``.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._rows = tuple(map(parts.rows_of, range(parts.sizes.size)))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, part: int, /) -> Rows: ...

    @overload
    def __getitem__(self, part: slice, /) -> tuple[Rows, ...]: ...

    def __getitem__(self, part: int | slice, /) -> Rows | tuple[Rows, ...]:
        return self._rows[part]

    def __repr__(self) -> str:
        sizes = " + ".join(f"{each:,}" for each in self._parts.sizes)
        return f"Split({sizes} rows: {self._parts.summary()})"

    @property
    def fractions(self) -> tuple[float, ...]:
        """Share of the rows in each part."""
        return self._parts.fractions

    def describe(self) -> pd.DataFrame:
        """Return the sizes and shares that were reached.

        Returns
        -------
        A data frame with a row for all rows, and one for each label of ``stratify``. The columns
        are the number of rows, ``n_rows``, and the share of them in each part, numbered from 0.
        """
        return self._parts.describe()


class Folds(Sequence[tuple[Rows, Rows]]):
    """The folds of a cross-validation, as `k_folds` returns them.

    This is a sequence of pairs of training rows and validation rows, int64, ascending, each
    computed when accessed. It takes one byte for each row.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return int(self._parts.sizes.size)

    @overload
    def __getitem__(self, fold: int, /) -> tuple[Rows, Rows]: ...

    @overload
    def __getitem__(self, fold: slice, /) -> list[tuple[Rows, Rows]]: ...

    def __getitem__(self, fold: int | slice, /) -> tuple[Rows, Rows] | list[tuple[Rows, Rows]]:
        if isinstance(fold, slice):
            return [self[each] for each in range(len(self))[fold]]
        number = range(len(self))[fold]
        return self._parts.rows_without(number), self._parts.rows_of(number)

    def __repr__(self) -> str:
        n_rows = int(self._parts.sizes.sum())
        return f"Folds({len(self)} of {n_rows:,} rows: {self._parts.summary()})"

    @property
    def fractions(self) -> tuple[float, ...]:
        """Share of the rows in the validation set of each fold."""
        return self._parts.fractions

    def describe(self) -> pd.DataFrame:
        """Return the sizes and shares of the validation sets; see `Split.describe`."""
        return self._parts.describe()


def _listed(fractions: Sequence[float] | NDArray[np.float64]) -> str:
    return ", ".join(f"{each:.3g}" for each in fractions)
