"""An archive of cellstream as a source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._layouts import Layout
from cellfeed._lazy import pd
from cellfeed._runs import Runs, count_rows
from cellfeed._sources._base import Source, StoredElement
from cellfeed._sources._cellstream._archive import Archive
from cellfeed._sources._cellstream._element import CellFrames
from cellfeed._sources._cellstream._tables import header, obs_names, read_obs, read_var

__all__ = ["CellstreamSource"]


class CellstreamSource(Source):
    """Cells of an archive that cellstream wrote with ``layout="cell"``.

    `open_collection` takes its path. cellstream (``pip install 'cellfeed[cellstream]'``) reads it:
    its compiled decoder writes directly into cellfeed's minibatches, in as many threads as
    requested.

    Parameters
    ----------
    path
        The archive, a local file.

    Attributes
    ----------
    elements
        ``"X"``, and ``"obsm/NAME"`` for each array of its obsm. Archives have no layers.

    Raises
    ------
    FormatError
        The archive cannot be read, or cellstream is not installed.
    """

    def __init__(self, path: str | os.PathLike[str] | Location) -> None:
        self.location = path if isinstance(path, Location) else Location.of(path)
        self._archive = Archive(self.location)
        frames = CellFrames(self._archive)
        self.elements: dict[str, StoredElement] = {"X": frames}
        with header(self._archive) as file:
            for name, stored in file.get("obsm", {}).items():
                if isinstance(stored, h5py.Dataset) and stored.ndim > 1:
                    self.elements[f"obsm/{name}"] = _Embedding(self._archive, name, stored)

    def __repr__(self) -> str:
        return f"CellstreamSource({str(self.location)!r})"

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return self.elements["X"].shape[0] if "X" in self.elements else super().n_rows

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return obs_names(self._archive)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        return read_obs(self._archive, columns)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read some rows of obs columns, indexed by the names of the cells."""
        table = read_obs(self._archive, columns, rows)
        table = table.set_index(table.index.astype(str))
        return table.astype({name: "string" for name in table if table[name].dtype == object})

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        return read_var(self._archive)


class _Embedding(StoredElement):
    """An array of obsm, which the archive's header stores as a whole."""

    layout: Layout = "dense"
    var = None

    def __init__(self, archive: Archive, name: str, stored: h5py.Dataset) -> None:
        self._archive, self._name = archive, f"obsm/{name}"
        self.shape, self.dtype = stored.shape, stored.dtype.newbyteorder("=")

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read rows."""
        out = np.empty((count_rows(runs), *self.shape[1:]), self.dtype)
        done = 0
        with header(self._archive) as file:
            for start, stop in runs.tolist():
                out[done : done + stop - start] = file[self._name][start:stop]
                done += stop - start
        return out
