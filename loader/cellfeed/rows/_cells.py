"""Cells of a collection in NumPy and SciPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from cellfeed.rows._arrays import ByElement, CsrRows, refuse_element

if TYPE_CHECKING:
    from cellfeed.rows._minibatch import Minibatch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cells(ByElement):
    """Cells of a collection in NumPy and SciPy, as ``fetch_transform`` gets and may return them.

    ``cells[indices]`` selects cells from all parts, with their controls and neighbours;
    ``cells["layers/counts"]`` is an element.

    Parameters
    ----------
    elements
        SciPy CSR arrays or NumPy arrays by name, such as ``"X"``, in the order of the collection.
        Each has shape (n_cells, n_columns), or more dimensions if it is stored with more. The first
        is ``cells.X``.
    obs
        One array for each obs column of the collection, shape (n_cells,): codes (-1 where
        missing) of a categorical column, numbers of a numeric one.
    rows
        Row of each cell in the collection, int64, shape (n_cells,).
    obs_names
        Name of each cell in its source, str, shape (n_cells,); None unless the collection was
        opened with ``obs_names=True``.
    controls
        The controls of a minibatch's cells, the same number for each cell, in their order; None
        unless the strategy is `MatchedControls`.
    neighbors
        Their neighbours, in the same way; None unless the strategy is
        `cellfeed.spatial.WithNeighbors`.
    """

    elements: Mapping[str, Any]
    obs: Mapping[str, NDArray[Any]]
    rows: NDArray[np.int64]
    obs_names: NDArray[Any] | None = None
    controls: Cells | None = None
    neighbors: Cells | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, which: str) -> Any: ...

    @overload
    def __getitem__(self, which: NDArray[np.intp]) -> Cells: ...

    def __getitem__(self, which: str | NDArray[np.intp]) -> Any:
        if isinstance(which, str | int):
            return self.elements[which] if which in self else refuse_element(which, self.keys())
        elements = {name: each[which] for name, each in self.elements.items()}
        obs = {name: values[which] for name, values in self.obs.items()}
        names = None if self.obs_names is None else self.obs_names[which]
        others = {
            name: each[self._rows_of_others(which, each)] for name, each in self.others.items()
        }
        return Cells(elements, obs, self.rows[which], names, **others)

    def _rows_of_others(self, which: NDArray[np.intp], others: Cells) -> NDArray[np.intp]:
        n_each = len(others) // max(1, len(self))
        first = np.arange(len(self))[which] * n_each
        return (first[:, None] + np.arange(n_each)).ravel()

    def to_scipy(self) -> Cells:
        """Return the same cells with elements as SciPy or NumPy arrays."""
        elements = {
            name: each.to_scipy() if isinstance(each, CsrRows) else each
            for name, each in self.elements.items()
        }
        others = {name: each.to_scipy() for name, each in self.others.items()}
        return Cells(elements, self.obs, self.rows, self.obs_names, **others)

    def to_torch(self, *, dense: bool = False) -> Minibatch:
        """Return the same cells as tensors, which share memory with the arrays where possible.

        Parameters
        ----------
        dense
            Whether to make sparse elements dense.

        Raises
        ------
        ParameterError
            An element has the dtype longdouble, which torch lacks.
        ColumnError
            An obs column has numbers above the largest int64.
        ImportError
            torch is not installed.
        """
        from cellfeed.rows._minibatch import minibatch_of  # noqa: PLC0415 - it imports torch

        made = minibatch_of(self.elements, self.obs, self.rows, self.obs_names, dense=dense)
        others = {name: each.to_torch(dense=dense) for name, each in self.others.items()}
        return replace(made, **others) if others else made
