"""Ragged rows in memory: the destination of each row, and the resulting groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import Buffer, bind, destination
from cellfeed._cells import RaggedRows
from cellfeed._chunks import ChunkReads, place_elements
from cellfeed._layouts._chunked import RaggedChunks
from cellfeed._layouts._copies import Copies, first_deliveries

__all__ = ["RaggedGroup", "RaggedTarget", "ragged_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTarget:
    """Destinations of ragged rows.

    ``target[first:stop]`` or ``target[numbers]`` are the destinations of some of the rows.

    Parameters
    ----------
    lengths
        Number of values in each row, int64, shape (n_rows,).
    destinations
        Start of each row, int64, shape (n_rows,): destinations, or addresses once the target is
        bound.
    dtype
        Dtype of the values.
    """

    lengths: NDArray[np.int64]
    destinations: NDArray[np.int64]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "RaggedTarget":
        return replace(self, lengths=self.lengths[rows], destinations=self.destinations[rows])

    def bound(self, bases: NDArray[np.int64]) -> "RaggedTarget":
        """Return the same target in memory whose groups begin at ``bases``."""
        return replace(self, destinations=bind(self.destinations, bases))

    def reads_from(self, stored: RaggedChunks, rows: NDArray[np.int64]) -> ChunkReads:
        """Return the reads of ascending stored rows to this target."""
        return stored.reads_of_rows(rows, self.destinations, self.dtype)

    def put(self, rows: RaggedRows, column_map: NDArray[np.int32] | None = None) -> bool:  # noqa: ARG002 - as of others
        """Place all rows; the target must be bound.

        Parameters
        ----------
        rows
            Rows of the stated lengths, of any numeric dtype; cast as by NumPy.
        column_map
            None, since there are no columns.

        Returns
        -------
        True, since ragged rows are always in order.

        Raises
        ------
        ValueError
            The sizes differ from the stated ones.
        """
        if not np.array_equal(rows.lengths, self.lengths):
            raise ValueError("the lengths of rows differ from the stated ones")
        starts = np.cumsum(self.lengths) - self.lengths
        return place_elements(rows.values, starts, self.lengths, self.destinations, self.dtype)


@dataclass(frozen=True, slots=True)
class RaggedGroup:
    """The memory layout of ragged rows, which are concatenated.

    Parameters
    ----------
    offsets
        Start of each row, and end of the last; int64, shape (n_rows + 1,).
    dtype
        Dtype of the values.
    """

    offsets: NDArray[np.int64]
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        """Size of the memory in bytes."""
        return int(self.offsets[-1]) * self.dtype.itemsize

    def over(self, buffer: Buffer) -> RaggedRows:
        """Return the rows in memory of at least `n_bytes`."""
        return RaggedRows(self.offsets, buffer.array(self.dtype, int(self.offsets[-1])))


def ragged_groups(
    lengths: NDArray[np.int64],
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    dtype: np.dtype[Any],
    first_number: int = 0,
) -> tuple[Sequence[RaggedGroup], RaggedTarget, Sequence[Copies]]:
    """Lay out ragged rows; see `csr_groups`."""
    ends = np.concatenate([[0], np.cumsum(lengths[order])])
    groups = [
        RaggedGroup(ends[first : stop + 1] - ends[first], dtype)
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    numbers = np.repeat(np.arange(len(groups)), np.diff(bounds))
    values = ends[:-1] - ends[bounds[:-1]][numbers]
    destinations = destination(numbers + first_number, values * dtype.itemsize)
    first, again = first_deliveries(order, lengths.size)
    target = RaggedTarget(lengths=lengths, destinations=destinations[first], dtype=dtype)
    sizes = lengths[order[again]] * dtype.itemsize
    return groups, target, [Copies(destinations[first[order[again]]], destinations[again], sizes)]
