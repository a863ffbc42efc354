"""obs and var of AnnData files of any version.

Current files are read column by column. anndata reads older ones (obs as one compound dataset, or
categories stored apart from the codes), since it supports all earlier formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CategoricalColumn, NumericColumn, ObsColumn
from cellfeed._lazy import pd
from cellfeed._sources._anndata._attributes import index_of, is_current, is_group, text, texts
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._gene_names import as_names, read_names

__all__ = ["count_rows", "obs_names", "plain_obs", "read_obs", "read_row_names", "read_var"]

_LARGEST_NUMBER = 8  # bytes; torch has none above


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


def plain_obs(file: AnnDataFile, columns: Sequence[str]) -> dict[str, ObsColumn]:
    """Return columns of current HDF5 files that are numbers or categories of text.

    What is unusual about others, anndata and pandas know, or refuse.
    """
    obs = file.stored("obs")
    if not isinstance(obs, h5py.Group) or not is_current(obs):
        return {}
    file.bring([f"obs/{column}" for column in columns])
    found = {column: _plain_column(file.stored(f"obs/{column}")) for column in columns}
    return {name: column for name, column in found.items() if column is not None}


def _plain_column(stored: Any) -> ObsColumn | None:
    encoding = text(stored, "encoding-type")
    if encoding == "array" and isinstance(stored, h5py.Dataset):
        is_number = stored.dtype.kind in "iuf" and stored.dtype.itemsize <= _LARGEST_NUMBER
        is_plain = is_number and stored.dtype.isnative and stored.ndim == 1
        return NumericColumn(stored[()]) if is_plain else None
    if encoding != "categorical" or not isinstance(stored, h5py.Group):
        return None
    codes, categories = stored["codes"], stored["categories"]
    are_plain = all(isinstance(each, h5py.Dataset) and each.ndim == 1 for each in stored.values())
    if not are_plain or text(categories, "encoding-type") != "string-array":
        return None
    kind = h5py.check_string_dtype(categories.dtype)
    if kind is None or kind.length is not None or codes.dtype.kind != "i":
        return None
    names = np.array(categories.asstr()[()], object)
    values = codes[()]
    fit = not values.size or -1 <= values.min() <= values.max() < names.size
    return CategoricalColumn(values, names) if fit and len(set(names)) == names.size else None


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
