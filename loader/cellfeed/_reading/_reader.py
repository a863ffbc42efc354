"""Reading rows of a collection straight into the order and the pieces in which they leave."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._buffers import Buffer, BufferPool, bind
from cellfeed._cells import Cells, CsrRows, ObsColumn
from cellfeed._chunks import ChunkReads, copy_all
from cellfeed._errors import ParameterError
from cellfeed._layouts import Copies, CsrGroup, DenseGroup, RowTarget, csr_groups, dense_groups
from cellfeed._reading._prefetch import ahead
from cellfeed._reading._row_reads import RowReads
from cellfeed._runs import Runs, merge_consecutive
from cellfeed._sources import Layout
from cellfeed.machine import usable_cpu_count

__all__ = ["PlannedRead", "Reader"]


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

    def plan_reads(self, runs: Runs, target: RowTarget) -> RowReads: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """What one fetch reads, before there is memory for it.

    Parameters
    ----------
    reads
        What is read.
    groups
        What comes of it.
    copies
        Rows that are delivered again.
    rows, obs, bounds
        Rows in the order of delivery, their obs columns, and where groups begin and end in them.
    """

    reads: RowReads
    groups: Sequence[CsrGroup | DenseGroup]
    copies: Sequence[Copies]
    rows: NDArray[np.int64]
    obs: Mapping[str, NDArray[Any]]
    bounds: NDArray[np.int64]

    def readahead(self) -> None:
        """Tell the system what will be read soon, so that it is there when it is."""
        self.reads.readahead()


class Reader:
    """Reads rows of one collection, with threads of its own.

    Rows go from decoded chunks straight to their destination among those that leave together. Each
    such group of rows has memory of its own, which is used again once nobody refers to it.

    Parameters
    ----------
    collection
        Where rows come from.
    dtype
        Dtype of the values; that of the collection if None.
    num_threads
        Threads that read and decode; as many as the process may use processors if None.
    pool
        Where memory comes from; a pool of its own if None.
    """

    def __init__(
        self,
        collection: Readable,
        *,
        dtype: np.dtype[Any] | None = None,
        num_threads: int | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self._collection = collection
        self._dtype = collection.dtype if dtype is None else dtype
        self._n_threads = num_threads or usable_cpu_count()
        self._threads = ThreadPoolExecutor(self._n_threads, thread_name_prefix="cellfeed-read")
        # Threads of their own, so that they need not wait for a fetch to be decoded.
        self._dense_threads = ThreadPoolExecutor(
            self._n_threads, thread_name_prefix="cellfeed-dense"
        )
        self._pool = BufferPool() if pool is None else pool
        self._dense_pool = BufferPool()  # pieces of one size, which others would take the place of

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
        return next(self.read_groups(rows, order, max(1, order.size))).to_scipy()

    def read_groups(
        self, rows: NDArray[np.int64], order: NDArray[np.intp], group_size: int
    ) -> Iterator[Cells]:
        """Plan and read; see `plan` and `read_planned`."""
        planned = self.plan(rows, order, group_size)
        planned.readahead()
        return self.read_planned(planned)

    def plan(
        self, rows: NDArray[np.int64], order: NDArray[np.intp], group_size: int
    ) -> PlannedRead:
        """Plan to read rows as groups of equal size, such as minibatches; the last may be smaller.

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
            A file is damaged, or is not the one that was opened.
        ParameterError
            The rows are larger than the machine's memory.
        """
        bounds = np.append(np.arange(0, max(1, order.size), group_size), order.size)
        runs = merge_consecutive(rows)
        n_vars, dtype = self._collection.n_vars, self._dtype
        groups: Sequence[CsrGroup | DenseGroup]
        target: RowTarget
        if self._collection.layout == "csr":
            lengths = self._collection.row_lengths(runs)
            _check_fits(lengths[order].sum(dtype=np.float64) * dtype.itemsize)
            groups, target, copies = csr_groups(lengths, order, bounds, n_vars=n_vars, dtype=dtype)
        else:
            _check_fits(float(order.size) * n_vars * dtype.itemsize)
            groups, target, copies = dense_groups(
                rows.size, order, bounds, n_vars=n_vars, dtype=dtype
            )
        reads = self._collection.plan_reads(runs, target)
        delivered = rows[order]
        return PlannedRead(
            reads=reads,
            groups=groups,
            copies=copies,
            rows=delivered,
            obs={name: each.values[delivered] for name, each in self._collection.obs.items()},
            bounds=bounds,
        )

    def read_planned(self, planned: PlannedRead) -> Iterator[Cells]:
        """Read what was planned, and return its groups in the order of delivery.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        buffers = [self._pool.acquire(group.n_bytes) for group in planned.groups]
        bases = np.array([buffer.address for buffer in buffers], np.int64)
        ordered = planned.reads.run(bases, self._threads, self._n_threads)
        for copies in planned.copies:
            copy_all(bind(copies.sources, bases), bind(copies.targets, bases), copies.sizes)
        # One by one as they are used, by whoever uses them: meanwhile the next are decoded.
        return _groups_of(planned, buffers, ordered=ordered)

    def read_bytes(self, planned: PlannedRead) -> int:
        """Read the bytes of the chunks of a fetch, and do nothing with them; return how many."""
        return self._run_alone(planned.reads.chunks.without_decoding())

    def decompress(self, planned: PlannedRead) -> None:
        """Read and decompress the chunks of a fetch, and place nothing."""
        self._run_alone(planned.reads.chunks.without_placing())

    def _run_alone(self, reads: ChunkReads) -> int:
        return reads.run(np.empty(0, np.int64), self._threads, self._n_threads).n_bytes

    def densified(self, groups: Iterator[Cells]) -> Iterator[Cells]:
        """Iterate over groups with dense ``X``, some of them made dense ahead."""
        return ahead(self._densify, groups, self._dense_threads, self._n_threads)

    def _densify(self, cells: Cells) -> Cells:
        if not isinstance(cells.X, CsrRows):
            return cells
        group = DenseGroup(*cells.X.shape, cells.X.data.dtype)
        dense = group.over(self._dense_pool.acquire(group.n_bytes))
        cells.X.densify_into(dense)
        return Cells(dense, cells.obs, cells.rows)


def _check_fits(n_bytes: float) -> None:
    """Check that rows are not larger than all memory, before there are tables of destinations."""
    if n_bytes > _all_memory():
        msg = (
            f"these rows take {n_bytes:,.0f} bytes, but this machine has {_all_memory():,} bytes "
            "of memory; read fewer at once or, if they should be small, copy the files again"
        )
        raise ParameterError(msg)


@cache
def _all_memory() -> int:
    return int(psutil.virtual_memory().total)


def _groups_of(planned: PlannedRead, buffers: list[Buffer], *, ordered: bool) -> Iterator[Cells]:
    buffers.reverse()
    for k, group in enumerate(planned.groups):
        memory = buffers.pop()  # kept by nobody but the minibatch
        if isinstance(group, CsrGroup):
            X: CsrRows | NDArray[Any] = group.over(memory, ordered=ordered)
        else:
            X = group.over(memory)
        del memory
        here = slice(planned.bounds[k], planned.bounds[k + 1])
        obs = {name: values[here] for name, values in planned.obs.items()}
        cells = Cells(X, obs, planned.rows[here])
        del X
        yield cells
        del cells
