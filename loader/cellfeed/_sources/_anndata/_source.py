"""An AnnData object in storage: the elements that are read of it, and obs."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cellfeed._bytes import Location
from cellfeed._sources._anndata import _annotations as annotations
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
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
        self.location = Location.of(file.path)
        self.elements = dict(elements)

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        with damage_named(self._file.path, "obs"):
            return annotations.obs_names(self._file)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        with damage_named(self._file.path, "obs"):
            return annotations.read_obs(self._file, columns)
