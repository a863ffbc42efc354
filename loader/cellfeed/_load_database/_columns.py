"""Converting obs columns of pandas to columns of a database table."""

from typing import Any

import numpy as np
import pandas as pd

from cellfeed._sources._postgres._layout import ObsColumn

__all__ = ["described", "python_values", "sql_type"]

_INTEGERS = {"int8": "smallint", "uint8": "smallint", "int16": "smallint", "uint16": "integer",
             "int32": "integer", "uint32": "bigint", "int64": "bigint",
             "uint64": "numeric(20, 0)"}  # fmt: skip
_FLOATS = {"float16": "real", "float32": "real", "float64": "double precision"}
_TYPES = {**_INTEGERS, **_FLOATS, "bool": "boolean", "boolean": "boolean", "text": "text"}


def described(name: str, column: str, values: "pd.Series[Any]") -> ObsColumn:
    """Return the description of an obs column in the table of cells.

    Parameters
    ----------
    name, column
        Its names in obs and in the table.
    values
        Some of its values, in the dtype of all.
    """
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        categories = _categories(dtype.categories)
        return ObsColumn(
            name=name,
            column=column,
            dtype="category",
            categories=categories,
            is_ordered=bool(dtype.ordered),
        )
    known = str(dtype) if str(dtype).lower() in _TYPES else "text"
    return ObsColumn(name=name, column=column, dtype=known)


def sql_type(column: ObsColumn) -> str:
    """Return the PostgreSQL type of a column."""
    if column.dtype != "category":
        return _TYPES[column.dtype.lower()]
    kinds = {type(each).__name__ for each in column.categories or ()}
    of_one_kind = {"bool": "boolean", "int": "bigint", "float": "double precision"}
    return of_one_kind.get(kinds.pop(), "text") if len(kinds) == 1 else "text"


def python_values(column: ObsColumn, values: "pd.Series[Any]") -> list[Any]:
    """Return values for psycopg, with None for missing values."""
    if column.dtype == "category":
        categories = np.array([*(column.categories or ()), None], object)
        found: list[Any] = categories[values.cat.codes.to_numpy()].tolist()
        return found
    is_missing = values.isna().to_numpy()
    if column.dtype == "text":
        texts = values.astype(object).to_numpy()
        return [None if no else str(each) for each, no in zip(texts, is_missing, strict=True)]
    python = np.array(values.tolist(), object)
    python[is_missing] = None
    return [*python]


def _categories(index: "pd.Index[Any]") -> list[Any]:
    """Return categories as JSON values: numbers, or text."""
    values = index.tolist()
    if len({type(each) for each in values}) == 1 and isinstance(values[0], bool | int | float):
        return values
    return [str(each) for each in values]
