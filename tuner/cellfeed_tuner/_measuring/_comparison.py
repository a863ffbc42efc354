"""Whether delivered cells equal those in the files, value by value.

The files are read through h5py, zarr and anndata, and through nothing of cellfeed's, so that both
readers cannot make the same mistake. Of matrices, single rows are read; of obs, whole columns.
These libraries are imported when something is compared, since that takes seconds.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed import Collection, NumericColumn
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._subject import label_name, label_text

# At most so many cells are compared, however slow the storage is.
_MOST_CELLS = 128


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many cells were compared, and, by configuration, how one differs from its file."""

    n_cells: int = 0
    faults: Mapping[Configuration, str] = field(default_factory=dict)


def compare_with_files(
    collection: Collection,
    sampled: Mapping[Configuration, Sequence[DeliveredCell]],
    *,
    most_seconds: float = 2.0,
) -> Comparison:
    """Read some delivered cells again, without cellfeed, and compare their values and labels.

    One cell of each configuration, then the rest of the last configuration's, then the others',
    for as long as ``most_seconds`` allow. The first cell is always compared.
    """
    n_cells, faults = 0, dict[Configuration, str]()
    deadline = time.perf_counter() + most_seconds
    ends = np.cumsum(collection.cells_per_location)
    with ExitStack() as opened:
        files = cache(lambda number: _StoredFile(collection, number, opened))
        for configuration, cell in _in_order(sampled):
            if n_cells == _MOST_CELLS or (n_cells and time.perf_counter() > deadline):
                break
            if configuration in faults:
                continue
            number = int(np.searchsorted(ends, cell.row, side="right"))
            row_in_file = cell.row - int(ends[number - 1]) * (number > 0)
            try:
                fault = _fault(collection, files(number), row_in_file, cell)
            except (OSError, KeyError, ValueError, RuntimeError, TypeError):
                continue  # h5py may lack a filter, which is no fault of the loader
            n_cells += 1
            if fault:
                faults[configuration] = fault
    return Comparison(n_cells, faults)


def _in_order(
    sampled: Mapping[Configuration, Sequence[DeliveredCell]],
) -> list[tuple[Configuration, DeliveredCell]]:
    """Return one cell of each configuration, the rest of the last one's, and then the others'."""
    lists = [[(each, cell) for cell in cells] for each, cells in sampled.items()][::-1]
    first = [cells[0] for cells in lists if cells]
    more_of_last = [cell for cells in lists[:1] for cell in cells[1:]]
    in_turns = zip_longest(*(cells[1:] for cells in lists[1:]))
    more_of_others = [cell for turn in in_turns for cell in turn if cell is not None]
    return first + more_of_last + more_of_others


