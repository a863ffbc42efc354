"""`MemoryMapSource`: folders of memory-mapped CSR arrays of BioNeMo SCDL or SciPy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, ParameterError
from cellfeed._lazy import pd
from cellfeed._sources._base import Source
from cellfeed._sources._memory_maps._arrays import arrays_of, is_scdl
from cellfeed._sources._memory_maps._element import MappedCsr
from cellfeed._sources._memory_maps._scdl_tables import GeneTable, ScdlObs, gene_tables, names_of

__all__ = ["MemoryMapSource", "open_memory_maps"]


class MemoryMapSource(Source):
    """A CSR matrix in uncompressed files, which compiled threads read.

    The folder is a BioNeMo SCDL dataset (``data.npy``, ``col_ptr.npy``, ``row_ptr.npy`` and
    tables of cells and genes; neighbours are not read), or an unzipped archive that
    `scipy.sparse.save_npz` wrote with ``compressed=False`` (``data.npy``, ``indices.npy``,
    ``indptr.npy`` and ``shape.npy``).

    Parameters
    ----------
    folder
        Folder of the files.
    obs
        A data frame with a row for each cell, which replaces the table of the folder and is kept in
        memory.
    var
        A data frame with a row for each gene, indexed by gene name, which replaces the table of the
        folder.
    part
        Number of the part of an SCDL folder to read, if its cells have several tables of genes.

    Raises
    ------
    PathError
        A file is missing.
    FormatError
        The arrays do not form one CSR matrix; or the cells of an SCDL folder have several tables of
        genes, which `open_collection` opens as several sources.
    ParameterError
        The number of rows of a table is not the number of cells or genes.

    Examples
    --------
    >>> import tempfile, zipfile
    >>> import scipy.sparse as sp
    >>> from cellfeed import MemoryMapSource, open_collection
    >>> folder = tempfile.mkdtemp()
    >>> sp.save_npz(f"{folder}/X.npz", sp.csr_array(np.eye(3)), compressed=False)
    >>> zipfile.ZipFile(f"{folder}/X.npz").extractall(folder)
    >>> obs = pd.DataFrame({"plate": ["a", "a", "b"]})
    >>> collection = open_collection(MemoryMapSource(folder, obs=obs), obs=["plate"])
    >>> collection[[2, 0]].X.toarray()
    array([[0., 0., 1.],
           [1., 0., 0.]])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        obs: pd.DataFrame | None = None,
        var: pd.DataFrame | None = None,
        part: int | None = None,
    ) -> None:
        self.location = Location.of(folder)
        arrays = arrays_of(self.location)
        rows, n_columns = (0, arrays.n_rows), arrays.n_columns
        names: NDArray[np.object_] | None = None
        if var is None and is_scdl(Path(self.location)):
            genes = _table_of(self.location, gene_tables(self.location, arrays.n_rows), part)
            names, n_columns, rows, var = names_of(genes.var), len(genes.var), genes.rows, genes.var
        elif part is not None:
            msg = f"{self.location}: `part` applies only to SCDL folders without a given `var`"
            raise ParameterError(f"{msg}; leave it out")
        elif var is not None:
            names = var.index.astype(str).to_numpy(object)
            n_columns = len(var) if n_columns is None else n_columns
        n_rows = rows[1] - rows[0]
        for table, name, n in ((obs, "obs", n_rows), (var, "var", n_columns)):
            if table is not None and len(table) != n:
                msg = f"`{name}` must have {n} rows, but has {len(table)}"
                raise ParameterError(f"{self.location}: {msg}")
        self._obs = ScdlObs(self.location, arrays.n_rows, rows) if obs is None else obs
        self._var = var
        self.elements = {"X": MappedCsr(self.location, arrays, rows, names, n_columns or 0)}

    def __repr__(self) -> str:
        return f"MemoryMapSource({str(self.location)!r})"

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return self._obs.names() if isinstance(self._obs, ScdlObs) else [*map(str, self._obs)]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        if isinstance(self._obs, ScdlObs):
            return self._obs.read(columns)
        return self._obs[[*columns]].reset_index(drop=True)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed as the given obs, or else by row number."""
        table = super().read_obs_rows(columns, rows)
        if not isinstance(self._obs, ScdlObs):
            table.index = self._obs.index[rows].astype(str).astype(object)
        return table

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        if self._var is None:
            return super().read_var()
        names = self.elements["X"].var_names()
        return self._var.set_index(pd.Index(names, dtype=object))


def open_memory_maps(folder: Location) -> list[Source]:
    """Open a folder as one source, or as one source for each table of genes of SCDL."""
    if not is_scdl(Path(folder)):
        return [MemoryMapSource(folder)]
    n_parts = len(gene_tables(folder, arrays_of(folder).n_rows))
    return [MemoryMapSource(folder, part=part) for part in range(n_parts)]


def _table_of(folder: Location, tables: Sequence[GeneTable], part: int | None) -> GeneTable:
    if part is None and len(tables) > 1:
        msg = f"{folder}: has cells of {len(tables)} tables of genes"
        raise FormatError(f"{msg}; give the folder to `open_collection`, or one `part` of it")
    if part is not None and not 0 <= part < len(tables):
        msg = f"`0 <= part < {len(tables)}` must hold, but got part={part}"
        raise ParameterError(f"{folder}: {msg}")
    return tables[part or 0]
