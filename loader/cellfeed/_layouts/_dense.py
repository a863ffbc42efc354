"""Dense rows in memory: where each row goes, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import Buffer, bind, destination
from cellfeed._chunks import place_elements
from cellfeed._layouts._copies import Copies, first_deliveries

__all__ = ["DenseGroup", "DenseTarget", "dense_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTarget:
    """Destinations of dense rows.

    ``target[first:stop]`` or ``target[numbers]`` are the destinations of some of the rows.

    Parameters
    ----------
    n_vars
        Number of genes: elements of a row, which lie together.
    destinations
        Where each row begins, int64, shape (n_rows,): destinations, or addresses once the target is
        bound.
    dtype
        Dtype there.
    """

    n_vars: int
    destinations: NDArray[np.int64]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.destinations)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "DenseTarget":
        return replace(self, destinations=self.destinations[rows])

    def bound(self, bases: NDArray[np.int64]) -> "DenseTarget":
        """Return the same target in memory whose groups begin at ``bases``."""
        return replace(self, destinations=bind(self.destinations, bases))

    def put(self, rows: NDArray[Any]) -> None:
        """Place all rows.

        Parameters
        ----------
        rows
            Shape (n_rows, n_vars), of any numeric dtype; cast as NumPy does.

        Raises
        ------
        ValueError
            The shape is not that of the target.
        """
        if rows.shape != (len(self), self.n_vars):
            msg = f"rows of shape {(len(self), self.n_vars)} expected, but got {rows.shape}"
            raise ValueError(msg)
        lengths = np.full(len(self), self.n_vars, np.int64)
        starts = np.cumsum(lengths) - lengths
        place_elements(rows.reshape(-1), starts, lengths, self.destinations, self.dtype)


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Dense rows, one after the other.

    Parameters
    ----------
    n_rows, n_vars
        Cells and genes.
    dtype
        Dtype of the values.
    row_shape
        Shape of a row whose elements are no list of ``n_vars``.
    """

    n_rows: int
    n_vars: int
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...] | None = None

    @property
    def n_bytes(self) -> int:
        """Memory that is needed."""
        return self.n_rows * self.n_vars * self.dtype.itemsize

    def over(self, buffer: Buffer) -> NDArray[Any]:
        """Return the rows that memory of at least `n_bytes` holds."""
        row_shape = (self.n_vars,) if self.row_shape is None else self.row_shape
        return buffer.array(self.dtype, self.n_rows * self.n_vars).reshape(self.n_rows, *row_shape)


def dense_groups(
    n_distinct: int,
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    n_vars: int,
    dtype: np.dtype[Any],
    first_number: int = 0,
    row_shape: tuple[int, ...] | None = None,
) -> tuple[Sequence[DenseGroup], DenseTarget, Sequence[Copies]]:
    """Lay out dense rows; see `csr_groups` and `DenseGroup`."""
    row_bytes = n_vars * dtype.itemsize
    counts = np.diff(bounds)
    groups = [DenseGroup(n_rows, n_vars, dtype, row_shape) for n_rows in counts.tolist()]
    numbers = np.repeat(np.arange(len(groups)), counts)
    offsets = (np.arange(order.size) - bounds[numbers]) * row_bytes
    destinations = destination(numbers + first_number, offsets)
    first, again = first_deliveries(order, n_distinct)
    target = DenseTarget(n_vars=n_vars, destinations=destinations[first], dtype=dtype)
    sizes = np.full(again.size, row_bytes, np.int64)
    return groups, target, [Copies(destinations[first[order[again]]], destinations[again], sizes)]
