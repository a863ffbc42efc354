"""Whether cells that a loader delivered are those of the files, value by value."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import CategoricalColumn, Collection, NumericColumn
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._labels import label_name
from cellfeed_tuner._measuring._sampled_cells import DeliveredCell
from cellfeed_tuner._measuring._stored_cells import StoredCells

__all__ = ["Comparison", "compare_with_files"]

# What is compared, at most: it is bounded however slow the storage is.
_MOST_CELLS = 128

_Sampled = tuple[Configuration, DeliveredCell]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it.

    Parameters
    ----------
    n_cells
        Cells that were compared.
    faults
        For each configuration with a cell that is not that of the files, how it is not.
    """

    n_cells: int = 0
    faults: Mapping[Configuration, str] = field(default_factory=dict)


def compare_with_files(
    collection: Collection,
    sampled: Mapping[Configuration, Sequence[DeliveredCell]],
    *,
    most_seconds: float = 2.0,
) -> Comparison:
    """Read some delivered cells once more, without cellfeed, and compare all that they have.

    Parameters
    ----------
    collection
        What they were read from.
    sampled
        Cells of each configuration; of the last one, all are compared if time allows.
    most_seconds
        After that, no further cell is begun; the first always is.
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


def _in_order(sampled: Mapping[Configuration, Sequence[DeliveredCell]]) -> Iterator[_Sampled]:
    """Yield one cell of each configuration, the rest of the last one's, and then the others'."""
    lists = [[(each, cell) for cell in cells] for each, cells in sampled.items()][::-1]
    for cells in lists:
        yield from cells[:1]
    if lists:
        yield from lists[0][1:]
    longest = max(map(len, lists), default=0)
    for number in range(1, longest):
        for cells in lists[1:]:
            yield from cells[number : number + 1]


def _fault(collection: Collection, stored: StoredCells, cell: DeliveredCell) -> str:
    """Return how a cell differs from the file, in words; empty if it does not."""
    for name, value in cell.labels.items():
        found, expected = _labels(collection.obs[name], value, stored.label(cell.row, name))
        if found != expected:
            return _differs(stored, cell.row, f"{name} {_said(found)}", _said(expected))
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


def _said(label: Any) -> str:
    return "missing" if label is None else str(label)


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
