"""Reading rows of a collection straight into the order and the pieces in which they leave."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol, Self

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels
from cellfeed._memory import MemoryPool
from cellfeed._minibatch import Cells, CsrRows
from cellfeed._obs import ObsColumn
from cellfeed._prefetch import ahead, drain
from cellfeed._runs import Runs, merge_consecutive
from cellfeed._sources import Layout
from cellfeed._targets import CsrTarget, DenseTarget, RowTarget
from cellfeed.machine import usable_cpu_count

__all__ = ["Reader"]

_ALIGNMENT = 64


class Readable(Protocol):
    """What a `Reader` asks of a collection."""

    @property
    def n_vars(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def obs(self) -> Mapping[str, ObsColumn]: ...

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]: ...

    def read_into(
        self, runs: Runs, target: RowTarget, threads: Executor | None, n_threads: int
    ) -> None: ...


class Reader:
    """Reads rows of one collection, with threads and memory of its own.

    Rows go from decoded chunks straight to their place among those that leave together. Each
    such group of rows has memory of its own, which is used again once nobody refers to it.

    Parameters
    ----------
    collection
        Where rows come from.
    dtype
        Dtype of the values; that of the collection if None.
    num_threads
        Threads that read and decode; as many as the process may use processors if None.
    """

    def __init__(
        self,
        collection: Readable,
        *,
        dtype: np.dtype[Any] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self._collection = collection
        self._dtype = collection.dtype if dtype is None else dtype
        self._n_threads = num_threads or usable_cpu_count()
        self._threads = ThreadPoolExecutor(self._n_threads + 1, thread_name_prefix="cellfeed-read")
        # Threads of their own, so that they need not wait for a fetch to be decoded.
        self._dense_threads = ThreadPoolExecutor(
            self._n_threads, thread_name_prefix="cellfeed-dense"
        )
        self._pool = MemoryPool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the threads go; what was read stays valid."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._dense_threads.shutdown(wait=True, cancel_futures=True)

    def read(self, rows: NDArray[np.int64], order: NDArray[np.intp] | None = None) -> Cells:
        """Read rows as one group.

        Parameters
        ----------
        rows
            Distinct rows, ascending, within the collection.
        order
            ``rows[order]`` are the cells that are returned; all of them, ascending, if None.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        order = np.arange(rows.size) if order is None else order
        cells = self.read_groups(rows, order, max(1, order.size))[0]
        return cells.to_scipy()

    def read_groups(
        self, rows: NDArray[np.int64], order: NDArray[np.intp], group_size: int
    ) -> list[Cells]:
        """Read rows as groups of equal size, such as minibatches; the last may be smaller.

        Parameters
        ----------
        rows
            Distinct rows, ascending, within the collection.
        order
            ``rows[order]`` are the cells in the order of delivery.
        group_size
            Cells of a group.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        starts = np.arange(0, max(1, order.size), group_size)
        read = self._read_csr if self._collection.layout == "csr" else self._read_dense
        matrices = read(merge_consecutive(rows), order, starts)
        delivered = rows[order]
        obs = {name: column.values[delivered] for name, column in self._collection.obs.items()}
        groups = []
        for start, matrix in zip(starts.tolist(), matrices, strict=True):
            here = slice(start, start + group_size)
            part = {name: values[here] for name, values in obs.items()}
            groups.append(Cells(matrix, part, delivered[here]))
        return groups

    def _read_csr(
        self, runs: Runs, order: NDArray[np.intp], starts: NDArray[np.int64]
    ) -> list[CsrRows]:
        lengths = self._collection.row_lengths(runs)
        ends = np.concatenate([[0], np.cumsum(lengths[order])])
        bounds = np.append(starts, order.size)
        sizes = np.diff(ends[bounds])
        # SciPy and torch want one dtype for both; int32 halves the memory while it suffices.
        small = sizes.max(initial=0) <= np.iinfo(np.int32).max
        index_dtype = np.dtype(np.int32 if small else np.int64)
        groups = list[CsrRows]()
        for first, stop, n_elements in zip(bounds[:-1], bounds[1:], sizes.tolist(), strict=True):
            group = self._csr_memory(int(stop - first), n_elements, index_dtype)
            np.subtract(ends[first : stop + 1], ends[first], out=group.indptr, casting="unsafe")
            groups.append(group)
        counts = np.diff(bounds)
        within = ends[:-1] - np.repeat(ends[bounds[:-1]], counts)
        index_places = _addresses([group.indices for group in groups], counts, within)
        data_places = _addresses([group.data for group in groups], counts, within)
        first_places, again = _first_deliveries(order, lengths.size)
        target = CsrTarget(
            n_vars=self._collection.n_vars,
            lengths=lengths,
            index_places=index_places[first_places],
            data_places=data_places[first_places],
            index_dtype=index_dtype,
            dtype=self._dtype,
            ordered=np.ones(1, np.bool_),
        )
        self._collection.read_into(runs, target, self._threads, self._n_threads)
        again_lengths = lengths[order[again]]
        for places, dtype in ((index_places, index_dtype), (data_places, self._dtype)):
            originals = places[first_places][order[again]]
            kernels.copy_all(originals, places[again], again_lengths * dtype.itemsize)
        return groups if target.ordered[0] else [_in_order(group) for group in groups]

    def _read_dense(
        self, runs: Runs, order: NDArray[np.intp], starts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        n_vars = self._collection.n_vars
        counts = np.diff(np.append(starts, order.size))
        groups = [self._dense_memory(int(count), n_vars) for count in counts]
        within = (np.arange(order.size) - np.repeat(starts, counts)) * n_vars
        places = _addresses(groups, counts, within)
        first_places, again = _first_deliveries(order, int((runs[:, 1] - runs[:, 0]).sum()))
        target = DenseTarget(n_vars=n_vars, places=places[first_places], dtype=self._dtype)
        self._collection.read_into(runs, target, self._threads, self._n_threads)
        originals = places[first_places][order[again]]
        row_bytes = np.full(again.size, n_vars * self._dtype.itemsize, np.int64)
        kernels.copy_all(originals, places[again], row_bytes)
        return groups

    def densified(self, groups: list[Cells]) -> Iterator[Cells]:
        """Iterate over groups with dense ``X``, some of them made dense ahead; empties the list."""
        return ahead(self._densify, drain(groups), self._dense_threads, self._n_threads)

    def _densify(self, cells: Cells) -> Cells:
        if not isinstance(cells.X, CsrRows):
            return cells
        dense = self._dense_memory(*cells.X.shape)
        cells.X.densify_into(dense)
        return Cells(dense, cells.obs, cells.rows)

    def _dense_memory(self, n_rows: int, n_vars: int) -> NDArray[Any]:
        """Return memory for dense rows, not initialised."""
        n_bytes = n_rows * n_vars * self._dtype.itemsize
        memory = self._pool.take(n_bytes)[:n_bytes]
        return memory.view(self._dtype).reshape(n_rows, n_vars)

    def _csr_memory(self, n_rows: int, n_elements: int, index_dtype: np.dtype[Any]) -> CsrRows:
        """Return memory for sparse rows, in one piece."""
        sizes = [
            (n_rows + 1, index_dtype),
            (n_elements, index_dtype),
            (n_elements, self._dtype),
        ]
        starts, end = [], 0
        for n, dtype in sizes:
            starts.append(end)
            end += -(-n * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        memory = self._pool.take(end)
        indptr, indices, data = (
            memory[start : start + n * dtype.itemsize].view(dtype)
            for start, (n, dtype) in zip(starts, sizes, strict=True)
        )
        return CsrRows(indptr, indices, data, self._collection.n_vars)


def _addresses(
    groups: list[NDArray[Any]], counts: NDArray[np.int64], within: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the address of each row, ``within`` elements from where its group begins."""
    bases = np.array([group.ctypes.data for group in groups], np.int64)
    return np.repeat(bases, counts) + within * groups[0].itemsize


def _first_deliveries(
    order: NDArray[np.intp], n_distinct: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where each distinct row is delivered first, and all places of later deliveries."""
    first = np.empty(n_distinct, np.intp)
    first[order[::-1]] = np.arange(order.size)[::-1]
    is_again = np.ones(order.size, np.bool_)
    is_again[first] = False
    return first, np.flatnonzero(is_again)


def _in_order(rows: CsrRows) -> CsrRows:
    """Return rows whose columns ascend and are distinct, as torch takes them to be."""
    matrix = sp.csr_array((rows.data, rows.indices, rows.indptr), shape=rows.shape)
    matrix.sum_duplicates()
    return CsrRows(matrix.indptr, matrix.indices, matrix.data, rows.n_vars)
