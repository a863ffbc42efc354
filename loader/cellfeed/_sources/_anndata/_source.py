"""A source for stored AnnData: its elements and obs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore, digest_of, lasting_identity
from cellfeed._cells import ObsColumn
from cellfeed._lazy import pd
from cellfeed._sources._anndata import _annotations as frames
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._local_h5file import LocalH5File
from cellfeed._sources._anndata._obs_rows import ObsRows
from cellfeed._sources._base import Source, StoredElement

__all__ = ["AnnDataSource"]


class AnnDataSource(Source):
    """Elements of an AnnData file or store, with its obs.

    Parameters
    ----------
    file
        The file or store.
    elements
        The elements, at least one.
    """

    def __init__(self, file: AnnDataFile, elements: Mapping[str, StoredElement]) -> None:
        self._file = file
        self._obs_rows = ObsRows(file)
        self.location = file.location
        self.elements = dict(elements)

    def file_bytes(self) -> int:
        """Return the size of its file in bytes, local or remote."""
        if self.location.path is None and isinstance(self._file, ByteStore):
            return int(self._file.sizes(np.zeros(1, np.int64))[0])
        return super().file_bytes()

    def version(self) -> str | None:
        """Return a digest that changes when its file is replaced; None if there is none."""
        found = self._file.identity() if isinstance(self._file, ByteStore) else None
        linked = [(str(each), each.stat()) for each in self.linked_files()]
        if found is None or not linked:
            return None if found is None else found.digest
        return digest_of(found.digest, lasting_identity(linked).digest)

    def linked_files(self) -> Sequence[Path]:
        """Return local files elsewhere to which its elements refer."""
        return self._file.linked_files if isinstance(self._file, LocalH5File) else ()

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        with damage_named(self._file.location, "obs"):
            return frames.obs_names(self._file)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        return self._obs_rows.read(columns, rows)

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        with damage_named(self._file.location, "var"):
            return frames.read_var(self._file)

    def plain_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:
        """Return those obs columns that can be read without pandas."""
        with damage_named(self._file.location, "obs"):
            return frames.plain_obs(self._file, columns)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        with damage_named(self._file.location, "obs"):
            return frames.read_obs(self._file, columns)
