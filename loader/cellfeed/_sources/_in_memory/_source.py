"""AnnData objects: in memory, or backed by a file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError
from cellfeed._sources._anndata import open_sources
from cellfeed._sources._base import Source, StoredElement
from cellfeed._sources._in_memory._elements import element_in_memory

__all__ = ["AnnDataObjectSource"]


class AnnDataObjectSource(Source):
    """Some elements of an AnnData object, with its obs as it is in memory.

    Parameters
    ----------
    adata
        The object; a backed one is read from its file.
    elements
        What is read.

    Raises
    ------
    FormatError
        It lacks an element, or one is no matrix that is read by cell; or it is a view of a backed
        object.
    """

    def __init__(self, adata: Any, elements: Sequence[str]) -> None:
        self._obs, self._var = adata.obs, adata.var
        if adata.isbacked:
            self.location = Location.of(adata.filename)
            if adata.is_view:
                msg = f"{self.location}: is given as a view of a backed AnnData"
                raise FormatError(f"{msg}; give it whole, and choose rows of the collection")
            (source,) = open_sources(self.location, elements)
            self.elements = source.elements
            return
        self.location = Location("memory://AnnData")
        self.elements = {name: self._element(adata, name) for name in elements}

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return [str(name) for name in self._obs]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some obs columns."""
        table: pd.DataFrame = self._obs[[*columns]].reset_index(drop=True)
        return table

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return some rows of obs columns, with the names of the cells as index."""
        names = self._obs.index[rows].astype(str)
        return super().read_obs_rows(columns, rows).set_axis(names.astype(object), axis=0)

    def read_var(self) -> pd.DataFrame:
        """Return the table of genes."""
        table: pd.DataFrame = self._var
        return table

    def _element(self, adata: Any, name: str) -> StoredElement:
        folder, _, key = name.partition("/")
        owner = adata.raw if folder == "raw" else adata
        columns = None
        if name in ("X", "raw/X") and owner is not None:
            found = owner.X
        elif folder in ("layers", "obsm") and key in getattr(adata, folder):
            found = getattr(adata, folder)[key]
        else:
            found = None
        if found is None:
            there = [
                f"`{each}/{key}`" for each in ("layers", "obsm") for key in getattr(adata, each)
            ]
            there = [*(["`X`"] if adata.X is not None else []), *there]
            there += ["`raw/X`"] if adata.raw is not None else []
            listed = f"its elements are: {', '.join(there)}" if there else "it has no elements"
            raise FormatError(f"{self.location}: has no `{name}`; {listed}")
        if folder != "obsm":
            columns = owner.var_names.astype(str).to_numpy(object)
        return element_in_memory(self.location, name, found, columns)
