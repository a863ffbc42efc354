"""Groups of rows that leave together, such as minibatches: where each row goes in their memory.

Everything here follows from the lengths of rows and the order of delivery alone: no memory is
taken, and nothing is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._memory import Loan
from cellfeed._minibatch import CsrRows, summable
from cellfeed._places import place
from cellfeed._targets import CsrTarget, DenseTarget

__all__ = ["Copies", "CsrGroup", "DenseGroup", "csr_groups", "dense_groups"]

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class CsrGroup:
    """Sparse rows: column indices, and after them values.

    Parameters
    ----------
    indptr
        Row pointer, shape (n_rows + 1,); int32, or int64 where that does not suffice.
    dtype
        Dtype of the values.
    n_vars
        Number of genes.
    """

    indptr: NDArray[Any]
    dtype: np.dtype[Any]
    n_vars: int

    @property
    def data_start(self) -> int:
        """Where values begin, in bytes."""
        n_bytes = int(self.indptr[-1]) * self.indptr.itemsize
        return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def n_bytes(self) -> int:
        """Memory that is needed."""
        return self.data_start + int(self.indptr[-1]) * self.dtype.itemsize

    def over(self, memory: Loan, *, ordered: bool) -> CsrRows:
        """Return the rows that memory holds.

        Parameters
        ----------
        memory
            At least `n_bytes`.
        ordered
            Whether the columns of each row ascend and are distinct. If not, they are made to,
            as torch takes them to be; values of the same column are added up.
        """
        n_elements = int(self.indptr[-1])
        indices = memory.array(self.indptr.dtype, n_elements)
        data = memory.array(self.dtype, n_elements, start=self.data_start)
        if ordered:
            return CsrRows(self.indptr, indices, data, self.n_vars)
        shape = (len(self.indptr) - 1, self.n_vars)
        values = data.astype(summable(self.dtype), copy=False)
        matrix = sp.csr_array((values, indices, self.indptr), shape=shape)
        matrix.sum_duplicates()
        summed = matrix.data.astype(self.dtype, copy=False)
        return CsrRows(matrix.indptr, matrix.indices, summed, self.n_vars)


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Dense rows, one after the other.

    Parameters
    ----------
    n_rows, n_vars
        Cells and genes.
    dtype
        Dtype of the values.
    """

    n_rows: int
    n_vars: int
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        """Memory that is needed."""
        return self.n_rows * self.n_vars * self.dtype.itemsize

    def over(self, memory: Loan) -> NDArray[Any]:
        """Return the rows that memory of at least `n_bytes` holds."""
        return memory.array(self.dtype, self.n_rows * self.n_vars).reshape(self.n_rows, self.n_vars)


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows that are delivered again, which are read once: int64 arrays of one shape.

    Parameters
    ----------
    sources, targets
        Places to copy from and to.
    sizes
        Bytes.
    """

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    sizes: NDArray[np.int64]


def csr_groups(
    lengths: NDArray[np.int64],
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    n_vars: int,
    dtype: np.dtype[Any],
) -> tuple[Sequence[CsrGroup], CsrTarget, Sequence[Copies]]:
    """Lay out sparse rows.

    Parameters
    ----------
    lengths
        Elements of each distinct row, int64, shape (n_distinct,).
    order
        Which of them is delivered at each position, shape (n_delivered,); each at least once.
    bounds
        Positions where groups begin and end, ascending, shape (n_groups + 1,).
    n_vars, dtype
        Number of genes, and dtype of the values.

    Returns
    -------
    The groups; where the distinct rows go; and what is to be copied after.
    """
    ends = np.concatenate([[0], np.cumsum(lengths[order])])
    # SciPy and torch want one dtype for both; int32 halves the memory while it suffices.
    small = np.diff(ends[bounds]).max(initial=0) <= np.iinfo(np.int32).max
    index_dtype = np.dtype(np.int32 if small else np.int64)
    groups = [
        CsrGroup((ends[first : stop + 1] - ends[first]).astype(index_dtype), dtype, n_vars)
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    numbers = np.repeat(np.arange(len(groups)), np.diff(bounds))
    elements = ends[:-1] - ends[bounds[:-1]][numbers]
    data_starts = np.array([group.data_start for group in groups], np.int64)[numbers]
    index_places = place(numbers, elements * index_dtype.itemsize)
    data_places = place(numbers, data_starts + elements * dtype.itemsize)
    first, again = _first_deliveries(order, lengths.size)
    target = CsrTarget(
        n_vars=n_vars,
        lengths=lengths,
        index_places=index_places[first],
        data_places=data_places[first],
        index_dtype=index_dtype,
        dtype=dtype,
    )
    copies = [
        Copies(places[first[order[again]]], places[again], lengths[order[again]] * itemsize)
        for places, itemsize in (
            (index_places, index_dtype.itemsize),
            (data_places, dtype.itemsize),
        )
    ]
    return groups, target, copies


def dense_groups(
    n_distinct: int,
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    n_vars: int,
    dtype: np.dtype[Any],
) -> tuple[Sequence[DenseGroup], DenseTarget, Sequence[Copies]]:
    """Lay out dense rows; see `csr_groups`."""
    row_bytes = n_vars * dtype.itemsize
    counts = np.diff(bounds)
    groups = [DenseGroup(n_rows, n_vars, dtype) for n_rows in counts.tolist()]
    numbers = np.repeat(np.arange(len(groups)), counts)
    places = place(numbers, (np.arange(order.size) - bounds[numbers]) * row_bytes)
    first, again = _first_deliveries(order, n_distinct)
    target = DenseTarget(n_vars=n_vars, places=places[first], dtype=dtype)
    sizes = np.full(again.size, row_bytes, np.int64)
    return groups, target, [Copies(places[first[order[again]]], places[again], sizes)]


def _first_deliveries(
    order: NDArray[np.intp], n_distinct: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where each distinct row is delivered first, and all places of later deliveries."""
    first = np.empty(n_distinct, np.intp)
    first[order[::-1]] = np.arange(order.size)[::-1]
    is_again = np.ones(order.size, np.bool_)
    is_again[first] = False
    return first, np.flatnonzero(is_again)
