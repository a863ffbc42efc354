"""obs of one file, read by rows, with little more than the rows of a part.

Current files and stores are read column by column; anndata reads older ones as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import ad, pd
from cellfeed._runs import Runs
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._row_reading import pick, runs_with_gaps

__all__ = ["ObsRows"]

Values = Any  # an array of NumPy or pandas


class ObsRows:
    """The obs columns of one file, read by rows.

    Parameters
    ----------
    file
        An AnnData file or store.
    """

    def __init__(self, file: AnnDataFile) -> None:
        self._file = file
        self._categories: dict[str, pd.CategoricalDtype] = {}
        self._old: pd.DataFrame | None = None

    def read(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return columns of the given ascending rows, indexed by the names of the cells."""
        obs = self._file()["obs"]
        if not _is_current(obs):
            if self._old is None:
                self._old = self._file.read_old_frame("obs")
            return self._old.iloc[rows][list(columns)]
        runs = runs_with_gaps(rows)
        with damage_named(self._file.location, "obs", runs):
            index = str(obs.attrs["_index"])
            names = np.asarray(self._read(obs[index], rows, runs), dtype=object)
            values = {name: self._read(obs[name], rows, runs) for name in columns}
        name = None if index == "_index" else index
        return pd.DataFrame(values, index=pd.Index(names, dtype=object, name=name))

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
        msg = f"{element.name} has the unknown encoding {encoding!r}"
        raise ValueError(msg)

    def _dtype(self, element: Any) -> pd.CategoricalDtype:
        if element.name not in self._categories:
            ordered = bool(element.attrs["ordered"])
            categories = ad.io.read_elem(element["categories"])
            self._categories[element.name] = pd.CategoricalDtype(categories, ordered=ordered)
        return self._categories[element.name]


def _is_current(frame: Any) -> bool:
    return bool(frame.attrs.get("encoding-version") == "0.2.0")


def _is_group(element: Any) -> bool:
    return not hasattr(element, "dtype")
