"""Converting obs columns of the table of cells to pandas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import pd
from cellfeed._sources._postgres._database import Database
from cellfeed._sources._postgres._layout import ObsColumn, escaped, quoted

__all__ = ["read_columns", "read_ids"]

_ROWS = 50_000  # rows that are Python objects at a time


def read_ids(database: Database, schema: str, where: str) -> NDArray[np.int64]:
    """Return the ids of the cells that fulfil a condition, ascending."""
    pages = _pages(database, "", schema, where)
    parts = [np.fromiter((id_ for (id_,) in rows), np.int64) for rows in pages]
    return np.concatenate([np.empty(0, np.int64), *parts])


def read_columns(
    database: Database,
    schema: str,
    columns: Sequence[ObsColumn],
    ids: NDArray[np.int64] | range,
    *,
    named: bool = False,
) -> pd.DataFrame:
    """Read columns of cells.

    Parameters
    ----------
    database, schema, columns
        The database, the schema of the collection, and the columns.
    ids
        Ids of the cells, ascending; a range means all cells.
    named
        Whether the index contains the names of the cells, as Python strings.

    Returns
    -------
    A row for each of ``ids`` that exists. Text becomes categorical.
    """
    names = [*(each.column for each in columns), *(["name"] if named else [])]
    selected = "".join(f", {quoted(name)}" for name in names)
    made = [_Column(each) for each in columns]
    found = list[Any]()
    which = None if isinstance(ids, range) else ids
    for rows in _pages(database, selected, schema, which):
        by_column = list(zip(*rows, strict=True))
        for column, values in zip(made, by_column[1:], strict=False):
            column.append(values)
        if named:
            found += by_column[-1]
    table = pd.DataFrame({each.column.name: each.series() for each in made})
    if not named:
        return table
    index = pd.Index(found, dtype=object)
    return table.set_axis(index) if made else pd.DataFrame(index=index)


class _Column:
    """One column, read in batches."""

    def __init__(self, column: ObsColumn) -> None:
        self.column = column
        self._codes: Mapping[Any, int] = {}
        self._texts = dict[Any, int]()
        if column.categories is not None:
            self._codes = {each: k for k, each in enumerate(column.categories)}
        self._parts = list[Any]()

    def append(self, values: Sequence[Any]) -> None:
        """Append the values of a batch."""
        dtype = self.column.dtype
        if dtype == "category":
            self._parts.append(
                np.fromiter((self._codes.get(each, -1) for each in values), np.int32)
            )
        elif dtype == "text":
            texts = self._texts
            codes = (-1 if each is None else texts.setdefault(each, len(texts)) for each in values)
            self._parts.append(np.fromiter(codes, np.int32))
        elif dtype[0].isupper() or dtype == "boolean":  # pandas' nullable dtypes
            self._parts.append(pd.Series(values, dtype=dtype))
        else:
            found = np.dtype(dtype)
            if None in values and found.kind in "iub":
                found = np.dtype(np.float64)
            self._parts.append(np.array([np.nan if v is None else v for v in values], found))

    def series(self) -> pd.Series[Any]:
        """Return the whole column."""
        dtype = self.column.dtype
        if dtype in ("category", "text"):
            given = self._texts if self.column.categories is None else self.column.categories
            codes = np.concatenate([np.empty(0, np.int32), *self._parts])
            return pd.Series(
                pd.Categorical.from_codes(
                    codes, pd.Index(list(given)), ordered=self.column.is_ordered
                )
            )
        if not self._parts:
            return pd.Series([], dtype=dtype)
        return pd.concat([pd.Series(part) for part in self._parts], ignore_index=True)


def _pages(
    database: Database,
    selected: str,
    schema: str,
    which: NDArray[np.int64] | str | None,
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield ids and columns of cells, by ascending id, many rows at a time.

    Parameters
    ----------
    selected
        Columns, as SQL.
    which
        Ids, ascending; a condition, as SQL; None for all cells.
    """
    head = escaped(f"SELECT id{selected} FROM {quoted(schema, 'cells')} WHERE ")  # noqa: S608 - names are quoted
    with database.session() as session:
        if isinstance(which, np.ndarray):
            for k in range(0, which.size, _ROWS):
                some = which[k : k + _ROWS].tolist()
                yield session.ask(f"{head} id = ANY(%s) ORDER BY id", (some,))
            return
        condition = "" if which is None else f"({escaped(which)}\n) AND "
        query = f"{head}{condition} id > %s ORDER BY id LIMIT {_ROWS}"
        last = -1
        while rows := session.ask(query, (last,)):
            yield rows
            last = rows[-1][0]
