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
from cellfeed._lazy import ad, pd
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._gene_names import read_names

__all__ = ["count_rows", "obs_names", "plain_obs", "read_obs", "read_var", "read_var_names"]

_LARGEST_NUMBER = 8  # bytes; torch has none above


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
        return pd.DataFrame({column: ad.io.read_elem(obs[column]) for column in columns})
    return file.read_old_frame(table)[list(columns)]


def plain_obs(file: AnnDataFile, columns: Sequence[str]) -> dict[str, ObsColumn]:
    """Return columns of current HDF5 files that are numbers or categories of text.

    What is unusual about others, anndata and pandas know, or refuse.
    """
    obs = file()["obs"]
    if not isinstance(obs, h5py.Group) or not _is_current(obs):
        return {}
    file.bring([f"obs/{column}" for column in columns])
    found = {column: _plain_column(obs[column]) for column in columns}
    return {name: column for name, column in found.items() if column is not None}


def _plain_column(stored: Any) -> ObsColumn | None:
    encoding = stored.attrs.get("encoding-type")
    if encoding == "array" and isinstance(stored, h5py.Dataset):
        is_number = stored.dtype.kind in "iuf" and stored.dtype.itemsize <= _LARGEST_NUMBER
        is_plain = is_number and stored.dtype.isnative and stored.ndim == 1
        return NumericColumn(stored[()]) if is_plain else None
    if encoding != "categorical" or not isinstance(stored, h5py.Group):
        return None
    codes, categories = stored["codes"], stored["categories"]
    are_plain = all(isinstance(each, h5py.Dataset) and each.ndim == 1 for each in stored.values())
    if not are_plain or categories.attrs.get("encoding-type") != "string-array":
        return None
    text = h5py.check_string_dtype(categories.dtype)
    if text is None or text.length is not None or codes.dtype.kind != "i":
        return None
    names = np.array(categories.asstr()[()], object)
    values = codes[()]
    fit = not values.size or -1 <= values.min() <= values.max() < names.size
    return CategoricalColumn(values, names) if fit and len(set(names)) == names.size else None


def read_var(file: AnnDataFile) -> pd.DataFrame:
    """Return the table of genes."""
    table = file()["var"]
    frame: pd.DataFrame = (
        ad.io.read_elem(table) if _is_current(table) else file.read_old_frame("var")
    )
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
