"""Whether cells that a loader delivered are those of the files, value by value."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import CategoricalColumn, Collection, NumericColumn
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._delivery import DeliveredCell
from cellfeed_tuner._measuring._stored_cells import StoredCells
from cellfeed_tuner._subject._labels import label_name, label_text

__all__ = ["Comparison", "compare_with_files"]

# What is compared, at most: it is bounded however slow the storage is.
_MOST_CELLS = 128


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many cells were compared; and how one is not that of the files, by configuration."""

    n_cells: int = 0
    faults: Mapping[Configuration, str] = field(default_factory=dict)


def compare_with_files(
    collection: Collection,
    sampled: Mapping[Configuration, Sequence[DeliveredCell]],
    *,
    most_seconds: float = 2.0,
) -> Comparison:
    """Read some delivered cells once more, without cellfeed, and compare all that they have.

    One of each configuration, and as many more of the last one, and then of the others, as
    ``most_seconds`` allow; the first cell is always compared.
    """
    n_cells, faults = 0, dict[Configuration, str]()
    deadline = time.perf_counter() + most_seconds
    with StoredCells(collection) as stored:
        for configuration, cell in _in_order(sampled):
            if n_cells == _MOST_CELLS or (n_cells and time.perf_counter() > deadline):
                break
            if configuration in faults:
                continue
            try:
                fault = _fault(collection, stored, cell)
            except (OSError, KeyError, ValueError, RuntimeError, TypeError):
                continue  # such as a filter that h5py lacks: that is no fault of the loader
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


def _fault(collection: Collection, stored: StoredCells, cell: DeliveredCell) -> str:
    """Return how a cell differs from the file, in words; empty if it does not."""
    for name, value in cell.labels.items():
        found, expected = _labels(collection.obs[name], value, stored.label(cell.row, name))
        if found != expected:
            return _differs(stored, cell.row, f"{name} {label_text(found)}", label_text(expected))
    if cell.n_vars != collection.n_vars:
        return f"cell {cell.row} has {cell.n_vars} genes in place of {collection.n_vars}"
    columns = cell.columns
    if columns is not None and not np.all((columns >= 0) & (columns < cell.n_vars)):
        return f"cell {cell.row} has values of genes beyond the {cell.n_vars} that there are"
    delivered, read = cell.expression, stored.expression(cell.row, cell.values.dtype)
    wrong = _wrong_columns(delivered, read)
    if not wrong.size:
        return ""
    gene = int(wrong[0])
    others = f" (and {wrong.size - 1:,} other genes differ)" if wrong.size > 1 else ""
    names = collection.var_names  # of images, not of each value
    what = f"gene {names[gene]!r}" if len(names) == cell.n_vars else f"value {gene}"
    has = f"{delivered[gene]} of {what}"
    return _differs(stored, cell.row, has, f"{read[gene]}{others}")


def _labels(
    column: CategoricalColumn | NumericColumn, delivered: Any, read: Any
) -> tuple[Any, Any]:
    """Return a label as it was delivered, and as it was read, so that they can be compared."""
    if read is not None and isinstance(column, NumericColumn):
        read = column.values.dtype.type(read)
    return label_name(column, delivered), read


def _differs(stored: StoredCells, row: int, delivered: str, read: str) -> str:
    path = stored.path(row)
    library = "zarr" if path.is_dir() else "h5py"
    return f"cell {row} has {delivered} where {path}, read through {library}, has {read}"


def _wrong_columns(delivered: NDArray[Any], read: NDArray[Any]) -> NDArray[np.intp]:
    """Return columns whose values differ by more than rounding, which sums may do."""
    if read.dtype.kind != "f":
        return np.flatnonzero(delivered != read)
    rounding = 4 * float(np.finfo(read.dtype).eps)
    return np.flatnonzero(~np.isclose(delivered, read, rtol=rounding, atol=0, equal_nan=True))
