"""AnnData objects: in memory, or backed by a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError
from cellfeed._lazy import pd, sp
from cellfeed._sources._anndata import as_names, open_sources
from cellfeed._sources._base import Source, StoredElement
from cellfeed._sources._in_memory._elements import element_in_memory

__all__ = ["AnnDataObjectSource"]

_NAMES_LOOKED_AT = 4096
_BYTES_LOOKED_AT = 8 << 20


class AnnDataObjectSource(Source):
    """Some elements of an AnnData object, with its obs in memory.

    Parameters
    ----------
    adata
        The object; if it is backed, its file is read.
    elements
        Names of the elements to read.

    Raises
    ------
    FormatError
        It lacks an element, or an element is no matrix that can be read by cell; or it is a view of
        a backed object.
    """

    def __init__(self, adata: Any, elements: Sequence[str]) -> None:
        self._obs, self._var = adata.obs, adata.var
        self._version: str | None = None
        if adata.isbacked:
            self.location = Location.of(adata.filename)
            if adata.is_view:
                msg = f"{self.location}: is a view of a backed AnnData"
                raise FormatError(
                    f"{msg}; give the whole object, and select rows of the collection"
                )
            (source,) = open_sources(self.location, elements)
            self.elements = source.elements
            return
        self.location = Location("memory://AnnData")
        self.elements = {name: self._element(adata, name) for name in elements}
        self._version = _fingerprint(adata)

    def version(self) -> str | None:
        """Return a digest of a sample of the contents in memory; None if the object is backed.

        The digest covers the shape, 4,096 names of cells, and at most 8 MiB of ``X``, in rows
        spread from the first to the last, if ``X`` is CSR or a NumPy array; it does not depend on
        the elements. It distinguishes most objects, but not those that differ only in few cells.
        """
        return self._version

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return [str(name) for name in self._obs]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some obs columns."""
        table: pd.DataFrame = self._obs[[*columns]].reset_index(drop=True)
        return table

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return some rows of obs columns, indexed by the names of the cells."""
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
                f"`{each}/{key}`"
                for each in ("layers", "obsm")
                for key in getattr(adata, each)
                if key is not None  # X again, from anndata 0.13
            ]
            there = [*(["`X`"] if adata.X is not None else []), *there]
            there += ["`raw/X`"] if adata.raw is not None else []
            listed = f"its elements are: {', '.join(there)}" if there else "it has no elements"
            raise FormatError(f"{self.location}: has no `{name}`; {listed}")
        if folder != "obsm":
            columns = as_names(owner.var_names)
        return element_in_memory(self.location, name, found, columns)


def _fingerprint(adata: Any) -> str:
    n_rows, n_columns = adata.shape
    names = adata.obs_names[_spread(n_rows, _NAMES_LOOKED_AT)]
    digest = hashlib.blake2b(repr((adata.shape, [*map(str, names)])).encode(), digest_size=16)
    n_looked_at = _BYTES_LOOKED_AT // max(1, n_columns * np.dtype(np.float64).itemsize)
    matrix = adata.X
    if _is_by_row(matrix):
        values = matrix[_spread(n_rows, n_looked_at)]
        is_csr = sp.issparse(values)
        parts = (values.indptr, values.indices, values.data) if is_csr else (values,)
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _is_by_row(matrix: Any) -> bool:
    if sp.issparse(matrix):
        return getattr(matrix, "format", None) == "csr"
    return isinstance(matrix, np.ndarray) and matrix.dtype.kind in "biuf"


def _spread(n_rows: int, most: int) -> NDArray[np.int64]:
    """Return up to this many rows, at least one, spread from the first to the last."""
    n = min(n_rows, max(1, most))
    return np.linspace(0, max(0, n_rows - 1), n).astype(np.int64)