class _StoredFile:
    """One location of a collection; groups and arrays of h5py and zarr have the same form."""

    def __init__(self, collection: Collection, number: int, opened: ExitStack) -> None:
        self._path = Path(collection.locations[number])
        import h5py  # noqa: PLC0415
        import zarr  # noqa: PLC0415

        is_zarr = self._path.is_dir()
        self._library = "zarr" if is_zarr else "h5py"
        self._root: Any = (
            zarr.open_group(self._path, mode="r")
            if is_zarr
            else opened.enter_context(h5py.File(self._path, "r"))
        )
        element = next(iter(collection.elements.values()))
        self._name, self._n_vars = element.stored_as[number], collection.n_vars
        self._map = element.column_maps[number].columns if element.column_maps else None
        self._column, self._old_obs = cache(self._read_column), cache(self._read_old_obs)

    def __str__(self) -> str:
        return f"{self._path}, read through {self._library},"

    def expression(self, row: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the value of each gene, shape (n_vars,), values of the same column summed."""
        if self._name.startswith("mod/"):
            row = self._row_in(self._name.split("/")[1], row)
        if self._map is None:
            return self._values(row, self._n_vars, dtype)
        joined = np.zeros(self._n_vars, dtype)
        is_kept = self._map >= 0
        joined[self._map[is_kept]] = self._values(row, len(self._map), dtype)[is_kept]
        return joined

    def label(self, row: int, name: str) -> Any:
        """Return the value of an obs column, None if it is missing."""
        modality, _, own_name = name.partition(":")
        group, obs = "obs", self._root["obs"]
        if f"mod/{modality}/obs" in self._root and name not in obs:
            group, name, row = f"mod/{modality}/obs", own_name, self._row_in(modality, row)
        elif obs.attrs.get("encoding-version") != "0.2.0":
            group = ""
        value = None if row < 0 else self._column(group, name).iloc[row]
        return None if pd.isna(value) else value

    def _values(self, row: int, n_columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return one row of the matrix, dense, flattened if it is an image."""
        stored = self._root[self._name]
        with np.errstate(over="ignore", invalid="ignore"):
            if hasattr(stored, "dtype"):
                values: NDArray[Any] = np.asarray(stored[row : row + 1]).reshape(-1).astype(dtype)
                return values
            if "column-order" in stored.attrs:
                names = stored.attrs["column-order"]
                found = [self._column(self._name, each).iloc[row] for each in names]
                return np.array([np.nan if pd.isna(each) else each for each in found]).astype(dtype)
            start, stop = np.asarray(stored["indptr"][row : row + 2]).tolist()
            dense = np.zeros(n_columns, dtype)
            columns = np.asarray(stored["indices"][start:stop]).astype(np.int64)
            np.add.at(dense, columns, np.asarray(stored["data"][start:stop]).astype(dtype))
        return dense

    def _row_in(self, modality: str, row: int) -> int:
        """Return the row of a cell in a modality of MuData, -1 if it has none."""
        return int(self._root[f"obsmap/{modality}"][row : row + 1][0]) - 1

    def _read_column(self, group: str, name: str) -> "pd.Series[Any]":
        from anndata.io import read_elem  # noqa: PLC0415

        if not group:
            return self._old_obs()[name]
        return pd.Series(read_elem(self._root[group][name]))

    def _read_old_obs(self) -> pd.DataFrame:
        """Return obs in a form that anndata no longer writes."""
        import anndata as ad  # noqa: PLC0415
        from anndata.io import read_elem  # noqa: PLC0415

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old files
            if self._library == "zarr":
                frame: pd.DataFrame = read_elem(self._root["obs"])
            else:
                adata = ad.read_h5ad(self._path, backed="r")
                frame = adata.obs
                adata.file.close()
        return frame


def _fault(collection: Collection, file: _StoredFile, row_in_file: int, cell: DeliveredCell) -> str:
    """Return how a cell differs from the file, in words; empty if it does not."""
    for name, value in cell.labels.items():
        column = collection.obs[name]
        found, expected = label_name(column, value), file.label(row_in_file, name)
        if expected is not None and isinstance(column, NumericColumn):
            expected = column.values.dtype.type(expected)  # noqa: PD011 - not of pandas
        if found != expected:
            return (
                f"cell {cell.row} has {name} {label_text(found)} where {file} has "
                f"{label_text(expected)}"
            )
    if cell.n_vars != collection.n_vars:
        return f"cell {cell.row} has {cell.n_vars} genes in place of {collection.n_vars}"
    columns = cell.columns
    if columns is not None and not np.all((columns >= 0) & (columns < cell.n_vars)):
        return f"cell {cell.row} has values of genes beyond the {cell.n_vars} that there are"
    delivered = cell.expression
    stored = file.expression(row_in_file, delivered.dtype)
    wrong = _wrong_columns(delivered, stored)
    if not wrong.size:
        return ""
    gene = int(wrong[0])
    names = collection.var_names  # images have none for each value
    what = f"gene {names[gene]!r}" if len(names) == cell.n_vars else f"value {gene}"
    others = f" (and {wrong.size - 1:,} other genes differ)" if wrong.size > 1 else ""
    return (
        f"cell {cell.row} has {delivered[gene]} of {what} where {file} has {stored[gene]}{others}"
    )


def _wrong_columns(delivered: NDArray[Any], stored: NDArray[Any]) -> NDArray[np.intp]:
    """Return the columns whose values differ by more than the rounding of sums."""
    if stored.dtype.kind != "f":
        return np.flatnonzero(delivered != stored)
    rounding = 4 * float(np.finfo(stored.dtype).eps)
    return np.flatnonzero(~np.isclose(delivered, stored, rtol=rounding, atol=0, equal_nan=True))
