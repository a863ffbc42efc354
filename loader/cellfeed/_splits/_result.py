"""The result of a split: rows of each part, and the shares that were reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import pd
from cellfeed._splits._labels import Labels

__all__ = ["Folds", "Parts", "Split"]

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
