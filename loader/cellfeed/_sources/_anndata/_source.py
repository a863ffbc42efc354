"""An AnnData object in storage: the elements that are read of it, and obs."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._sources._anndata import _annotations as annotations
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._obs_rows import ObsRows
from cellfeed._sources._base import Source, StoredElement

__all__ = ["AnnDataSource"]


class AnnDataSource(Source):
    """Some elements of an AnnData file or store, with its obs.

    Parameters
    ----------
    file
        Where it is stored.
    elements
        What is read, at least one.
    """

    def __init__(self, file: AnnDataFile, elements: Mapping[str, StoredElement]) -> None:
        self._file = file
        self._obs_rows = ObsRows(file)
        self.location = file.location
        self.elements = dict(elements)

    def file_bytes(self) -> int:
        """Return how many bytes its file has, wherever that is."""
        if self.location.path is None and isinstance(self._file, ByteStore):
            return int(self._file.sizes(np.zeros(1, np.int64))[0])
        return super().file_bytes()

    def version(self) -> str | None:
        """Return what tells its file from another one, None if nothing does."""
        found = self._file.identity() if isinstance(self._file, ByteStore) else None
        return None if found is None else found.digest

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        with damage_named(self._file.location, "obs"):
            return annotations.obs_names(self._file)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read some rows of obs columns, with the names of the cells as index."""
        return self._obs_rows.read(columns, rows)

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        with damage_named(self._file.location, "var"):
            return annotations.read_var(self._file)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        with damage_named(self._file.location, "obs"):
            return annotations.read_obs(self._file, columns)
