"""A source for stored AnnData: its elements and obs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore, digest_of, lasting_identity
from cellfeed._errors import FormatError
from cellfeed._lazy import pd
from cellfeed._rows import ObsColumn
from cellfeed._storages._anndata import _annotations as frames
from cellfeed._storages._anndata._annotations import ObsRows
from cellfeed._storages._anndata._attributes import texts
from cellfeed._storages._anndata._damage import damage_named
from cellfeed._storages._anndata._h5file import AnnDataFile
from cellfeed._storages._anndata._local_h5file import LocalH5File
from cellfeed._storages._base import Source, StoredElement


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


# Stored MuData: modalities that share their cells, each with its own elements and obs.
#
# Format: https://mudata.readthedocs.io/en/latest/notebooks/quickstart_mudata.html


class MuDataSource(AnnDataSource):
    """Elements of a MuData file or store, with obs of all cells and of modalities.

    Columns of a modality's obs have names such as ``"rna:plate"``, as in mudata, unless the
    table of all cells has a column of that name.

    Parameters
    ----------
    file, elements
        See `AnnDataSource`; rows are the cells of the file, in order.
    """

    def __init__(self, file: AnnDataFile, elements: Mapping[str, StoredElement]) -> None:
        super().__init__(file, elements)
        with damage_named(self._file.location, "obs"):
            self._n_rows = frames.count_rows(file, "obs")

    @property
    def n_rows(self) -> int:
        """Number of cells in all modalities together."""
        return self._n_rows

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        own = super().obs_names()
        return (*own, *(name for name in self._columns_of_modalities() if name not in own))

    def plain_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:  # noqa: ARG002
        """Return no columns: those of modalities are aligned with pandas."""
        return {}

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns; values are missing for cells that a modality lacks."""
        own, others = super().obs_names(), self._columns_of_modalities()
        table = super().read_obs([name for name in columns if name in own])
        series = {name: table[name] for name in table}
        rows = dict[str, NDArray[np.int64]]()
        for name in columns:
            if name not in own:
                modality, column = others[name]
                if modality not in rows:
                    rows[modality] = _row_map(self._file, modality)
                series[name] = self._of_all_cells(modality, column, rows[modality])
        return pd.DataFrame({name: series[name] for name in columns})

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        own = super().obs_names()
        table = super().read_obs_rows([name for name in columns if name in own], rows)
        for name in columns:
            if name not in own:
                table[name] = self.read_obs([name])[name].array[rows]
        return table[list(columns)]

    def _columns_of_modalities(self) -> dict[str, tuple[str, str]]:
        """Return modality and column, by the name of the column in the collection."""
        found = dict[str, tuple[str, str]]()
        for modality in modalities(self._file()):
            with damage_named(self._file.location, f"mod/{modality}/obs"):
                for column in frames.obs_names(self._file, f"mod/{modality}/obs"):
                    found[f"{modality}:{column}"] = modality, column
        return found

    def _of_all_cells(self, modality: str, column: str, rows: NDArray[np.int64]) -> pd.Series[Any]:
        table = f"mod/{modality}/obs"
        with damage_named(self._file.location, table):
            values = frames.read_obs(self._file, [column], table)[column]
        values = values.reset_index(drop=True)
        if (rows < 0).any():  # integers and booleans have no value that is missing
            if pd.api.types.is_bool_dtype(values.dtype):
                values = values.astype("category")
            elif pd.api.types.is_integer_dtype(values.dtype):
                values = values.convert_dtypes()
        return values.reindex(rows).reset_index(drop=True)


def is_mudata(root: Any) -> bool:
    """Return whether a file or store contains MuData, not AnnData."""
    return "mod" in root


def modalities(root: Any) -> tuple[str, ...]:
    """Return the names of the modalities, in mudata's order."""
    names = sorted(root["mod"])
    order = texts(root["mod"], "mod-order")
    return order if sorted(order) == names else tuple(names)


def rows_of_cells(file: AnnDataFile, modality: str) -> NDArray[np.int64] | None:
    """Return the row of each cell of a file in a modality, which must have all cells.

    Parameters
    ----------
    file, modality
        A MuData file, and one of its `modalities`.

    Returns
    -------
    int64, shape (n_cells,); None if rows are stored in the order of the cells.

    Raises
    ------
    FormatError
        The modality lacks cells, or the file does not map its rows to cells.
    """
    rows = _row_map(file, modality)
    n_lacking = int(np.count_nonzero(rows < 0))
    if n_lacking:
        msg = (
            f"{file.location}: modality {modality!r} lacks {n_lacking:,} of {rows.size:,} "
            f"cells; write only the cells that it has, `mdata[mdata.obsmap[{modality!r}] > "
            "0].copy()`, and read that file"
        )
        raise FormatError(msg)
    return None if np.array_equal(rows, np.arange(rows.size)) else rows


def _row_map(file: AnnDataFile, modality: str) -> NDArray[np.int64]:
    """Return the row of each cell in a modality, -1 for missing cells."""
    root, name = file(), f"obsmap/{modality}"
    with damage_named(file.location, name):
        if name not in root:
            msg = (
                f"{file.location}: has no `{name}`, which maps its rows to cells; write the file "
                "again with mudata"
            )
            raise FormatError(msg)
        # mudata counts from 1, and writes 0 where there is none.
        rows = np.asarray(file.stored(name)[...]).reshape(-1).astype(np.int64) - 1
        n_cells = frames.count_rows(file, "obs")
        n_rows = frames.count_rows(file, f"mod/{modality}/obs")
    there = rows[rows >= 0]
    is_one_each = there.size == n_rows and there.max(initial=-1) < n_rows
    is_one_each = is_one_each and bool((np.bincount(there, minlength=n_rows) == 1).all())
    if rows.size != n_cells or not is_one_each:
        msg = (
            f"{file.location}: `{name}` does not map each of {n_rows:,} rows to one of "
            f"{n_cells:,} cells; write the file again with mudata"
        )
        raise FormatError(msg)
    return rows
