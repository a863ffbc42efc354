"""Rows of different lengths in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._runs import expand

__all__ = ["RaggedRows"]


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """Rows of different lengths: their concatenated values, and the offset of each row.

    ``rows[indices]`` selects rows, in the given order, and ``rows.row(k)`` is a single row.

    Parameters
    ----------
    offsets
        Start of each row in ``values``, and the end of the last; ascending from 0, int64, shape
        (n_rows + 1,).
    values
        Values of all rows, shape (n_values,); the dtype may be structured.

    Examples
    --------
    >>> rows = RaggedRows(np.array([0, 2, 2, 5]), np.arange(5))
    >>> rows.lengths
    array([2, 0, 3])
    >>> rows[np.array([2, 0])].row(0)
    array([2, 3, 4])
    >>> rows.padded(-1)
    array([[ 0,  1, -1],
           [-1, -1, -1],
           [ 2,  3,  4]])
    """

    offsets: NDArray[np.int64]
    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: NDArray[np.integer]) -> "RaggedRows":
        numbers = np.arange(len(self))[rows]
        runs = np.stack([self.offsets[numbers], self.offsets[numbers + 1]], axis=1)
        offsets = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
        return RaggedRows(offsets, self.values[expand(runs)])

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows."""
        return (len(self),)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of values of each row, int64, shape (n_rows,)."""
        return np.diff(self.offsets)

    def row(self, k: int) -> NDArray[Any]:
        """Return the values of one row."""
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    def padded(self, fill: Any = 0) -> NDArray[Any]:
        """Return the rows as an array as wide as the longest, shape (n_rows, longest).

        Parameters
        ----------
        fill
            Value of the padding after the end of a row.
        """
        lengths = self.lengths
        width = int(lengths.max(initial=0))
        out = np.full((len(self), width), fill, self.dtype)
        out[np.arange(width) < lengths[:, None]] = self.values
        return out
