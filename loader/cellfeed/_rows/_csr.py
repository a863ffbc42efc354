"""Sparse rows in memory: the destination of each row, and the resulting groups.

Destinations depend only on the lengths of rows and the order of delivery, so they are computed
without allocating memory or reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import Buffer, bind, destination
from cellfeed._decode import ChunkedArray, ChunkReads, RowGroup, ValueSteps, kernels, place_elements
from cellfeed._lazy import sp
from cellfeed._rows._arrays import CsrRows, summable
from cellfeed._rows._element import Copies, CsrChunks, first_deliveries

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CsrTarget:
    """Destinations of sparse rows.

    ``target[first:stop]`` or ``target[numbers]`` are the destinations of some of the rows.

    Parameters
    ----------
    lengths
        Number of elements in each row, int64, shape (n_rows,).
    index_destinations, data_destinations
        Start of the column indices and of the values of each row, int64, shape (n_rows,):
        destinations, or addresses once the target is bound.
    index_dtype, dtype
        Dtypes of column indices, int32 or int64, and of values.
    """

    lengths: NDArray[np.int64]
    index_destinations: NDArray[np.int64]
    data_destinations: NDArray[np.int64]
    index_dtype: np.dtype[Any]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> CsrTarget:
        return replace(
            self,
            lengths=self.lengths[rows],
            index_destinations=self.index_destinations[rows],
            data_destinations=self.data_destinations[rows],
        )

    def bound(self, bases: NDArray[np.int64]) -> CsrTarget:
        """Return the same target in memory whose groups begin at ``bases``."""
        return replace(
            self,
            index_destinations=bind(self.index_destinations, bases),
            data_destinations=bind(self.data_destinations, bases),
        )

    def reads_from(
        self,
        stored: CsrChunks,
        starts: NDArray[np.int64],
        column_map: NDArray[np.int32] | None,
        steps: ValueSteps | None = None,
    ) -> list[ChunkReads]:
        """Return the reads of rows to this target.

        Parameters
        ----------
        stored
            The chunks of the rows, with values that can be cast to this dtype.
        starts
            Start of each row in the stored arrays, ascending, int64, shape (n_rows,).
        column_map
            New index of each stored column, none of which is left out; None if they do not change.
        steps
            Transforms of the values of rows that are in one chunk.
        """
        return [
            stored.indices.reads_of_ranges(
                starts,
                self.lengths,
                self.index_destinations,
                self.index_dtype,
                index_limit=stored.n_columns,
                column_map=column_map,
            ),
            stored.data.reads_of_ranges(
                starts, self.lengths, self.data_destinations, self.dtype, steps=steps
            ),
        ]

    def put(self, rows: CsrRows, column_map: NDArray[np.int32] | None = None) -> bool:
        """Place all rows; the target must be bound.

        Parameters
        ----------
        rows
            Rows of the stated lengths, with indices and values of any numeric dtype. Values are
            cast as by NumPy.
        column_map
            See `reads_from`.

        Returns
        -------
        Whether the columns of each row ascend strictly.

        Raises
        ------
        ValueError
            A column index is out of bounds, or the sizes differ from the stated ones.
        """
        starts = np.cumsum(self.lengths) - self.lengths
        ascending = place_elements(
            rows.indices,
            starts,
            self.lengths,
            self.index_destinations,
            self.index_dtype,
            index_limit=rows.n_vars,
            column_map=column_map,
        )
        place_elements(rows.data, starts, self.lengths, self.data_destinations, self.dtype)
        return ascending


@dataclass(frozen=True, slots=True)
class CsrGroup:
    """The memory layout of sparse rows: column indices, followed by values.

    Parameters
    ----------
    indptr
        Row pointers, shape (n_rows + 1,); int32, or int64 if needed.
    n_elements, data_start
        Number of elements, and start of the values in bytes.
    dtype
        Dtype of the values.
    n_vars
        Number of genes.
    """

    indptr: NDArray[Any]
    n_elements: int
    data_start: int
    dtype: np.dtype[Any]
    n_vars: int

    @property
    def n_bytes(self) -> int:
        """Size of the memory in bytes."""
        return self.data_start + self.n_elements * self.dtype.itemsize

    def sort(self, buffer: Buffer) -> bool:
        """Sort the columns of each row, as torch requires.

        Parameters
        ----------
        buffer
            Memory of the rows.

        Returns
        -------
        Whether the columns of each row are distinct; if not, see `over`.
        """
        if self.n_vars > np.iinfo(np.int32).max:
            return False  # left to SciPy
        rows = self._rows(buffer)
        values = buffer.array(np.dtype(np.uint8), rows.data.nbytes, start=self.data_start)
        return bool(kernels.sort_rows(rows.indptr, rows.indices, values, rows.data.itemsize))

    def over(self, buffer: Buffer, *, distinct: bool = True) -> CsrRows:
        """Return the rows in memory, whose columns ascend.

        Parameters
        ----------
        buffer
            Memory of at least `n_bytes`.
        distinct
            Whether the columns of each row are distinct. If not, duplicates are summed.
        """
        rows = self._rows(buffer)
        return rows if distinct else _summed(rows)

    def located(self, buffer: Buffer) -> RowGroup:
        """Return the addresses of the rows in memory."""
        return RowGroup(
            n_rows=len(self.indptr) - 1,
            values=buffer.address + self.data_start,
            columns=buffer.address,
            pointers=self.indptr.ctypes.data,
            index_itemsize=self.indptr.itemsize,
        )

    def _rows(self, buffer: Buffer) -> CsrRows:
        indices = buffer.array(self.indptr.dtype, self.n_elements)
        data = buffer.array(self.dtype, self.n_elements, start=self.data_start)
        return CsrRows(self.indptr, indices, data, self.n_vars)


def _summed(rows: CsrRows) -> CsrRows:
    values = rows.data.astype(summable(rows.data.dtype), copy=False)
    matrix = sp.csr_array((values, rows.indices, rows.indptr), shape=rows.shape)
    matrix.sum_duplicates()
    summed = matrix.data.astype(rows.data.dtype, copy=False)
    return CsrRows(matrix.indptr, matrix.indices, summed, rows.n_vars)


def csr_groups(
    lengths: NDArray[np.int64],
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    n_vars: int,
    dtype: np.dtype[Any],
    first_number: int = 0,
) -> tuple[Sequence[CsrGroup], CsrTarget, Sequence[Copies]]:
    """Lay out sparse rows.

    Parameters
    ----------
    lengths
        Number of elements in each distinct row, int64, shape (n_distinct,).
    order
        The row that is delivered at each position, shape (n_delivered,); each at least once.
    bounds
        Positions where groups begin and end, ascending, shape (n_groups + 1,).
    n_vars, dtype
        Number of genes, and dtype of the values.
    first_number
        Number of the first group among all groups of the fetch.

    Returns
    -------
    The groups; the destinations of the distinct rows; and the copies to make afterwards.
    """
    ends = np.concatenate([[0], np.cumsum(lengths[order])])
    # SciPy and torch want one dtype for both; int32 halves the memory while it suffices.
    sizes = np.diff(ends[bounds])
    most = max(sizes.max(initial=0), n_vars)
    index_dtype = np.dtype(np.int32 if most <= np.iinfo(np.int32).max else np.int64)
    data_starts = -(-sizes * index_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    numbers = np.repeat(np.arange(sizes.size), np.diff(bounds))
    elements = ends[:-1] - ends[bounds[:-1]][numbers]
    # One after the other, each with its end: cell k of group g at k + g.
    pointers = np.empty(elements.size + sizes.size, index_dtype)
    pointers[np.arange(elements.size) + numbers] = elements
    pointers[bounds[1:] + np.arange(sizes.size)] = sizes
    firsts = (bounds + np.arange(bounds.size)).tolist()
    groups = [
        CsrGroup(pointers[first:stop], n_elements, data_start, dtype, n_vars)
        for (first, stop), n_elements, data_start in zip(
            pairwise(firsts), sizes.tolist(), data_starts.tolist(), strict=True
        )
    ]
    index_destinations = destination(numbers + first_number, elements * index_dtype.itemsize)
    data_destinations = destination(
        numbers + first_number, data_starts[numbers] + elements * dtype.itemsize
    )
    first, again = first_deliveries(order, lengths.size)
    target = CsrTarget(
        lengths=lengths,
        index_destinations=index_destinations[first],
        data_destinations=data_destinations[first],
        index_dtype=index_dtype,
        dtype=dtype,
    )
    copies = [
        Copies(
            destinations[first[order[again]]], destinations[again], lengths[order[again]] * itemsize
        )
        for destinations, itemsize in (
            (index_destinations, index_dtype.itemsize),
            (data_destinations, dtype.itemsize),
        )
    ]
    return groups, target, copies


# Sparse rows in chunks, of which each lies in several ranges of the stored arrays.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CsrPieces:
    """The ranges that some rows lie in; arrays are int64, those of pieces of shape (n_pieces,).

    Parameters
    ----------
    indices, data
        Column indices and values of all elements, of one dimension.
    n_columns
        Number of columns.
    lengths
        Elements of each row, shape (n_rows,).
    rows
        Which of the rows each piece belongs to; of one row, in their order.
    index_starts, data_starts
        Where pieces begin in the arrays, ascending.
    counts
        Their elements.
    before
        Elements of their rows that come before them.
    """

    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    index_starts: NDArray[np.int64]
    data_starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    before: NDArray[np.int64]

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that the rows take, of which nothing can be placed."""
        nowhere = np.zeros_like(self.counts)
        return [
            array.reads_of_ranges(starts, self.counts, nowhere, array.dtype)
            for array, starts in ((self.indices, self.index_starts), (self.data, self.data_starts))
        ]

    def reads_to(self, target: CsrTarget, column_map: NDArray[np.int32] | None) -> list[ChunkReads]:
        """Return what to read so that the rows come to a target.

        Parameters
        ----------
        target
            Where they go, as a dtype that the values can be cast to.
        column_map
            What each stored column becomes, none of which is left out; None if they stay.
        """
        size = target.index_dtype.itemsize
        destinations = target.index_destinations[self.rows] + self.before * size
        indices = self.indices.reads_of_ranges(
            self.index_starts,
            self.counts,
            destinations,
            target.index_dtype,
            index_limit=self.n_columns,
            column_map=column_map,
        )
        crossings = np.concatenate([indices.crossings[size], destinations[self.before > 0]])
        data = self.data.reads_of_ranges(
            self.data_starts,
            self.counts,
            target.data_destinations[self.rows] + self.before * target.dtype.itemsize,
            target.dtype,
        )
        return [replace(indices, crossings={size: crossings}), data]

    def reads_selecting(self, column_map: NDArray[np.int32]) -> ChunkReads:
        """Return what to read for `ChunkReads.select`, with pieces in place of rows.

        Parameters
        ----------
        column_map
            What each stored column becomes, -1 if it is left out.
        """
        return self.indices.reads_selecting(self.index_starts, self.counts, column_map=column_map)


class PiecedCsr(ABC):
    """Sparse rows in chunks that lie in several ranges each."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""

    @abstractmethod
    def pieces(self, rows: NDArray[np.int64]) -> CsrPieces:
        """Return where rows lie.

        Parameters
        ----------
        rows
            Ascending, int64, shape (n,).

        Raises
        ------
        FormatError
            The storage is damaged.
        """
