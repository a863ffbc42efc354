"""obs of one file, read by rows: what a part needs and little more.

Current files and stores are read column by column. Older ones are left to anndata, whole.
"""

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from anndata.io import read_elem
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed._preshuffle._inputs import opened
from cellfeed._preshuffle._row_reading import pick, runs_with_gaps
from cellfeed._runs import Runs
from cellfeed._sources._anndata._annotations import count_rows
from cellfeed._sources._anndata._damage import damage_named

__all__ = ["INDEX", "ObsFile", "read_var"]

# Stands for the names of the cells among the names of columns.
INDEX = None

Values = Any  # an array of NumPy or pandas


class ObsFile:
    """The obs columns of one file; the file is open only while it is read.

    Parameters
    ----------
    path
        An AnnData file or store.
    n_rows
        Cells that its matrix has.

    Raises
    ------
    FormatError
        It is damaged, or obs has another number of rows than the matrix.
    """

    def __init__(self, path: str, n_rows: int) -> None:
        self.path = path
        self._table: pd.DataFrame | None = None
        self._categories: dict[str, pd.CategoricalDtype] = {}
        self.index_name: str | None
        with damage_named(Path(path), "obs"), opened(path) as file:
            obs = file["obs"]
            if _is_current(obs):
                self.columns = tuple(str(name) for name in obs.attrs["column-order"])
                self._index = str(obs.attrs["_index"])
                self.index_name = None if self._index == "_index" else self._index
                found = count_rows(obs)
            else:
                self._table = _read_old(path)["obs"]
                self.columns = tuple(self._table.columns)
                name = self._table.index.name
                self.index_name = None if name is None else str(name)
                found = len(self._table)
        if found != n_rows:
            msg = (
                f"{path}: obs has {found} rows, the matrix {n_rows}; "
                "write the file anew with anndata"
            )
            raise FormatError(msg)

    def read(self, columns: "tuple[str | None, ...]", rows: NDArray[np.int64]) -> list[Values]:
        """Return the values of some rows.

        Parameters
        ----------
        columns
            Names of columns, or `INDEX`.
        rows
            Ascending.
        """
        if self._table is not None:
            chosen = self._table.iloc[rows]
            return [(chosen.index if c is None else chosen[c]).array for c in columns]
        runs = runs_with_gaps(rows)
        with opened(self.path) as file, damage_named(Path(self.path), "obs", runs):
            obs = file["obs"]
            return [self._read(obs[self._index if c is None else c], rows, runs) for c in columns]

    def _read(self, element: Any, rows: NDArray[np.int64], runs: Runs) -> Values:
        if not _is_group(element):
            return pick(element, rows, runs)
        encoding = element.attrs["encoding-type"]
        if encoding == "categorical":
            codes = pick(element["codes"], rows, runs)
            return pd.Categorical.from_codes(codes, dtype=self._dtype(element))
        values, mask = (pick(element[name], rows, runs) for name in ("values", "mask"))
        if encoding == "nullable-integer":
            return pd.arrays.IntegerArray(values, mask)
        if encoding == "nullable-boolean":
            return pd.arrays.BooleanArray(values, mask)
        if encoding == "nullable-string-array":
            values[mask] = None
            return pd.array(values, dtype="string")
        msg = f"{element.name} has an encoding {encoding!r} that is not known"
        raise ValueError(msg)

    def _dtype(self, element: Any) -> pd.CategoricalDtype:
        if element.name not in self._categories:
            ordered = bool(element.attrs["ordered"])
            categories = read_elem(element["categories"])
            self._categories[element.name] = pd.CategoricalDtype(categories, ordered=ordered)
        return self._categories[element.name]


def read_var(path: str) -> pd.DataFrame:
    """Return the table of genes.

    Raises
    ------
    FormatError
        It is damaged.
    """
    with damage_named(Path(path), "var"), opened(path) as file:
        table: pd.DataFrame = (
            read_elem(file["var"]) if _is_current(file["var"]) else _read_old(path)["var"]
        )
        return table


def _is_current(frame: Any) -> bool:
    return bool(frame.attrs.get("encoding-version") == "0.2.0")


def _read_old(path: str) -> dict[str, pd.DataFrame]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the file is old is no news to its reader
        adata = ad.read_h5ad(path, backed="r")
    try:
        return {"obs": adata.obs, "var": adata.var}
    finally:
        adata.file.close()


def _is_group(element: Any) -> bool:
    return not hasattr(element, "dtype")
