"""obs of one file, read by rows, with little more than the rows of a part.

Current files and stores are read column by column; anndata reads older ones as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import pd
from cellfeed._runs import Runs
from cellfeed._sources._anndata._attributes import (
    StructureError,
    flag,
    index_of,
    is_current,
    is_group,
    text,
)
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile

__all__ = ["ObsRows"]

# Rows that are read in vain cost less than another call of h5py.
_LARGEST_GAP = 1024

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
        obs = self._file.stored("obs")
        if not is_current(obs):
            if self._old is None:
                self._old = self._file.read_old_frame("obs")
            return self._old.iloc[rows][list(columns)]
        runs = _runs_with_gaps(rows)
        with damage_named(self._file.location, "obs", runs):
            index = index_of(obs)
            names = np.asarray(self._read(f"obs/{index}", rows, runs), dtype=object)
            values = {name: self._read(f"obs/{name}", rows, runs) for name in columns}
        name = None if index == "_index" else index
        return pd.DataFrame(values, index=pd.Index(names, dtype=object, name=name))

    def _read(self, name: str, rows: NDArray[np.int64], runs: Runs) -> Values:
        element = self._file.stored(name)
        if not is_group(element):
            return _pick(element, rows, runs)
        encoding = text(element, "encoding-type")
        if encoding == "categorical":
            codes = _pick(self._file.stored(f"{name}/codes"), rows, runs)
            return pd.Categorical.from_codes(codes, dtype=self._dtype(name, element))
        values, mask = (
            _pick(self._file.stored(f"{name}/{part}"), rows, runs) for part in ("values", "mask")
        )
        if encoding == "nullable-integer":
            return pd.arrays.IntegerArray(values, mask)
        if encoding == "nullable-boolean":
            return pd.arrays.BooleanArray(values, mask)
        if encoding == "nullable-string-array":
            values[mask] = None
            return pd.array(values, dtype="string")
        msg = f"{element.name} has the unknown encoding {encoding!r}"
        raise StructureError(msg)

    def _dtype(self, name: str, element: Any) -> pd.CategoricalDtype:
        if name not in self._categories:
            ordered = flag(element, "ordered")
            categories = self._file.read(f"{name}/categories")
            self._categories[name] = pd.CategoricalDtype(categories, ordered=ordered)
        return self._categories[name]


def _pick(stored: Any, rows: NDArray[np.int64], runs: Runs) -> NDArray[Any]:
    """Return ``stored[rows]`` for an HDF5 or zarr array of numbers or text.

    Parameters
    ----------
    stored
        The array.
    rows
        Ascending rows.
    runs
        `_runs_with_gaps` of ``rows``.
    """
    is_text = stored.dtype.kind not in "biuf"
    if is_text and isinstance(stored, h5py.Dataset):
        stored = stored.asstr()
    out = np.empty(rows.size, dtype=object if is_text else stored.dtype.newbyteorder("="))
    bounds = np.searchsorted(rows, runs)
    for (start, stop), (first, last) in zip(runs.tolist(), bounds.tolist(), strict=True):
        out[first:last] = np.asarray(stored[start:stop], dtype=out.dtype)[rows[first:last] - start]
    return out


def _runs_with_gaps(rows: NDArray[np.int64]) -> Runs:
    """Return runs that contain ascending ``rows``, and other rows only if that saves a call.

    Examples
    --------
    >>> _runs_with_gaps(np.array([3, 5, 9, 5000])).tolist()
    [[3, 10], [5000, 5001]]
    """
    if not rows.size:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(rows) > _LARGEST_GAP)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, rows.size - 1)
    return np.stack([rows[firsts], rows[lasts] + 1], axis=1)
