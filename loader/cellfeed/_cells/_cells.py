"""Cells of a collection in NumPy and SciPy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells._by_element import ByElement
from cellfeed._cells._csr_rows import CsrRows

if TYPE_CHECKING:
    from cellfeed._cells._minibatch import Minibatch

__all__ = ["Cells"]


@dataclass(frozen=True, slots=True, eq=False)
class Cells(ByElement):
    """Some cells of a collection, in NumPy: what ``fetch_transform`` gets and may replace.

    ``cells[indices]`` selects cells from all parts at once, ``cells["layers/counts"]`` is an
    element.

    Parameters
    ----------
    elements
        By name, such as ``"X"``, in the order of the collection, each of shape
        (n_cells, n_columns), or of more dimensions as it is stored: SciPy CSR arrays or NumPy
        arrays. The first is ``cells.X``.
    obs
        One array for each obs column of the collection, shape (n_cells,): codes (-1 where
        missing) of a categorical column, numbers of a numeric one.
    rows
        Row of each cell in the collection, int64, shape (n_cells,).
    """

    elements: Mapping[str, Any]
    obs: Mapping[str, NDArray[Any]]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, which: str) -> Any: ...

    @overload
    def __getitem__(self, which: NDArray[np.intp]) -> "Cells": ...

    def __getitem__(self, which: str | NDArray[np.intp]) -> Any:
        if isinstance(which, str):
            return self.elements[which]
        elements = {name: each[which] for name, each in self.elements.items()}
        obs = {name: values[which] for name, values in self.obs.items()}
        return Cells(elements, obs, self.rows[which])

    def to_scipy(self) -> "Cells":
        """Return the same cells with elements as SciPy or NumPy has them."""
        elements = {
            name: each.to_scipy() if isinstance(each, CsrRows) else each
            for name, each in self.elements.items()
        }
        return Cells(elements, self.obs, self.rows)

    def to_torch(self, *, dense: bool = False) -> "Minibatch":
        """Return the same cells as tensors, over the same memory where possible.

        Parameters
        ----------
        dense
            Whether elements are made dense that are sparse.

        Raises
        ------
        ParameterError
            An element has a dtype that torch has not, which is longdouble.
        ColumnError
            An obs column has numbers above the largest int64.
        ImportError
            torch is not installed.
        """
        from cellfeed._cells._minibatch import minibatch_of  # noqa: PLC0415 - it imports torch

        return minibatch_of(self.elements, self.obs, self.rows, dense=dense)
