"""obs and var of AnnData files of any version.

Current files are read column by column. anndata reads older ones (obs as one compound dataset, or
categories stored apart from the codes), since it supports all earlier formats.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._sources._anndata._attributes import index_of, is_current, is_group, texts
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._gene_names import as_names, read_names

__all__ = ["count_rows", "obs_names", "read_obs", "read_row_names", "read_var"]


def obs_names(file: AnnDataFile, table: str = "obs") -> tuple[str, ...]:
    """Return the names of the columns of a table such as ``obs``."""
    obs = file.stored(table)
    if "column-order" in obs.attrs:
        return texts(obs, "column-order")
    return tuple(str(name) for name in file.read_old_frame(table).columns)


def count_rows(file: AnnDataFile, name: str) -> int:
    """Return the number of rows of a table such as ``obs``, without reading them."""
    table = file.stored(name)
    if not is_group(table):  # anndata before 0.7
        return int(table.shape[0])
    index = file.stored(f"{name}/{index_of(table)}")
    if is_group(index):
        index = index["codes" if "codes" in index else "values"]
    return int(index.shape[0])


def read_obs(file: AnnDataFile, columns: Sequence[str], table: str = "obs") -> pd.DataFrame:
    """Return the given columns, which must exist, of a table such as ``obs``, in that order."""
    if is_current(file.stored(table)):
        file.bring([f"{table}/{column}" for column in columns])
        return pd.DataFrame({column: file.read(f"{table}/{column}") for column in columns})
    return file.read_old_frame(table)[list(columns)]


def read_var(file: AnnDataFile) -> pd.DataFrame:
    """Return the table of genes."""
    is_old = not is_current(file.stored("var"))
    frame: pd.DataFrame = file.read_old_frame("var") if is_old else file.read("var")
    return frame


def read_row_names(file: AnnDataFile, name: str, *, are_shared: bool) -> NDArray[np.object_]:
    """Return the names of the rows of a table such as ``var``, None for missing names.

    Parameters
    ----------
    file, name
        The file, and the table.
    are_shared
        Whether other files have the same names, which are kept; see `read_names`.
    """
    table = file.stored(name)
    if is_current(table):
        index = f"{name}/{index_of(table)}"
        return read_names(file, index) if are_shared else as_names(pd.Index(file.read(index)))
    return as_names(file.read_old_frame(name).index)
