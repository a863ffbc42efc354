"""Arrow tables as data frames of obs, for storages that pyarrow reads."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cellfeed._lazy import pd
from cellfeed.bytes import Location
from cellfeed.sources._registry import library

__all__ = ["MISSING", "import_arrow", "kind", "to_frame", "values_of"]


def import_arrow(location: Location, extra: str) -> Any:
    """Return pyarrow, which only some storages need.

    Parameters
    ----------
    location
        The location being opened, for the message.
    extra
        The extra of cellfeed that installs pyarrow.

    Raises
    ------
    FormatError
        pyarrow is not installed.
    """
    library("pyarrow.parquet", location, what="an Arrow table", extra=extra)
    return import_module("pyarrow")


MISSING = "missing values"  # of a column without a type


def values_of(found: Any) -> Any:
    """Return the type of the values, of a dictionary or not."""
    return found.value_type if hasattr(found, "index_type") else found


def kind(found: Any) -> str:
    """Return what a type is in obs; empty if it cannot be there."""
    from pyarrow import types  # noqa: PLC0415 - optional

    values = values_of(found)
    kinds = (
        ("booleans", (types.is_boolean,)),
        ("numbers", (types.is_integer, types.is_floating)),
        ("text", (types.is_string, types.is_large_string, types.is_string_view)),
        (MISSING, (types.is_null,)),
    )
    what = next((name for name, tests in kinds if any(test(values) for test in tests)), "")
    is_dictionary = values is not found and what in ("booleans", "numbers")
    return f"categories that are {what}" if is_dictionary else what


# Dtypes of pandas whose missing values are NA.
_NULLABLE = {f"{kind}{bits}" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)}
_NULLABLE |= {"Float32", "Float64", "boolean"}
# Of Arrow's integers that float64 may not represent, the dtypes of pandas with missing values.
_INTEGERS, _MOST_EXACT = {"int64": "Int64", "uint64": "UInt64"}, 1 << 53


def to_frame(table: Any) -> pd.DataFrame:
    """Return an Arrow table as a data frame, with text as categories.

    Columns that pandas wrote with missing values of its own (NA) have them again, as have integers
    that would be rounded beside NaN.

    Parameters
    ----------
    table
        A ``pyarrow.Table`` with columns of numbers, booleans, text or dictionaries.
    """
    from pyarrow import compute  # noqa: PLC0415 - optional

    frame: pd.DataFrame = table.to_pandas(strings_to_categorical=True, ignore_metadata=True)
    written = (table.schema.pandas_metadata or {}).get("columns", ())
    dtypes = {each["field_name"]: each["numpy_type"] for each in written}
    for name in frame:
        column = table.column(name)
        if dtypes.get(name) in _NULLABLE:
            dtype: Any = pd.api.types.pandas_dtype(dtypes[name])
            frame[name] = dtype.__from_arrow__(column)
        elif column.null_count and (found := _INTEGERS.get(str(column.type))):
            bounds = compute.min_max(column).as_py().values()
            if any(value is not None and abs(value) > _MOST_EXACT for value in bounds):
                nullable: Any = pd.api.types.pandas_dtype(found)
                frame[name] = nullable.__from_arrow__(column)
        elif str(column.type) == "bool" and column.null_count == len(column):
            frame[name] = pd.Categorical(frame[name], [False, True])
        elif str(column.type) == "null":  # no row has a value
            frame[name] = pd.Categorical(frame[name])
    return frame
