"""Whether a loader delivers the rows of its plan, with the labels and values of these rows."""

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from cellfeed import (
    CategoricalColumn,
    Collection,
    EpochPlan,
    Minibatch,
    NumericColumn,
    ParameterError,
)
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._subject import codes_of, label_name, label_text

# Limits of sampled cells, which are sent to another process.
_MOST_BYTES, _MOST_CELLS, _LEAST_CELLS = 1 << 20, 64, 2


@dataclass(slots=True)
class Delivered:
    """Rows and labels (obs columns) of all minibatches, None for an absent label.

    Of the last minibatch, everything.
    """

    names: Sequence[str]
    rows: list[NDArray[np.int64]] = field(default_factory=list, init=False)
    labels: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    last: Minibatch | None = field(default=None, init=False)

    def take(self, minibatch: Minibatch | None) -> None:
        """Keep rows and labels of a minibatch; None stands for a missing one."""
        if minibatch is None:
            self.rows.append(np.empty(0, dtype=np.int64))
            self.labels.append((np.empty(0, dtype=np.int64),) * len(self.names))
            return
        if not hasattr(minibatch, "rows"):
            msg = (
                f"the loader delivers {type(minibatch).__name__}, which cannot be checked; tune "
                "without `batch_transform`, and call it in `step`"
            )
            raise ParameterError(msg)
        self.last = minibatch
        self.rows.append(minibatch.rows.numpy())
        self.labels.append(tuple(minibatch.obs.get(name) for name in self.names))

    def codes(self, collection: Collection) -> dict[str, NDArray[np.integer]]:
        """Return codes of each label as delivered, shape (n_minibatches, batch_size).

        Empty if minibatches lack labels or differ in size.
        """
        found = dict[str, NDArray[np.integer]]()
        for place, name in enumerate(self.names):
            values = [each[place] for each in self.labels]
            if not values or any(each is None or each.shape != values[0].shape for each in values):
                return {}
            found[name] = codes_of(collection.obs[name], np.stack(values))
        return found

    def fault(self, collection: Collection, configuration: Configuration, plan: EpochPlan) -> str:
        """Return the first minibatch with wrong rows or labels, in words, or an empty text."""
        fault = delivery_fault(self.rows, configuration, plan)
        if fault:
            return fault
        for number, (rows, labels) in enumerate(zip(self.rows, self.labels, strict=True)):
            for name, came in zip(self.names, labels, strict=True):
                wrong = _wrong_label(collection.obs[name], rows, came)
                if wrong:
                    return f"{_named(number, configuration, plan)} has {name} {wrong}"
        if self.last is not None and len(self.last.X) != len(self.last.rows):
            named = _named(len(self.rows) - 1, configuration, plan)
            return f"{named} has expression of {len(self.last.X)} cells for {len(self.last.rows)}"
        return ""


def planned_round(plan: EpochPlan, configuration: Configuration, number: int) -> NDArray[np.int64]:
    """Return the rows of one round's minibatches in order, shape (n_minibatches, batch_size)."""
    n = configuration.fetches_per_round
    return plan.delivered_rows(number * n, n).reshape(-1, plan.batch_size)


