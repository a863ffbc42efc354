"""Rows whose obs fulfil a condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CategoricalColumn, ObsColumn
from cellfeed._collection._query import Query
from cellfeed._lazy import pd

__all__ = ["rows_where"]

_ROWS_AT_ONCE = 1 << 18


def rows_where(query: Query, columns: Mapping[str, ObsColumn], n_rows: int) -> NDArray[np.int64]:
    """Return the rows where a condition holds, ascending.

    Parameters
    ----------
    query
        The condition.
    columns
        All rows of the columns in the condition.
    n_rows
        The number of rows.

    Raises
    ------
    ParameterError
        pandas cannot compare columns of these dtypes.
    """
    take = {name: _series_of(columns[name]) for name in query.columns}
    found = [np.empty(0, np.int64)]
    for start in range(0, n_rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        holds = query.evaluate({name: series(part) for name, series in take.items()})
        found.append(np.flatnonzero(holds) + start)
    return np.concatenate(found)


def _series_of(column: ObsColumn) -> Callable[[slice], pd.Series[Any]]:
    """Return a function that makes a pandas series of some rows of a column.

    Categories stay codes, except for booleans.
    """
    if not isinstance(column, CategoricalColumn):
        numbers = column.values
        is_narrow = numbers.dtype.kind in "iu" and numbers.dtype != np.uint64
        wide = np.dtype(np.int64) if is_narrow else numbers.dtype  # so that results do not wrap
        return lambda part: pd.Series(numbers[part].astype(wide, copy=False))
    codes = column.codes
    if {type(each) for each in column.categories} <= {bool, np.bool_} and column.categories.size:
        values = np.append(column.categories.astype(bool), [False])  # the last is of code -1
        if codes.min() >= 0:
            return lambda part: pd.Series(values[codes[part]])
        return lambda part: pd.Series(pd.arrays.BooleanArray(values[codes[part]], codes[part] < 0))
    dtype = pd.CategoricalDtype(pd.Index(column.categories))
    return lambda part: pd.Series(pd.Categorical.from_codes(codes[part], dtype=dtype))
