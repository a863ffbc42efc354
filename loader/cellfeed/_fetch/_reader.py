"""Reading rows of a collection directly into minibatches, in the order of delivery."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import compress, islice
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import Buffer, BufferPool, bind
from cellfeed._decode import ChunkReads, Counter, Counters, Decoder, Verify, divide_reads, kernels
from cellfeed._fetch._direct_rows import decode
from cellfeed._fetch._laid_out import ElementPlan, ElementRead, LaidOut
from cellfeed._fetch._parts import ElementTransforms, Part, Transforms
from cellfeed._fetch._prefetch import Pools, ahead
from cellfeed._rows import (
    Cells,
    CsrGroup,
    CsrRows,
    DenseGroup,
    Dtypes,
    Element,
    Group,
    ObsColumn,
    RaggedGroup,
    dtypes_of,
)
from cellfeed._runs import Runs, merge_consecutive
from cellfeed.machine import usable_cpu_count

# Requests for a fetch before it is read, to byte stores and to sources.


class Ahead:
    """Requests for a fetch, which start with `begin` and are cancelled with `let_go`.

    Parameters
    ----------
    reads
        Chunks to request from byte stores.
    parts
        Rows to request from sources; sources without requests are left out.
    """

    def __init__(self, reads: Sequence[ChunkReads], parts: Sequence[Part]) -> None:
        # All elements at once, so that what is side by side in a file comes together.
        self._reads = ChunkReads.concatenate(list(reads)) if reads else None
        self._parts = [part for part in parts if part.expected_bytes]
        self._coming = list[object]()
        chunks = 0 if self._reads is None else self._reads.brought_bytes
        self.n_bytes = chunks + sum(part.expected_bytes for part in self._parts)
        """Number of compressed bytes; an upper bound for files of one chunk."""

    def begin(self) -> None:
        """Start the requests, without waiting."""
        if self._reads is not None:
            self._coming += self._reads.readahead()
        self._coming += [part.stored.expect(part.runs) for part in self._parts]

    def let_go(self) -> None:
        """Cancel requests that have not been read."""
        self._coming = []


# The reads of a fetch, before memory is allocated for it.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """The reads of a fetch, before memory is allocated for it.

    Parameters
    ----------
    elements
        The read of each element.
    rows, obs, bounds
        Rows in the order of delivery, their obs columns, and the bounds of groups.
    ahead
        The requests for it, once they are computed.
    """

    elements: Mapping[str, ElementRead]
    rows: NDArray[np.int64]
    obs: Mapping[str, NDArray[Any]]
    bounds: NDArray[np.int64]
    ahead: Ahead | None = None

    @property
    def chunks(self) -> ChunkReads:
        """Chunks of all elements, for reading and decompressing without placing."""
        return ChunkReads.concatenate(self._reads)

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        return all(each.is_decoded_here for each in self.elements.values())

    @property
    def expected_bytes(self) -> int:
        """Number of compressed bytes that are requested for it; 0 before it is `advised`."""
        return 0 if self.ahead is None else self.ahead.n_bytes

    def advised(self) -> "PlannedRead":
        """Announce the reads to the system; return the same read with its requests."""
        reads = self._reads
        are_brought = [each.are_brought for each in reads]
        own = [each for each, is_brought in zip(reads, are_brought, strict=True) if not is_brought]
        if own:
            ChunkReads.advise(own)
        brought = [each.without_placing() for each in compress(reads, are_brought)]
        arriving = [part for each in self.elements.values() for part in each.arriving_parts]
        return replace(self, ahead=Ahead(brought, arriving))

    def begun(self) -> "PlannedRead":
        """Start the requests to stores and sources; return this, which keeps them alive."""
        if self.ahead is not None:
            self.ahead.begin()
        return self

    def readahead(self) -> "PlannedRead":
        """Announce the reads to the system, and start the requests to stores and sources.

        Returns
        -------
        The same read, which keeps the requests alive; read it in place of this one.
        """
        return self.advised().begun()

    def let_go(self) -> None:
        """Cancel requests that have not been read."""
        if self.ahead is not None:
            self.ahead.let_go()

    @property
    def _reads(self) -> list[ChunkReads]:
        return [reads for each in self.elements.values() for reads in each.chunks]


# Making sparse rows of minibatches dense, some minibatches ahead of their use.


class Densifier:
    """Makes rows dense, in its own threads, which do not wait for decoding.

    Parameters
    ----------
    n_threads
        Number of threads, and of groups that they make ahead.
    pool
        Pool for the memory of dense rows.
    transforms
        Transforms of dense rows, by element.
    counters
        Counters of time.
    """

    def __init__(
        self,
        n_threads: int,
        pool: BufferPool,
        transforms: Mapping[str, ElementTransforms],
        counters: Counters,
    ) -> None:
        self._n_threads, self._pool = n_threads, pool
        self._transforms, self._counters = transforms, counters
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="cellfeed-dense")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def groups(self, groups: Iterator[Cells], *, first_alone: bool) -> Iterator[Cells]:
        """Iterate over groups with dense elements.

        Parameters
        ----------
        groups
            Groups with rows of any layout.
        first_alone
            Whether the first group arrives before any other group is available.
        """
        if first_alone:
            yield from map(self._made_dense, islice(groups, 1))
        yield from ahead(self._made_dense, groups, self._threads, self._n_threads)

    def _made_dense(self, cells: Cells) -> Cells:
        with self._counters.wall_time(Counter.DENSIFYING):
            elements = {name: self._dense_rows(name, rows) for name, rows in cells.items()}
        return Cells(elements, cells.obs, cells.rows)

    def _dense_rows(self, name: str, rows: Any) -> Any:
        if not isinstance(rows, CsrRows):
            return rows
        group = DenseGroup(len(rows.indptr) - 1, (rows.n_vars,), rows.data.dtype)
        memory = self._pool.acquire(group.n_bytes)
        dense = group.over(memory)
        rows.densify_into(dense)
        if name in self._transforms:
            self._transforms[name].dense.apply([group.located(memory)])
        return dense


class Readable(Protocol):
    """The collection that a `Reader` needs."""

    @property
    def elements(self) -> Mapping[str, Element]: ...

    @property
    def obs(self) -> Mapping[str, ObsColumn]: ...

    def parts(self, runs: Runs) -> Mapping[str, Sequence[Part]]: ...


class Reader:
    """Reads rows of one collection, with its own threads.

    Rows are copied from decoded chunks directly to their destinations in groups of rows that are
    delivered together, such as minibatches. Each group has its own memory for each element, which
    is reused when nothing refers to it any longer.

    Parameters
    ----------
    collection
        The collection.
    dtype
        Dtype of all elements, or dtypes of some by name; those of the collection if None.
    num_threads
        Number of threads that read and decode. If None, the number of processors available to this
        process.
    pools
        Pools for memory; the reader's own if None.
    transforms
        Transforms by element; these elements are read as float32 or float64.
    verify
        How often chunks are checked; see `Decoder`.
    counters
        Counters of work and time.
    """

    def __init__(
        self,
        collection: Readable,
        *,
        dtype: Dtypes = None,
        num_threads: int | None = None,
        pools: Pools | None = None,
        transforms: Transforms | None = None,
        verify: Verify = "first",
        counters: Counters | None = None,
    ) -> None:
        self._collection = collection
        self._dtypes = dtypes_of(collection.elements, dtype)
        self._counters = Counters() if counters is None else counters
        self._transforms = {
            name: ElementTransforms.of(
                each, collection.elements[name].layout, self._dtypes[name], self._counters
            )
            for name, each in (transforms or {}).items()
        }
        # What values go through while they are decoded.
        self._steps = {
            name: each.stored
            for name, each in self._transforms.items()
            if each.stored and not each.stored.need_columns
        }
        self._n_threads = num_threads or usable_cpu_count()
        self._threads = ThreadPoolExecutor(self._n_threads, thread_name_prefix="cellfeed-read")
        self._decoder = Decoder(self._threads, self._n_threads, verify, self._counters)
        self._rest_thread = ThreadPoolExecutor(1, thread_name_prefix="cellfeed-rest")
        self._rest: Future[Iterator[Cells]] | None = None
        self._pools = Pools() if pools is None else pools
        self._densifier = Densifier(
            self._n_threads, self._pools.dense, self._transforms, self._counters
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads; rows that were read stay valid."""
        self._rest_thread.shutdown(wait=True, cancel_futures=True)  # which waits for the others
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._densifier.close()
        self._rest = None  # which refers to this

    def read(self, rows: NDArray[np.int64], order: NDArray[np.intp] | None = None) -> Cells:
        """Read rows as one group.

        Parameters
        ----------
        rows
            Distinct rows, ascending, within the collection.
        order
            ``rows[order]`` are the returned cells; all rows, ascending, if None.

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
        return self.read_planned(self.plan(rows, order, group_size).readahead())

    def plan(
        self, rows: NDArray[np.int64], order: NDArray[np.intp], group_size: int
    ) -> PlannedRead:
        """Plan reading rows as groups of equal size, such as minibatches; the last may be smaller.

        Parameters
        ----------
        rows
            Distinct rows, ascending, within the collection.
        order
            ``rows[order]`` are the cells in the order of delivery.
        group_size
            Number of cells in a group.

        Raises
        ------
        FormatError
            A file is damaged, or was replaced since it was opened.
        ParameterError
            The rows are larger than the machine's memory.
        """
        bounds = np.append(np.arange(0, max(1, order.size), group_size), order.size)
        parts = self._collection.parts(merge_consecutive(rows))
        reads = dict[str, ElementRead]()
        for name, element in self._collection.elements.items():
            plan = ElementPlan(
                n_distinct=rows.size,
                order=order,
                bounds=bounds,
                row_shape=element.row_shape,
                dtype=self._dtypes[name],
                first_number=len(reads) * (bounds.size - 1),
                steps=self._steps.get(name),
            )
            own = parts[name]
            plans = {"csr": plan.csr, "dense": plan.dense, "ragged": plan.ragged}
            reads[name] = plans[element.layout](own)
        delivered = rows[order]
        return PlannedRead(
            elements=reads,
            rows=delivered,
            obs={name: each.values[delivered] for name, each in self._collection.obs.items()},
            bounds=bounds,
        )

    def laid_out(self, planned: PlannedRead) -> PlannedRead:
        """Return the same read, after reading the chunks that determine the lengths of rows.

        This runs while the previous read is still in progress. Rows that a source reads itself
        are left to `read_planned`, since sources are called from one thread at a time.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        try:
            with self._counters.processor_time(Counter.PLANNING):
                elements = {
                    name: each.lay_out(self._decoder) if each.is_decoded_here else each
                    for name, each in planned.elements.items()
                }
        except BaseException:
            planned.let_go()
            raise
        return replace(planned, elements=elements)

    def read_planned(self, planned: PlannedRead, *, first_alone: bool = False) -> Iterator[Cells]:
        """Execute a planned read, and return its groups in the order of delivery.

        Parameters
        ----------
        planned
            The planned read.
        first_alone
            Whether to return as soon as the first group is ready, if only chunks of local files are
            read; other groups are waited for, and their errors raised, when they are due.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        try:
            return self._read(planned, first_alone=first_alone)
        finally:
            planned.let_go()

    def _read(self, planned: PlannedRead, *, first_alone: bool) -> Iterator[Cells]:
        if self._rest is not None:  # which is due before this
            wait([self._rest])
            self._rest = None
        with self._counters.processor_time(Counter.PLANNING):
            laid_out = {
                name: each.lay_out(self._decoder) for name, each in planned.elements.items()
            }
            buffers = {
                name: [self._memory(group, is_zeroed=each.is_zeroed) for group in each.groups]
                for name, each in laid_out.items()
            }
            bases = np.array([each.address for some in buffers.values() for each in some], np.int64)
            reads = ChunkReads.concatenate(
                [reads for each in laid_out.values() for reads in each.reads]
            )
        if first_alone and self._are_chunks(laid_out, reads) and planned.bounds[1:-1].size:
            return self._first_alone(planned, laid_out, buffers, bases, reads)
        distinct = self._fill(laid_out, buffers, bases, reads)
        with_sums = {name for name, each in distinct.items() if not all(each)}
        # What is added up may not be transformed yet, as some of it is in a read that was planned
        # before such a one was met.
        if any(laid_out[name].as_stored is not None for name in with_sums):
            distinct = self._fill(laid_out, buffers, bases, reads.without_steps())
            laid_out = {name: replace(each, as_stored=None) for name, each in laid_out.items()}
            for name in with_sums:
                self._steps.pop(name, None)  # nor that of the fetches to come
        self._transform(laid_out, buffers, distinct)
        # One by one as they are used, by whoever uses them: meanwhile the next are decoded.
        groups = {name: each.groups for name, each in laid_out.items()}
        return self._groups_of(planned, groups, buffers, distinct)

    def _are_chunks(self, laid_out: Mapping[str, LaidOut], reads: ChunkReads) -> bool:
        """Whether all rows come from chunks of local files, each row once."""
        are_decoded = all(each.is_decoded_here for each in laid_out.values())
        are_copied = any(some.sizes.size for each in laid_out.values() for some in each.copies)
        return are_decoded and not (are_copied or reads.are_brought)

    def _first_alone(
        self,
        planned: PlannedRead,
        laid_out: Mapping[str, LaidOut],
        buffers: Mapping[str, list[Buffer]],
        bases: NDArray[np.int64],
        reads: ChunkReads,
    ) -> Iterator[Cells]:
        """Read the chunks of the first group, and the others while the first is used."""
        is_first = np.zeros(bases.size, np.bool_)
        is_first[:: planned.bounds.size - 1] = True  # of each element
        # Values are transformed where they lie: a row that is in chunks of both parts would be
        # halfway through steps, and what is added up may go through none before.
        first_reads, other_reads = divide_reads(reads.without_steps(), is_first)
        ascending = first_reads.run(bases, self._decoder).ascending

        def groups(which: slice, *, ascending: bool) -> Iterator[Cells]:
            bounds = planned.bounds[which.start : None if which.stop is None else which.stop + 1]
            some = {
                name: replace(each, groups=each.groups[which], as_stored=None)
                for name, each in laid_out.items()
            }
            memory = {name: each[which] for name, each in buffers.items()}
            distinct = {} if ascending else self._sorted(some, memory)
            self._transform(some, memory, distinct)
            own = {name: each.groups for name, each in some.items()}
            return self._groups_of(replace(planned, bounds=bounds), own, memory, distinct)

        def others() -> Iterator[Cells]:
            others_ascend = other_reads.run(bases, self._decoder).ascending
            return groups(slice(1, None), ascending=ascending and others_ascend)

        first = groups(slice(0, 1), ascending=ascending)
        self._rest = self._rest_thread.submit(others)
        return _first_and_rest(first, self._rest)

    def _fill(
        self,
        laid_out: Mapping[str, LaidOut],
        buffers: Mapping[str, Sequence[Buffer]],
        bases: NDArray[np.int64],
        reads: ChunkReads,
    ) -> Mapping[str, Sequence[bool]]:
        """Fill memory; return whether each group has distinct columns, or nothing if all have."""
        ordered = reads.run(bases, self._decoder).ascending
        direct = [rows for each in laid_out.values() for rows in each.direct]
        ordered &= decode(direct, bases, self._decoder)
        for each in laid_out.values():
            for placed in each.placed:
                with self._counters.wall_time(Counter.LIBRARY):
                    ordered &= placed.place(bases)
            for copies in each.copies:
                with self._counters.wall_time(Counter.PLACING):
                    kernels.copy_all(
                        bind(copies.sources, bases), bind(copies.targets, bases), copies.sizes
                    )
        return {} if ordered else self._sorted(laid_out, buffers)

    def _transform(
        self,
        laid_out: Mapping[str, LaidOut],
        buffers: Mapping[str, Sequence[Buffer]],
        distinct: Mapping[str, Sequence[bool]],
    ) -> None:
        """Transform values, except in groups whose duplicate columns must be summed first."""
        for name, transforms in self._transforms.items():
            if laid_out[name].went_through:
                continue
            groups, rows = laid_out[name].groups, laid_out[name].as_stored
            is_distinct = distinct.get(name, [True] * len(groups))
            located = [
                group.located(memory)
                for group, memory, is_done in zip(groups, buffers[name], is_distinct, strict=True)
                if is_done and not isinstance(group, RaggedGroup)  # which go through none
            ]
            begin = time.perf_counter_ns()
            transforms.stored.apply(located, rows, self._threads, self._n_threads)
            taken = time.perf_counter_ns() - begin
            self._counters.add(Counter.PLACING, taken * self._n_threads)

    def _sorted(
        self, laid_out: Mapping[str, LaidOut], buffers: Mapping[str, Sequence[Buffer]]
    ) -> dict[str, list[bool]]:
        """Sort sparse rows by column; return for each group whether columns are distinct."""

        def sort(group: Group, buffer: Buffer) -> bool:
            with self._counters.wall_time(Counter.PLACING):
                return not isinstance(group, CsrGroup) or group.sort(buffer)

        return {
            name: list(self._threads.map(sort, each.groups, buffers[name]))
            for name, each in laid_out.items()
        }

    def _groups_of(
        self,
        planned: PlannedRead,
        groups: Mapping[str, Sequence[Group]],
        buffers: dict[str, list[Buffer]],
        distinct: Mapping[str, Sequence[bool]],
    ) -> Iterator[Cells]:
        for some in buffers.values():
            some.reverse()
        bounds = planned.bounds.tolist()
        for k, here in enumerate(map(slice, bounds[:-1], bounds[1:])):
            elements: dict[str, Any] = {}
            for name, of_element in groups.items():
                # Memory is popped, so that it is kept by nobody but the minibatch.
                group, memory = of_element[k], buffers[name].pop()
                if isinstance(group, CsrGroup) and distinct and not distinct[name][k]:
                    summed = group.over(memory, distinct=False)
                    if name in self._transforms:
                        self._transforms[name].stored.apply([summed.located()])
                    elements[name] = summed
                    del summed
                else:
                    elements[name] = group.over(memory)
                del memory
            obs = {name: values[here] for name, values in planned.obs.items()}
            cells = Cells(elements, obs, planned.rows[here])
            del elements
            yield cells
            del cells

    def _memory(self, group: Group, *, is_zeroed: bool) -> Buffer:
        is_sparse = isinstance(group, CsrGroup)
        buffer = (self._pools.sparse if is_sparse else self._pools.others).acquire(group.n_bytes)
        if is_zeroed:
            buffer.array(np.dtype(np.uint8), group.n_bytes)[...] = 0
        return buffer

    def read_bytes(self, planned: PlannedRead) -> int:
        """Read the bytes of the chunks of a fetch and discard them; return how many there are."""
        return planned.chunks.without_decoding().decompress(self._decoder).n_bytes

    def decompress(self, planned: PlannedRead) -> None:
        """Read and decompress the chunks of a fetch, without placing rows."""
        planned.chunks.decompress(self._decoder)

    def densified(self, groups: Iterator[Cells]) -> Iterator[Cells]:
        """Iterate over groups with dense elements, making some of them dense ahead of time."""
        return self._densifier.groups(groups, first_alone=self._rest is not None)


def _first_and_rest(first: Iterator[Cells], rest: Future[Iterator[Cells]]) -> Iterator[Cells]:
    yield from first
    yield from rest.result()
