"""Values of cells that a strategy gets: of all rows, of its ``indices``, or of obs columns."""

from dataclasses import replace as changed
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.extending import ParameterError
from cellfeed.sampling import SamplingStrategy, column_of, combined_codes, label_codes, n_available


def sorted_with(indices: ArrayLike | None, values: NDArray[Any]) -> NDArray[Any]:
    """Return values in the order of `sorted_indices` if there is one for each index."""
    given = None if indices is None else np.asarray(indices)
    if given is None or given.shape != values.shape or not np.any(given[1:] < given[:-1]):
        return values
    in_order: NDArray[Any] = values[np.argsort(given, kind="stable")]
    return in_order


def of_cells(values: NDArray[Any], indices: ArrayLike | None, name: str) -> NDArray[Any]:
    """Return the values of the cells to visit, given those of all rows or of these cells.

    Raises
    ------
    ParameterError
        There are fewer values than the largest index requires.
    """
    if indices is None or np.size(indices) == values.size:
        return values
    rows: NDArray[np.int64] = np.asarray(indices)
    if rows[-1] >= values.size:
        msg = (
            f"`{name}` must have one value for each row of the collection, or for each of "
            f"`indices` ({rows.size:,}), but got {values.size:,} and an index {rows[-1]:,}"
        )
        raise ParameterError(msg)
    return values[rows]


def require_length(name: str, n: int, indices: ArrayLike | None, n_rows: int) -> None:
    """Check that there are as many values as rows or indices.

    Raises
    ------
    ParameterError
        The numbers differ.
    """
    if n == n_rows or (indices is not None and np.size(indices) == n):
        return
    among_them = "" if indices is None else f", or for each of `indices` ({np.size(indices):,})"
    msg = (
        f"`{name}` must have one value for each row of the collection ({n_rows:,}){among_them}, "
        f"but got {n:,}"
    )
    raise ParameterError(msg)


class LabelledCells(SamplingStrategy):
    """Base class of strategies with labels, which may be names of obs columns until it is bound."""

    labels: ArrayLike | str | tuple[str, ...]
    indices: ArrayLike | None

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of obs columns, one or several; none if labels are given or read."""
        if isinstance(self.labels, str):
            return (self.labels,)
        is_names = isinstance(self.labels, tuple) and all(isinstance(k, str) for k in self.labels)
        return cast(tuple[str, ...], self.labels) if is_names else ()

    @property
    def codes(self) -> NDArray[np.signedinteger[Any]]:
        """The code of each label, -1 if it is missing.

        Raises
        ------
        ParameterError
            They are those of obs columns that are not read yet.
        """
        if self.column_names:
            msg = (
                f"`labels` is the name {self.labels!r}, whose column is not read yet; pass the "
                "strategy to a CellDataset, or call bound_to(collection)"
            )
            raise ParameterError(msg)
        return np.asarray(self.labels)

    def codes_of_cells(self) -> NDArray[np.signedinteger[Any]]:
        """Return the codes of the cells to visit, at least one of which has a label.

        Raises
        ------
        ParameterError
            None has a label, or there are too few codes.
        """
        codes = of_cells(self.codes, self.indices, "labels")
        if codes.max() < 0:
            msg = (
                f"`labels` leave nothing to visit, since none of {codes.size:,} cells has a "
                "label; give some labels"
            )
            raise ParameterError(msg)
        return codes

    def bound_to(self, collection: Any) -> Self:
        """Return the strategy with the labels of the obs columns that ``labels`` names."""
        names = self.column_names
        if not names:
            return self
        codes = combined_codes([label_codes(column_of(collection, name)) for name in names])
        if self.indices is not None:
            n_available(self.indices, codes.size)
            codes = codes[np.asarray(self.indices)]
        bound: Self = changed(cast(Any, self), labels=codes)
        return bound
