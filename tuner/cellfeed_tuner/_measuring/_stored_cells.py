"""Cells as files have them, read through h5py, zarr and anndata, and by nothing of cellfeed's.

So that what a loader delivers is held against something that does not share its mistakes. Little
is read: slices of arrays, whatever the size of the files; but where obs is in a form that anndata
no longer writes, all of it.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Self

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem
from numpy.typing import NDArray

from cellfeed import Collection

__all__ = ["StoredCells"]


class StoredCells:
    """Rows of a collection's files; a context manager that keeps open what it has read from."""

    def __init__(self, collection: Collection) -> None:
        self._locations = collection.locations
        self._element = next(iter(collection.elements.values()))
        self._ends = np.cumsum(collection.cells_per_location)
        self._n_vars = collection.n_vars
        self._opened = ExitStack()
        self._file = cache(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def path(self, row: int) -> Path:
        """Return the file that a row lies in."""
        return Path(self._locations[self._place(row)[0]])

    def expression(self, row: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the value of each gene, shape (n_vars,), with those of one column added up."""
        number, local = self._place(row)
        maps = self._element.column_maps
        file, name = self._file(number), self._element.stored_as[number]
        if maps is None:
            return file.values(name, local, self._n_vars, dtype)
        columns = maps[number].columns
        joined = np.zeros(self._n_vars, dtype)
        own = file.values(name, local, len(columns), dtype)
        joined[columns[columns >= 0]] = own[columns >= 0]
        return joined

    def label(self, row: int, name: str) -> Any:
        """Return what an obs column has for a row, None if that is missing."""
        number, local = self._place(row)
        value = self._file(number).label(name, local)
        return None if pd.isna(value) else value

    def _place(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        return number, row - (int(self._ends[number - 1]) if number else 0)

    def _open(self, number: int) -> "_StoredFile":
        path = Path(self._locations[number])
        if path.is_dir():
            return _StoredFile(path, zarr.open_group(path, mode="r"))
        return _StoredFile(path, self._opened.enter_context(h5py.File(path, "r")))


def _stored_row(stored: Any, row: int, n_columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return one row of a stored array, dense, of images too; or of a data frame of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        if hasattr(stored, "dtype"):
            values: NDArray[Any] = np.asarray(stored[row : row + 1]).reshape(-1).astype(dtype)
            return values
        if "column-order" in stored.attrs:
            found = [_reader(stored[name])(row) for name in stored.attrs["column-order"]]
            return np.array([np.nan if each is None else each for each in found]).astype(dtype)
        start, stop = np.asarray(stored["indptr"][row : row + 2]).tolist()
        dense = np.zeros(n_columns, dtype)
        columns = np.asarray(stored["indices"][start:stop]).astype(np.int64)
        np.add.at(dense, columns, np.asarray(stored["data"][start:stop]).astype(dtype))
    return dense


class _StoredFile:
    """One file; h5py and zarr give groups and arrays of the same form."""

    def __init__(self, path: Path, root: Any) -> None:
        self._path = path
        self.root = root
        self._frame = cache(self._read_frame)
        self._reader = cache(self._column)

    def values(self, name: str, row: int, n_columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the values of a cell in an array of the file, or of a modality of it."""
        if name.startswith("mod/"):
            row = self._row_of(name.split("/")[1], row)
        return _stored_row(self.root[name], row, n_columns, dtype)

    def label(self, name: str, row: int) -> Any:
        """Return what an obs column has for a row."""
        return self._reader(name)(row)

    def _row_of(self, modality: str, row: int) -> int:
        """Return the row of a cell in a modality of MuData, -1 if it has none."""
        return int(_element(self.root[f"obsmap/{modality}"], row)) - 1

    def _column(self, name: str) -> Callable[[int], Any]:
        """Return what reads one row of an obs column."""
        obs = self.root["obs"]
        modality, _, own_name = name.partition(":")
        if f"mod/{modality}/obs" in self.root and name not in obs:
            of_modality = _reader(self.root[f"mod/{modality}/obs"][own_name])

            def label(row: int) -> Any:
                row = self._row_of(modality, row)
                return None if row < 0 else of_modality(row)

            return label
        if obs.attrs.get("encoding-version") != "0.2.0":
            series = self._frame()[name]
            return lambda row: series.iloc[row]
        return _reader(obs[name])

    def _read_frame(self) -> pd.DataFrame:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a file is old is no news
            if self._path.is_dir():
                frame: pd.DataFrame = read_elem(self.root["obs"])
            else:
                adata = ad.read_h5ad(self._path, backed="r")
                frame = adata.obs
                adata.file.close()
        return frame


def _reader(column: Any) -> Callable[[int], Any]:
    """Return what reads one row of a stored column."""
    if hasattr(column, "dtype"):
        return lambda row: _element(column, row)
    if "categories" in column:
        categories: list[Any] = [*read_elem(column["categories"]), None]  # which is -1
        return lambda row: categories[int(_element(column["codes"], row))]
    if "mask" in column:
        return lambda row: (
            None if _element(column["mask"], row) else _element(column["values"], row)
        )
    whole = pd.Series(read_elem(column))
    return lambda row: whole.iloc[row]


def _element(array: Any, row: int) -> Any:
    if isinstance(array, h5py.Dataset) and array.dtype.kind == "O":
        array = array.asstr()
    return np.asarray(array[row : row + 1])[0]
