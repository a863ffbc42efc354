"""The tables of genes and of cells in a folder of BioNeMo SCDL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError
from cellfeed._lazy import pd
from cellfeed._sources._base import import_arrow, to_frame

__all__ = ["GeneTable", "ScdlObs", "gene_tables", "names_of"]

# Columns that may contain names of genes, first the one into which SCDL writes the index.
_NAMES = ("var_feature_id", "feature_id", "gene_id", "ensembl_id", "feature_name", "gene_name")


@dataclass(frozen=True, slots=True, eq=False)
class GeneTable:
    """Genes, and the cells that have these genes.

    Parameters
    ----------
    rows
        The first of these cells, and the one after the last.
    var
        One row per gene.
    """

    rows: tuple[int, int]
    var: pd.DataFrame


def gene_tables(folder: Location, n_rows: int) -> list[GeneTable]:
    """Return the tables of genes of a folder, merging adjacent tables that are equal.

    Raises
    ------
    FormatError
        There are no tables, or they do not cover the cells of the folder.
    """
    where = next(
        (Path(folder, n) for n in ("var_features", "features") if Path(folder, n).is_dir()), None
    )
    if where is None:
        msg = f"{folder}: has no `var_features`, so the number of genes is unknown"
        raise FormatError(f"{msg}; save it with `SingleCellMemMapDataset.save`")
    bounds, files = _saved(folder, where.name, n_rows)
    arrow = import_arrow(folder, "scdl")
    tables = list[GeneTable]()
    for k, file in enumerate(files):
        var = _read(arrow, file, None).to_pandas()
        if tables and tables[-1].var.equals(var):
            tables[-1] = GeneTable((tables[-1].rows[0], bounds[k + 1]), var)
        else:
            tables.append(GeneTable((bounds[k], bounds[k + 1]), var))
    return tables


def names_of(var: pd.DataFrame) -> NDArray[np.object_] | None:
    """Return the names of genes; None if no column contains them."""
    column = next((name for name in _NAMES if name in var), None)
    return None if column is None else var[column].astype(str).to_numpy(object)


class ScdlObs:
    """The obs columns of a folder.

    Parameters
    ----------
    folder
        The folder.
    n_rows
        Its number of cells.
    rows
        First row to read, and the one after the last.
    """

    def __init__(self, folder: Location, n_rows: int, rows: tuple[int, int]) -> None:
        self._folder, self._n_rows, self._rows = folder, n_rows, rows

    def names(self) -> list[str]:
        """Return the names of all columns."""
        arrow, files = self._files()
        named = [_said_in(file, arrow.parquet.read_schema).names for file in files]
        return list(dict.fromkeys(name for names in named for name in names))

    def read(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns, with missing values for cells whose table lacks a column."""
        arrow, files = self._files()
        parts = [_read(arrow, file, columns) for file in files]
        table = arrow.concat_tables(parts, promote_options="permissive").select(list(columns))
        first, stop = self._rows
        return to_frame(table.slice(first, stop - first))

    def _files(self) -> tuple[Any, list[Path]]:
        """Return pyarrow, and the tables, after comparing their row counts with the index."""
        arrow = import_arrow(self._folder, "scdl")
        if not Path(self._folder, "obs_features").is_dir():
            return arrow, []
        bounds, files = _saved(self._folder, "obs_features", self._n_rows)
        for file, first, stop in zip(files, bounds, bounds[1:], strict=False):
            n_rows = _said_in(file, arrow.parquet.read_metadata).num_rows
            if n_rows != stop - first:
                msg = f"{file}: has {n_rows} rows, but its index states {stop - first}"
                raise FormatError(f"{msg}; write the folder {self._folder.name} again")
        return arrow, files


def _saved(folder: Location, name: str, n_rows: int) -> tuple[list[int], list[Path]]:
    """Return the row bounds and the files of the tables of the last save; may be none.

    BioNeMo numbers the files from 0, padded to the number of digits of their count, and does not
    remove the files of an earlier save.

    Raises
    ------
    FormatError
        A file is missing, or the files do not cover ``n_rows`` cells.
    """
    where = Path(folder, name)
    index = where / "cumulative_sum_index.npy"
    stored = _said_in(index, lambda path: np.load(path).astype(np.int64))
    bounds = np.maximum(stored, 0).ravel().tolist()
    n_tables = len(bounds) - 1
    if not n_tables and name == "obs_features":  # the cells have no labels
        return bounds, []
    files = [where / f"dataframe_{k:0{len(str(n_tables))}d}.parquet" for k in range(n_tables)]
    if not all(file.is_file() for file in files):
        files = sorted(where.rglob("*.parquet"))  # with other names, but of one save
    if len(files) != n_tables or len({len(file.name) for file in files}) > 1:
        msg = f"{where}: has {len(files)} tables, but `{index.name}` has {n_tables}"
        raise FormatError(f"{msg}; write the folder {folder.name} again")
    if bounds[-1] != n_rows:
        msg = f"{index}: covers {bounds[-1]} cells, not {n_rows}"
        raise FormatError(f"{msg}; write the folder {folder.name} again")
    return bounds, files


def _said_in(file: Path, read: Callable[[Path], Any]) -> Any:
    """Return the contents of a file.

    Raises
    ------
    FormatError
        It is missing or damaged.
    """
    try:
        return read(file)
    except (OSError, ValueError, EOFError) as error:
        said = str(error).splitlines()[0]
        raise FormatError(f"{file}: cannot be read ({said}); copy it again") from error


def _read(arrow: Any, file: Path, columns: Sequence[str] | None) -> Any:
    there = _said_in(file, arrow.parquet.read_schema).names
    wanted = None if columns is None else [name for name in columns if name in there]
    table = _said_in(file, lambda path: arrow.parquet.ParquetFile(path).read(columns=wanted))
    if columns is not None and not wanted:  # so that the number of rows is kept
        n_rows = arrow.parquet.read_metadata(file).num_rows
        return arrow.table({columns[0]: arrow.nulls(n_rows)})
    return table
