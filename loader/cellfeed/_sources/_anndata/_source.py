"""An AnnData object in storage: the elements that are read of it, and obs."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pandas as pd

from cellfeed._bytes import Location
from cellfeed._sources._anndata import _annotations as annotations
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._base import StoredElement

__all__ = ["AnnDataSource"]


class AnnDataSource:
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
        self._elements = dict(elements)

    @property
    def location(self) -> Location:
        """The file or folder."""
        return Location.of(self._file.path)

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return next(iter(self._elements.values())).shape[0]

    @property
    def elements(self) -> Mapping[str, StoredElement]:
        """The arrays that were asked for, by name."""
        return MappingProxyType(self._elements)

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        with damage_named(self._file.path, "obs"):
            return annotations.obs_names(self._file)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        with damage_named(self._file.path, "obs"):
            return annotations.read_obs(self._file, columns)
