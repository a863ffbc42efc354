"""obs and var of AnnData files of any version.

Current files are read column by column. anndata reads older ones (obs as one compound dataset, or
categories stored apart from the codes), since it supports all earlier formats.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata.io import read_elem
from numpy.typing import NDArray

from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._gene_names import read_names

__all__ = ["count_rows", "obs_names", "read_obs", "read_var", "read_var_names"]


def obs_names(file: AnnDataFile, table: str = "obs") -> tuple[str, ...]:
    """Return the names of the columns of a table such as ``obs``."""
    obs = file()[table]
    if "column-order" in obs.attrs:
        return tuple(str(name) for name in obs.attrs["column-order"])
    return tuple(str(name) for name in file.read_old_frame(table).columns)


def count_rows(table: Any) -> int:
    """Return the number of rows of a table such as obs, without reading them.

    Parameters
    ----------
    table
        The group or compound dataset of the table.
    """
    if not _is_group(table):  # anndata before 0.7
        return int(table.shape[0])
    index = table[table.attrs["_index"]]
    if _is_group(index):
        index = index["codes" if "codes" in index else "values"]
    return int(index.shape[0])


def read_obs(file: AnnDataFile, columns: Sequence[str], table: str = "obs") -> pd.DataFrame:
    """Return the given columns, which must exist, of a table such as ``obs``, in that order."""
    obs = file()[table]
    if _is_current(obs):
        file.bring([f"{table}/{column}" for column in columns])
        return pd.DataFrame({column: read_elem(obs[column]) for column in columns})
    return file.read_old_frame(table)[list(columns)]


def read_var(file: AnnDataFile) -> pd.DataFrame:
    """Return the table of genes."""
    table = file()["var"]
    frame: pd.DataFrame = read_elem(table) if _is_current(table) else file.read_old_frame("var")
    return frame


def read_var_names(file: AnnDataFile, var: str) -> NDArray[np.object_]:
    """Return the gene names from the table ``var``."""
    table = file()[var]
    if _is_current(table):
        return read_names(file, f"{var}/{table.attrs['_index']}")
    return np.asarray(file.read_old_frame(var).index, dtype=object)


def _is_current(frame: Any) -> bool:
    return bool(frame.attrs.get("encoding-version") == "0.2.0")


def _is_group(element: Any) -> bool:
    return not hasattr(element, "dtype")
