"""Rows of any length in memory: where each row goes, and what comes of it."""

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
    """Destinations of rows of any length.

    ``target[first:stop]`` or ``target[numbers]`` are the destinations of some of the rows.

    Parameters
    ----------
    lengths
        Values of each row, int64, shape (n_rows,).
    destinations
        Where each row begins, int64, shape (n_rows,): destinations, or addresses once the target is
        bound.
    dtype
        Dtype there.
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
        """Return what to read so that stored rows, which ascend, come here."""
        return stored.reads_of_rows(rows, self.destinations, self.dtype)

    def put(self, rows: RaggedRows, column_map: NDArray[np.int32] | None = None) -> bool:  # noqa: ARG002 - as of others
        """Place all rows; the target has to be bound.

        Parameters
        ----------
        rows
            Rows of the lengths stated, of any numeric dtype; cast as NumPy does.
        column_map
            None, as there are no columns.

        Returns
        -------
        True, as nothing can be out of order.

        Raises
        ------
        ValueError
            The sizes are not those stated.
        """
        if not np.array_equal(rows.lengths, self.lengths):
            raise ValueError("the lengths of rows differ from the stated ones")
        starts = np.cumsum(self.lengths) - self.lengths
        return place_elements(rows.values, starts, self.lengths, self.destinations, self.dtype)


@dataclass(frozen=True, slots=True)
class RaggedGroup:
    """Rows of any length, one after the other.

    Parameters
    ----------
    offsets
        Where each row begins, int64, shape (n_rows + 1,).
    dtype
        Dtype of the values.
    """

    offsets: NDArray[np.int64]
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        """Memory that is needed."""
        return int(self.offsets[-1]) * self.dtype.itemsize

    def over(self, buffer: Buffer) -> RaggedRows:
        """Return the rows that memory of at least `n_bytes` holds."""
        return RaggedRows(self.offsets, buffer.array(self.dtype, int(self.offsets[-1])))


def ragged_groups(
    lengths: NDArray[np.int64],
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    dtype: np.dtype[Any],
    first_number: int = 0,
) -> tuple[Sequence[RaggedGroup], RaggedTarget, Sequence[Copies]]:
    """Lay out rows of any length; see `csr_groups`."""
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