def delivery_fault(
    rows: Sequence[NDArray[np.int64]], configuration: Configuration, plan: EpochPlan
) -> str:
    """Return the first minibatch that differs from the plan, in words; empty if none does.

    ``rows`` are the rows of each minibatch in the order of delivery: all whole rounds of the first
    epoch, whose plan is ``plan``, then of the next epoch, and so on.
    """
    per_round = configuration.minibatches_per_round
    n_rounds = configuration.rounds_per_epoch(plan)
    for start in range(0, len(rows), per_round):
        epochs, number = divmod(start // per_round, n_rounds)
        planned = planned_round(replace(plan, epoch=plan.epoch + epochs), configuration, number)
        came = rows[start : start + per_round]
        for place, (found, expected) in enumerate(zip(came, planned[: len(came)], strict=True)):
            if not np.array_equal(found, expected):
                named = _named(start + place, configuration, plan)
                return f"{named} {_difference(found, expected)}"
    return ""


def _named(number: int, configuration: Configuration, plan: EpochPlan) -> str:
    """Return a name for the minibatch that came after so many others."""
    per_epoch = configuration.rounds_per_epoch(plan) * configuration.minibatches_per_round
    epochs, number_in_epoch = divmod(number, per_epoch)
    return f"minibatch {number_in_epoch} of epoch {plan.epoch + epochs}"


def _difference(came: NDArray[np.int64], planned: NDArray[np.int64]) -> str:
    if came.size != planned.size:
        return f"has {came.size} cells in place of {planned.size}"
    place = int(np.argmax(came != planned))
    return f"has cell {came[place]} where the plan has {planned[place]}"


def _wrong_label(
    column: CategoricalColumn | NumericColumn, rows: NDArray[np.int64], came: Any
) -> str:
    """Return the first label that differs from its row's, in words; empty if none does."""
    if came is None:
        return "for no cell: the column is absent"
    values, expected = np.asarray(came), column.values[rows]  # noqa: PD011 - not of pandas
    if values.shape != expected.shape:
        return f"for {values.size} cells in place of {rows.size}"
    # A missing number is NaN, which is not equal to itself.
    missing = (values != values) & (expected != expected)  # noqa: PLR0124
    wrong = np.flatnonzero((values != expected) & ~missing)
    if not wrong.size:
        return ""
    first = wrong[0]
    found, right = (
        label_text(label_name(column, each[first].item())) for each in (values, expected)
    )
    return f"{found} for cell {rows[first]}, which has {right}"


@dataclass(frozen=True, slots=True, eq=False)
class DeliveredCell:
    """One cell of a minibatch.

    ``columns`` are the columns of its ``values``; None if all ``n_vars`` columns have a value.
    ``labels`` are codes or numbers of obs columns.
    """

    row: int
    columns: NDArray[np.integer] | None
    values: NDArray[Any]
    n_vars: int
    labels: Mapping[str, Any]

    @property
    def expression(self) -> NDArray[Any]:
        """The value of each gene, shape (n_vars,)."""
        if self.columns is None:
            return self.values
        dense = np.zeros(self.n_vars, self.values.dtype)
        np.add.at(dense, self.columns, self.values)
        return dense


def sampled_cells(
    minibatch: Minibatch, labels: Sequence[str], *, seed: int
) -> tuple[DeliveredCell, ...]:
    """Return the first and the last cell of a minibatch, and more in random order.

    All of them if they are few and small.
    """
    rows, X = minibatch.rows.numpy(), minibatch.X
    is_sparse = X.layout == torch.sparse_csr
    parts = (X.crow_indices(), X.col_indices(), X.values()) if is_sparse else (X,)
    n_fitting = _MOST_BYTES * len(rows) // max(1, sum(part.nbytes for part in parts))
    n = min(_MOST_CELLS, max(_LEAST_CELLS, n_fitting))
    inner = 1 + np.random.default_rng(seed).permutation(max(0, len(rows) - 2))
    places = dict.fromkeys([0, len(rows) - 1, *inner.tolist()] if len(rows) else [])
    cells = list[DeliveredCell]()
    for place in list(places)[:n]:
        columns = None
        if is_sparse:
            indptr, indices, data = (part.numpy() for part in parts)
            inside = slice(int(indptr[place]), int(indptr[place + 1]))
            columns, values = indices[inside].copy(), data[inside].copy()
        else:
            values = X[place].reshape(-1).numpy().copy()
        of_cell = {
            name: minibatch.obs[name][place].item() for name in labels if name in minibatch.obs
        }
        cells.append(DeliveredCell(int(rows[place]), columns, values, X.shape[1:].numel(), of_cell))
    return tuple(cells)


# Whether delivered cells equal those in the files, value by value.
#
# The files are read through h5py, zarr and anndata, and through nothing of cellfeed's, so that both
# readers cannot make the same mistake. Of matrices, single rows are read; of obs, whole columns.
# These libraries are imported when something is compared, since that takes seconds.

# At most so many cells are compared, however slow the storage is.
_MOST_COMPARED = 128


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
            if n_cells == _MOST_COMPARED or (n_cells and time.perf_counter() > deadline):
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
        is_current = self._root["obs"].attrs.get("encoding-version") == "0.2.0"
        value = self._column("obs" if is_current else "", name).iloc[row]
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
        """Return the row of a cell in a modality of MuData."""
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
    wrong = np.flatnonzero(delivered != stored)
    if stored.dtype.kind == "f":  # but for the rounding of sums
        rounding = 4 * float(np.finfo(stored.dtype).eps)
        alike = np.isclose(delivered, stored, rtol=rounding, atol=0, equal_nan=True)
        wrong = np.flatnonzero(~alike)
    if not wrong.size:
        return ""
    gene = int(wrong[0])
    names = collection.var_names  # images have none for each value
    what = f"gene {names[gene]!r}" if len(names) == cell.n_vars else f"value {gene}"
    others = f" (and {wrong.size - 1:,} other genes differ)" if wrong.size > 1 else ""
    return (
        f"cell {cell.row} has {delivered[gene]} of {what} where {file} has {stored[gene]}{others}"
    )
