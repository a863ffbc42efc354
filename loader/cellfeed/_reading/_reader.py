"""Reading rows of a collection straight into the order and the pieces in which they leave."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._buffers import Buffer, BufferPool, bind
from cellfeed._cells import Cells, CsrRows, ObsColumn
from cellfeed._chunks import ChunkReads, copy_all
from cellfeed._errors import ParameterError
from cellfeed._layouts import (
    ColumnMaps,
    Copies,
    CsrGroup,
    DenseGroup,
    Dtypes,
    Element,
    RowTarget,
    csr_groups,
    dense_groups,
    dtypes_of,
    index_dtype_for,
)
from cellfeed._reading._prefetch import ahead
from cellfeed._reading._row_reads import RowReads
from cellfeed._runs import Runs, merge_consecutive
from cellfeed.machine import usable_cpu_count

__all__ = ["PlannedRead", "Reader"]


class Readable(Protocol):
    """What a `Reader` asks of a collection."""

    @property
    def elements(self) -> Mapping[str, Element]: ...

    @property
    def obs(self) -> Mapping[str, ObsColumn]: ...

    def sources_of(self, rows: NDArray[np.int64]) -> NDArray[np.intp]: ...

    def row_lengths(self, name: str, runs: Runs) -> NDArray[np.int64]: ...

    def plan_reads(self, runs: Runs, targets: Mapping[str, RowTarget]) -> RowReads: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """What one fetch reads, before there is memory for it.

    Parameters
    ----------
    reads
        What is read.
    groups
        What comes of it, for each element.
    copies
        Rows that are delivered again.
    rows, obs, bounds
        Rows in the order of delivery, their obs columns, and where groups begin and end in them.
    """

    reads: RowReads
    groups: Mapping[str, Sequence[CsrGroup | DenseGroup]]
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
    such group of rows has memory of its own, of each element, which is used again once nobody
    refers to it.

    Parameters
    ----------
    collection
        Where rows come from.
    dtype
        Dtype of the values of all elements, or of some by name; those of the collection if None.
    num_threads
        Threads that read and decode; as many as the process may use processors if None.
    pool
        Where memory comes from; a pool of its own if None.
    """

    def __init__(
        self,
        collection: Readable,
        *,
        dtype: Dtypes = None,
        num_threads: int | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self._collection = collection
        self._dtypes = dtypes_of(collection.elements, dtype)
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
        groups, targets, copies = self._lay_out(runs, rows.size, order, bounds)
        reads = self._collection.plan_reads(runs, targets)
        delivered = rows[order]
        return PlannedRead(
            reads=reads,
            groups=groups,
            copies=copies,
            rows=delivered,
            obs={name: each.values[delivered] for name, each in self._collection.obs.items()},
            bounds=bounds,
        )

    def _lay_out(
        self, runs: Runs, n_distinct: int, order: NDArray[np.intp], bounds: NDArray[np.int64]
    ) -> tuple[dict[str, Sequence[CsrGroup | DenseGroup]], dict[str, RowTarget], list[Copies]]:
        """Lay out each element: its groups, where rows go, and what is to be copied after."""
        elements = self._collection.elements
        lengths = {
            name: self._collection.row_lengths(name, runs)
            for name, element in elements.items()
            if element.layout == "csr"
        }
        self._check_fit(lengths, order)
        # One for all: what is read of all elements is checked together.
        widths = [
            index_dtype_for(each, order, bounds, elements[name].stored_width)
            for name, each in lengths.items()
        ]
        index_dtype = max(widths, key=lambda width: width.itemsize, default=None)
        groups = dict[str, Sequence[CsrGroup | DenseGroup]]()
        targets, copies, first_number = dict[str, RowTarget](), list[Copies](), 0
        for name, element in elements.items():
            n_vars, dtype = element.stored_width, self._dtypes[name]
            again: Sequence[Copies]
            if name in lengths:
                groups[name], targets[name], again = csr_groups(
                    lengths[name],
                    order,
                    bounds,
                    n_vars=n_vars,
                    dtype=dtype,
                    index_dtype=index_dtype,
                    first_number=first_number,
                )
            else:
                groups[name], targets[name], again = dense_groups(
                    n_distinct,
                    order,
                    bounds,
                    n_vars=n_vars,
                    dtype=dtype,
                    first_number=first_number,
                    row_shape=element.stored_row_shape,
                )
            copies += again
            first_number += len(groups[name])
        return groups, targets, copies

    def _check_fit(self, lengths: Mapping[str, NDArray[np.int64]], order: NDArray[np.intp]) -> None:
        """Check that rows are not larger than all memory, before destinations are computed."""
        n_bytes = 0.0
        for name, element in self._collection.elements.items():
            if name in lengths:
                n_values = lengths[name][order].sum(dtype=np.float64)
            else:
                n_values = float(order.size) * element.stored_width
            n_bytes += n_values * self._dtypes[name].itemsize
        if n_bytes > _all_memory():
            msg = (
                f"these rows take {n_bytes:,.0f} bytes, but this machine has {_all_memory():,} "
                "bytes of memory; read fewer at once or, if they should be small, copy the files "
                "again"
            )
            raise ParameterError(msg)

    def read_planned(self, planned: PlannedRead) -> Iterator[Cells]:
        """Read what was planned, and return its groups in the order of delivery.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        buffers = {
            name: [self._pool.acquire(group.n_bytes) for group in groups]
            for name, groups in planned.groups.items()
        }
        bases = np.array([each.address for some in buffers.values() for each in some], np.int64)
        ordered = planned.reads.run(bases, self._threads, self._n_threads)
        for copies in planned.copies:
            copy_all(bind(copies.sources, bases), bind(copies.targets, bases), copies.sizes)
        # One by one as they are used, by whoever uses them: meanwhile the next are decoded.
        maps = {name: each.column_maps for name, each in self._collection.elements.items()}
        is_joined = {name for name, each in maps.items() if each is not None}
        # Columns that are to become others are put in order after that.
        ordered_of = {name: ordered or name in is_joined for name in maps}
        groups = _groups_of(planned, buffers, ordered_of)
        if not is_joined:
            return groups
        join = partial(self._join, maps=maps, ordered=ordered)
        return ahead(join, groups, self._dense_threads, self._n_threads)

    def _join(self, cells: Cells, *, maps: Mapping[str, ColumnMaps | None], ordered: bool) -> Cells:
        """Give the columns of sources their places among those of the collection."""
        sources = self._collection.sources_of(cells.rows)
        elements = dict[str, CsrRows | NDArray[Any]]()
        for name, rows in cells.items():
            own = maps[name]
            if own is None:
                elements[name] = rows
            elif isinstance(rows, CsrRows):
                elements[name] = own.join_csr(rows, sources, self._pool, ordered=ordered)
            else:
                elements[name] = own.join_dense(rows, sources, self._pool)
        return Cells(elements, cells.obs, cells.rows)

    def read_bytes(self, planned: PlannedRead) -> int:
        """Read the bytes of the chunks of a fetch, and do nothing with them; return how many."""
        return self._run_alone(planned.reads.chunks.without_decoding())

    def decompress(self, planned: PlannedRead) -> None:
        """Read and decompress the chunks of a fetch, and place nothing."""
        self._run_alone(planned.reads.chunks.without_placing())

    def _run_alone(self, reads: ChunkReads) -> int:
        return reads.run(np.empty(0, np.int64), self._threads, self._n_threads).n_bytes

    def densified(self, groups: Iterator[Cells]) -> Iterator[Cells]:
        """Iterate over groups with dense elements, some of them made dense ahead."""
        return ahead(self._densify, groups, self._dense_threads, self._n_threads)

    def _densify(self, cells: Cells) -> Cells:
        elements = {name: self._dense_rows(rows) for name, rows in cells.items()}
        return Cells(elements, cells.obs, cells.rows)

    def _dense_rows(self, rows: CsrRows | NDArray[Any]) -> NDArray[Any]:
        if not isinstance(rows, CsrRows):
            return rows
        group = DenseGroup(*rows.shape, rows.data.dtype)
        dense = group.over(self._dense_pool.acquire(group.n_bytes))
        rows.densify_into(dense)
        return dense


@cache
def _all_memory() -> int:
    return int(psutil.virtual_memory().total)


def _groups_of(
    planned: PlannedRead, buffers: dict[str, list[Buffer]], ordered: Mapping[str, bool]
) -> Iterator[Cells]:
    for some in buffers.values():
        some.reverse()
    for k, here in enumerate(map(slice, planned.bounds[:-1], planned.bounds[1:])):
        # Memory is popped, so that it is kept by nobody but the minibatch.
        elements = {
            name: _rows_over(groups[k], buffers[name].pop(), ordered=ordered[name])
            for name, groups in planned.groups.items()
        }
        obs = {name: values[here] for name, values in planned.obs.items()}
        cells = Cells(elements, obs, planned.rows[here])
        del elements
        yield cells
        del cells


def _rows_over(
    group: CsrGroup | DenseGroup, memory: Buffer, *, ordered: bool
) -> CsrRows | NDArray[Any]:
    if isinstance(group, CsrGroup):
        return group.over(memory, ordered=ordered)
    return group.over(memory)
