"""Dense rows in memory: the destination of each row, and the resulting groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import Buffer, bind, destination
from cellfeed._decode import ChunkReads, RowGroup, RowRanges, can_cast, place_elements
from cellfeed._rows._arrays import RaggedRows
from cellfeed._rows._element import Copies, DenseChunks, RaggedChunks, first_deliveries
from cellfeed._runs import Runs, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTarget:
    """Destinations of dense rows.

    ``target[first:stop]`` or ``target[numbers]`` are the destinations of some of the rows.

    Parameters
    ----------
    n_vars
        Number of genes: values in a row, which are contiguous.
    destinations
        Start of each row, int64, shape (n_rows,): destinations, or addresses once the target is
        bound.
    dtype
        Dtype of the values.
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

    def reads_from(
        self, stored: DenseChunks, runs: Runs, column_map: NDArray[np.int32] | None
    ) -> ChunkReads | None:
        """Return the reads of rows to this target.

        Parameters
        ----------
        stored, runs
            The chunks of the stored rows, and the runs of rows to read.
        column_map
            New index of each stored column, -1 to leave it out; None if they do not change.

        Returns
        -------
        None if the values cannot be cast to this dtype.
        """
        values, rows = stored.values, expand(runs)
        if not can_cast(values.dtype, self.dtype):
            return None
        if isinstance(values, RowRanges):  # columns have no names to be aligned by
            return values.reads_of_rows(rows, self.destinations, self.dtype)
        if len(values.shape) > 1:
            return values.reads_of_rows(rows, self.destinations, self.dtype, column_map=column_map)
        n = stored.n_columns
        counts = np.full(len(rows), n, np.int64)
        return values.reads_of_ranges(
            rows * n, counts, self.destinations, self.dtype, column_map=column_map
        )

    def put(self, rows: NDArray[Any], column_map: NDArray[np.int32] | None = None) -> bool:
        """Place all rows; the target must be bound.

        Parameters
        ----------
        rows
            Values of shape (n_rows, n_columns), or with more dimensions, of any numeric dtype; cast
            as by NumPy.
        column_map
            See `reads_from`; columns without a source are set to zero.

        Returns
        -------
        True, since dense rows are always in order.

        Raises
        ------
        ValueError
            The numbers of rows or columns do not fit the target.
        """
        rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if column_map is not None:
            kept = column_map >= 0
            joined = np.zeros((len(rows), self.n_vars), rows.dtype)
            joined[:, column_map[kept]] = rows[:, kept]
            rows = joined
        n_columns = rows.shape[1]
        if len(rows) != len(self) or n_columns > self.n_vars:
            msg = f"expected rows of shape {(len(self), self.n_vars)}, but got {rows.shape}"
            raise ValueError(msg)
        lengths = np.full(len(self), n_columns, np.int64)
        starts = np.cumsum(lengths) - lengths
        return place_elements(rows.reshape(-1), starts, lengths, self.destinations, self.dtype)


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """The memory layout of dense rows, in C order.

    Parameters
    ----------
    n_rows, row_shape
        Number of cells, and the shape of a row: the number of genes, or several numbers.
    dtype
        Dtype of the values.
    """

    n_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        """Size of the memory in bytes."""
        return self.n_rows * math.prod(self.row_shape) * self.dtype.itemsize

    def located(self, buffer: Buffer) -> RowGroup:
        """Return the addresses of the rows in memory."""
        return RowGroup(
            n_rows=self.n_rows, values=buffer.address, row_length=math.prod(self.row_shape)
        )

    def over(self, buffer: Buffer) -> NDArray[Any]:
        """Return the rows in memory of at least `n_bytes`."""
        shape = (self.n_rows, *self.row_shape)
        return buffer.array(self.dtype, math.prod(shape)).reshape(shape)


def dense_groups(
    n_distinct: int,
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    row_shape: tuple[int, ...],
    dtype: np.dtype[Any],
    first_number: int = 0,
) -> tuple[Sequence[DenseGroup], DenseTarget, Sequence[Copies]]:
    """Lay out dense rows; see `csr_groups` and `DenseGroup`."""
    n_vars = math.prod(row_shape)
    row_bytes = n_vars * dtype.itemsize
    counts = np.diff(bounds)
    groups = [DenseGroup(n_rows, row_shape, dtype) for n_rows in counts.tolist()]
    numbers = np.repeat(np.arange(len(groups)), counts)
    offsets = (np.arange(order.size) - bounds[numbers]) * row_bytes
    destinations = destination(numbers + first_number, offsets)
    first, again = first_deliveries(order, n_distinct)
    target = DenseTarget(n_vars=n_vars, destinations=destinations[first], dtype=dtype)
    sizes = np.full(again.size, row_bytes, np.int64)
    return groups, target, [Copies(destinations[first[order[again]]], destinations[again], sizes)]


# Ragged rows in memory: the destination of each row, and the resulting groups.


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
