"""Arrow tables as data frames of obs; requires pyarrow."""

from __future__ import annotations

from typing import Any

import numpy as np

from cellfeed._bytes import Location
from cellfeed._lazy import pd
from cellfeed._sources._base._libraries import library

__all__ = ["import_arrow", "to_frame"]


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
    import pyarrow as pa  # noqa: PLC0415 - an extra

    return pa


def to_frame(table: Any) -> pd.DataFrame:
    """Return an Arrow table as a data frame, with text as categories.

    Parameters
    ----------
    table
        A ``pyarrow.Table`` with columns of numbers, booleans, text or dictionaries.
    """
    import pyarrow as pa  # noqa: PLC0415

    is_text = pa.types.is_string, pa.types.is_large_string
    columns = dict[str, Any]()
    for name, column in zip(table.column_names, table.columns, strict=True):
        if any(test(column.type) for test in is_text):
            columns[name] = _categories(column.dictionary_encode())
        else:
            columns[name] = column.to_pandas()
    return pd.DataFrame(columns, index=pd.RangeIndex(len(table)))


def _categories(column: Any) -> pd.Categorical:
    """Return a dictionary column as a categorical, with each value once."""
    joined = column.unify_dictionaries().combine_chunks()
    parts = joined.chunks if hasattr(joined, "chunks") else [joined]
    if not parts:
        return pd.Categorical([])
    codes = [part.indices.fill_null(-1).to_numpy(zero_copy_only=False) for part in parts]
    values = parts[0].dictionary.to_numpy(zero_copy_only=False)
    return pd.Categorical.from_codes(np.concatenate(codes), categories=pd.Index(values))
