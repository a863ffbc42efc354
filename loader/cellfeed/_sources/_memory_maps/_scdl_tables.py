"""The tables of genes and of cells in a folder of BioNeMo SCDL."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError
from cellfeed._sources._base import import_arrow, to_frame

__all__ = ["GeneTable", "ScdlObs", "gene_tables", "names_of"]

# What a column with names of genes is called: first as SCDL calls what was the index.
_NAMES = ("var_feature_id", "feature_id", "gene_id", "ensembl_id", "feature_name", "gene_name")


@dataclass(frozen=True, slots=True, eq=False)
class GeneTable:
    """Genes, and the cells that have them.

    Parameters
    ----------
    rows
        The first of these cells, and the one after the last.
    var
        A row for each gene.
    """

    rows: tuple[int, int]
    var: pd.DataFrame


def gene_tables(folder: Location, n_rows: int) -> list[GeneTable]:
    """Return the tables of genes of a folder; those beside each other that are equal are one.

    Raises
    ------
    FormatError
        There is none, or they are not of the cells of the folder.
    """
    where = next(
        (Path(folder, n) for n in ("var_features", "features") if Path(folder, n).is_dir()), None
    )
    if where is None:
        msg = f"{folder}: has no `var_features`, so that the number of genes is not known"
        raise FormatError(f"{msg}; save it with `SingleCellMemMapDataset.save`")
    bounds = np.maximum(np.load(where / "cumulative_sum_index.npy"), 0).tolist()
    files = _parquet_files(where)
    if len(files) != len(bounds) - 1 or bounds[-1] != n_rows:
        msg = (
            f"{folder}: `{where.name}` has {len(files)} tables, of {bounds[-1]} cells, not {n_rows}"
        )
        raise FormatError(f"{msg}; write the folder again")
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
    """Return the names of genes, None if no column has them."""
    column = next((name for name in _NAMES if name in var), None)
    return None if column is None else var[column].astype(str).to_numpy(object)


class ScdlObs:
    """The obs columns of a folder.

    Parameters
    ----------
    folder
        The folder.
    rows
        The first of its cells, and the one after the last.
    """

    def __init__(self, folder: Location, rows: tuple[int, int]) -> None:
        self._folder, self._rows = folder, rows

    def names(self) -> list[str]:
        """Return the names of all columns."""
        files = _parquet_files(Path(self._folder, "obs_features"))
        if not files:
            return []
        arrow = import_arrow(self._folder, "scdl")
        schemas = [arrow.parquet.read_schema(file) for file in files]
        return list(dict.fromkeys(name for schema in schemas for name in schema.names))

    def read(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns; what a part of the cells lacks is missing."""
        arrow = import_arrow(self._folder, "scdl")
        files = _parquet_files(Path(self._folder, "obs_features"))
        parts = [_read(arrow, file, columns) for file in files]
        table = arrow.concat_tables(parts, promote_options="permissive").select(list(columns))
        first, stop = self._rows
        if len(table) < stop:
            msg = f"{self._folder}: `obs_features` has {len(table)} rows, and not {stop}"
            raise FormatError(f"{msg}; write the folder again")
        return to_frame(table.slice(first, stop - first))


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def _read(arrow: Any, file: Path, columns: Sequence[str] | None) -> Any:
    there = arrow.parquet.read_schema(file).names
    wanted = None if columns is None else [name for name in columns if name in there]
    try:
        table = arrow.parquet.ParquetFile(file).read(columns=wanted)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise FormatError(f"{file}: cannot be read ({said}); copy it again") from error
    if columns is not None and not wanted:  # so that it keeps its rows
        n_rows = arrow.parquet.read_metadata(file).num_rows
        return arrow.table({columns[0]: arrow.nulls(n_rows)})
    return table
