"""Where the rows that a source reads are to go: memory that its caller owns.

A source is given ascending row runs, and one place for each of their rows. The places are in
the order of delivery, so that what is read is shuffled by being written, once. A target is
planned with places (see `cellfeed._places`), and bound to memory when that is there.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import place_elements
from cellfeed._places import bind

__all__ = ["CsrTarget", "DenseTarget", "RowTarget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsrTarget:
    """Places for sparse rows.

    ``target[first:stop]`` are the places of some of the rows.

    Parameters
    ----------
    n_vars
        Number of genes; column indices are below it.
    lengths
        Elements of each row, int64, shape (n_rows,).
    index_places, data_places
        Where the column indices and the values of each row begin, int64: places, or addresses
        once the target is bound.
    index_dtype, dtype
        Dtypes there: int32 or int64, and that of the values.
    ordered
        One boolean, which `put` clears where the columns of a row do not ascend strictly.
    """

    n_vars: int
    lengths: NDArray[np.int64]
    index_places: NDArray[np.int64]
    data_places: NDArray[np.int64]
    index_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    ordered: NDArray[np.bool_] = field(default_factory=lambda: np.ones(1, np.bool_))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> "CsrTarget":
        return replace(
            self,
            lengths=self.lengths[rows],
            index_places=self.index_places[rows],
            data_places=self.data_places[rows],
        )

    def bound(self, bases: NDArray[np.int64]) -> "CsrTarget":
        """Return the same target in memory whose groups begin at ``bases``."""
        return replace(
            self,
            index_places=bind(self.index_places, bases),
            data_places=bind(self.data_places, bases),
            ordered=np.ones(1, np.bool_),
        )

    def put(self, indices: NDArray[Any], data: NDArray[Any]) -> None:
        """Place all rows, given one after the other, as a CSR matrix holds them.

        Parameters
        ----------
        indices, data
            Column indices and values, shape (sum of ``lengths``,), of any numeric dtype. Values
            are cast as NumPy does.

        Raises
        ------
        ValueError
            A column index is outside of [0, n_vars), or the sizes are not those announced.
        """
        starts = np.cumsum(self.lengths) - self.lengths
        ascending = place_elements(
            indices,
            starts,
            self.lengths,
            self.index_places,
            self.index_dtype,
            index_limit=self.n_vars,
        )
        place_elements(data, starts, self.lengths, self.data_places, self.dtype)
        if not ascending:
            self.ordered[0] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTarget:
    """Places for dense rows.

    ``target[first:stop]`` are the places of some of the rows.

    Parameters
    ----------
    n_vars
        Number of genes: elements of a row, which lie together.
    places
        Where each row begins, int64, shape (n_rows,): places, or addresses once the target is
        bound.
    dtype
        Dtype there.
    """

    n_vars: int
    places: NDArray[np.int64]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: slice) -> "DenseTarget":
        return replace(self, places=self.places[rows])

    def bound(self, bases: NDArray[np.int64]) -> "DenseTarget":
        """Return the same target in memory whose groups begin at ``bases``."""
        return replace(self, places=bind(self.places, bases))

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
        place_elements(rows.reshape(-1), starts, lengths, self.places, self.dtype)


RowTarget = CsrTarget | DenseTarget
