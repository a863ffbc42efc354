"""obs and var of AnnData files of any age.

Current files are read column by column. Older ones (obs as one compound dataset, or categories
kept apart from the codes) are left to anndata, which knows every form that there has been.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem
from numpy.typing import NDArray

from cellfeed._errors import ColumnError

__all__ = ["obs_names", "read_obs", "read_var_names"]


def obs_names(file: h5py.File) -> tuple[str, ...]:
    """Return the names of the obs columns."""
    obs = file["obs"]
    if isinstance(obs, h5py.Group):
        return tuple(str(name) for name in obs.attrs["column-order"])
    return tuple(str(name) for name in _read_by_anndata(file, "obs").columns)


def read_obs(file: h5py.File, columns: Sequence[str]) -> pd.DataFrame:
    """Return the obs columns asked for, in that order.

    Raises
    ------
    ColumnError
        A column is absent.
    """
    known = obs_names(file)
    for column in columns:
        if column not in known:
            msg = (
                f"{file.filename}: obs has no column {column!r}; "
                f"its columns are: {', '.join(known) or 'none'}"
            )
            raise ColumnError(msg)
    if _is_current(file["obs"]):
        return pd.DataFrame({column: read_elem(file["obs"][column]) for column in columns})
    return _read_by_anndata(file, "obs")[list(columns)]


def read_var_names(file: h5py.File) -> NDArray[np.object_]:
    """Return the gene names."""
    var = file["var"]
    if _is_current(var):
        names: Any = read_elem(var[var.attrs["_index"]])
    else:
        names = _read_by_anndata(file, "var").index
    return np.asarray(names, dtype=object)


def _is_current(frame: h5py.Group | h5py.Dataset) -> bool:
    return bool(frame.attrs.get("encoding-version") == "0.2.0")


def _read_by_anndata(file: h5py.File, frame: Literal["obs", "var"]) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the file is old is no news to its reader
        adata = ad.read_h5ad(file.filename, backed="r")
    try:
        table: pd.DataFrame = getattr(adata, frame)
        return table
    finally:
        adata.file.close()
