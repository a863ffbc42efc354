"""Tables of cells and of genes in an experiment: their rows, columns and names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import pd

__all__ = ["JOINID", "columns_of", "name_column", "read_joinids", "read_table"]

JOINID = "soma_joinid"
_NAMED = "soma_dataframe_original_index_name"  # metadata of tables by `tiledbsoma.io`
_NAMES = {
    "obs": ("obs_id", "_index"),
    "var": ("var_id", "_index", "feature_id", "gene_id"),  # the last two if the metadata names none
}

Axis = Literal["obs", "var"]


def name_column(table: Any, axis: Axis) -> str | None:
    """Return the column of a table that names its cells or genes; None if there is none.

    `tiledbsoma.io` gives it the name of the index and records that name, or else uses ``obs_id`` or
    ``var_id``.
    """
    noted = table.metadata.get(_NAMED, "null")
    try:
        name = json.loads(noted)
    except ValueError:  # written by other software
        name = noted
    there = list(table.keys())
    return next((each for each in (name, *_NAMES[axis]) if each in there), None)


def columns_of(table: Any, axis: Axis) -> list[str]:
    """Return the columns of a table, without the numbers and names of its rows."""
    left_out = (JOINID, name_column(table, axis))
    return [name for name in table.keys() if name not in left_out]  # noqa: SIM118 - no mapping


def read_joinids(table: Any, query: str | None) -> NDArray[np.int64] | range:
    """Return the numbers of the rows that fulfil a query, ascending, int64.

    They are read instead of counted, since `tiledbsoma.DataFrame.count`, which releases the GIL,
    has crashed processes with a segmentation fault.

    Returns
    -------
    A range if there is no query and rows are numbered from 0 without gaps.
    """
    tables = table.read(column_names=[JOINID], value_filter=query)
    parts = [each[JOINID].to_numpy().astype(np.int64, copy=False) for each in tables]
    ids = np.concatenate([np.empty(0, np.int64), *parts])
    ids.sort()
    is_gapless = query is None and np.array_equal(ids, np.arange(ids.size))
    return range(ids.size) if is_gapless else ids


def read_table(
    table: Any, columns: Sequence[str], joinids: NDArray[np.int64] | None
) -> pd.DataFrame:
    """Read columns of the rows with the given numbers.

    Parameters
    ----------
    table
        A `tiledbsoma.DataFrame`.
    columns
        Names of the columns.
    joinids
        Numbers of the rows, ascending, at least one; None for all.

    Returns
    -------
    A row for each of ``joinids``, in their order, indexed by them.

    Raises
    ------
    ValueError
        A row is missing.
    """
    import pyarrow as pa  # noqa: PLC0415 - tiledbsoma needs it

    by_number = table.index_column_names == (JOINID,) and joinids is not None
    coords = (pa.array(joinids),) if by_number else ()
    wanted = list(dict.fromkeys([JOINID, *columns]))
    found = table.read(coords=coords, column_names=wanted).concat().to_pandas()
    read: pd.DataFrame = found.set_index(JOINID, drop=False)[[*columns]].sort_index()
    if joinids is None:
        return read
    if not by_number:
        read = read[read.index.isin(joinids)]
    if not np.array_equal(read.index.to_numpy(), joinids):
        msg = (
            f"{len(read)} rows were read, but {len(joinids)} expected, so it may have changed since"
        )
        raise ValueError(msg)
    return read
