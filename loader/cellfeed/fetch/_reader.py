"""Reading rows of a collection directly into minibatches, in the order of delivery."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._buffers import Buffer, bind, groups_of
from cellfeed.decode import ChunkReads, Counter, Counters, Decoder, ValueSteps, Verify, kernels
from cellfeed.decode._kernels import _fields as fields
from cellfeed.fetch._element_read import ElementRead, PartRows, RowLayout, Selections
from cellfeed.fetch._parts import (
    Part,
    ReplaceRows,
    RowTransform,
    Transforms,
    require_rows,
    split_steps,
)
from cellfeed.fetch._prefetch import ByteBudget, Pools, Stage, in_stages, prefetched
from cellfeed.machine import usable_cpu_count
from cellfeed.rows import Cells, CsrRows, Dtypes, Element, Group, ObsColumn, dtypes_of
from cellfeed.sampling import Fetch, Share


class Requests:
    """What a fetch requests before it is read: one object, which owns the requests.

    Parameters
    ----------
    reads
        Chunks that the fetch may need.
    parts
        Rows that sources read themselves.

    Attributes
    ----------
    expected_bytes
        Number of compressed bytes to request from byte stores and sources; an upper bound for files
        of one chunk.
    """

    def __init__(self, reads: Sequence[ChunkReads] = (), parts: Sequence[Part] = ()) -> None:
        self._local = [each for each in reads if not each.are_requested]
        # Of all elements at once, so that neighbours in a file are requested together.
        self._stored = ChunkReads.concatenate(
            [each.without_placing() for each in reads if each.are_requested]
        )
        self._parts = [part for part in parts if part.expected_bytes]
        expected = sum(part.expected_bytes for part in self._parts)
        self.expected_bytes = self._stored.requested_bytes + expected
        self._pending = list[object]()

    def begin(self) -> None:
        """Announce the reads to the system, and start the requests, without waiting."""
        if self._local:
            ChunkReads.advise(self._local)
        if self._stored.n_chunks:
            self._pending += self._stored.readahead()
        self._pending += [part.stored.expect(part.runs) for part in self._parts]

    def cancel(self) -> None:
        """Cancel requests that have not been read."""
        self._pending.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """The reads of a fetch, before memory is allocated for it.

    Parameters
    ----------
    elements
        The read of each element.
    rows, obs, bounds
        Rows in the order of delivery, their obs columns, and the bounds of groups.
    requests
        What is requested before it is read.
    obs_names
        Names of the rows, if they are delivered.
    """

    elements: Mapping[str, ElementRead]
    rows: NDArray[np.int64]
    obs: Mapping[str, NDArray[Any]]
    bounds: NDArray[np.int64]
    requests: Requests
    obs_names: Future[NDArray[np.object_]] | None = None

    @property
    def chunks(self) -> ChunkReads:
        """Chunks of all elements, for reading and decompressing without placing."""
        return ChunkReads.concatenate(_chunks_of(self.elements))

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        return all(each.is_decoded_here for each in self.elements.values())

    def readahead(self) -> "PlannedRead":
        """Begin the requests; return this, which keeps them alive."""
        self.requests.begin()
        return self


def _chunks_of(elements: Mapping[str, ElementRead]) -> list[ChunkReads]:
    return [reads for each in elements.values() for reads in each.chunks]


class Readable(Protocol):
    """The collection that a `Reader` needs."""

    @property
    def elements(self) -> Mapping[str, Element]: ...

    @property
    def obs(self) -> Mapping[str, ObsColumn]: ...

    @property
    def delivers_obs_names(self) -> bool: ...

    def obs_names(self, rows: NDArray[np.int64]) -> NDArray[np.object_]: ...

    def parts(self, rows: NDArray[np.int64]) -> Mapping[str, Sequence[Part]]: ...


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
    sum_duplicates
        Whether sparse elements of a row with the same column are summed.
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
        sum_duplicates: bool = True,
    ) -> None:
        self._collection, self._sum_duplicates = collection, sum_duplicates
        self._dtypes = dtypes_of(collection.elements, dtype)
        self._counters = Counters() if counters is None else counters
        self._transforms = dict[str, ValueSteps]()
        self._replaced = dict[str, tuple[RowTransform, ReplaceRows]]()
        for name, steps in (transforms or {}).items():
            element, (of_values, of_rows, following) = collection.elements[name], split_steps(steps)
            if of_values:
                self._transforms[name] = ValueSteps(of_values, self._dtypes[name], self._counters)
            if of_rows is not None:
                replace_rows = of_rows.bind(element, following, self._counters)
                self._replaced[name] = of_rows, replace_rows
        num_threads = num_threads or usable_cpu_count()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="cellfeed-read")
        self._decoder = Decoder(self._threads, num_threads, verify, self._counters)
        # Reads names, and the groups of a fetch after the first, if that is delivered alone.
        self._remaining_thread = ThreadPoolExecutor(1, thread_name_prefix="cellfeed-remaining")
        self._remaining: Future[Iterator[Cells]] | None = None
        self._pools = Pools() if pools is None else pools
        # Threads of their own do not wait for decoding.
        self._dense_threads = ThreadPoolExecutor(num_threads, thread_name_prefix="cellfeed-dense")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads; rows that were read stay valid."""
        self._remaining_thread.shutdown(wait=True, cancel_futures=True)  # it waits for the others
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._dense_threads.shutdown(wait=True, cancel_futures=True)
        self._remaining = None  # which refers to this

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
        self,
        rows: NDArray[np.int64],
        order: NDArray[np.intp],
        groups: int | NDArray[np.int64],
    ) -> PlannedRead:
        """Plan reading rows as groups, such as minibatches.

        Parameters
        ----------
        rows
            Distinct rows, ascending, within the collection.
        order
            ``rows[order]`` are the cells in the order of delivery.
        groups
            Number of cells in each group, of which the last may be smaller; or where groups begin
            and end in ``order``, ascending, shape (n_groups + 1,).

        Raises
        ------
        FormatError
            A file is damaged, or was replaced since it was opened.
        ParameterError
            The rows are larger than the machine's memory.
        """
        bounds = np.asarray(groups)
        if not bounds.ndim:
            bounds = np.append(np.arange(0, max(1, order.size), int(bounds)), order.size)
        parts = self._collection.parts(rows)
        reads, selection_cache = dict[str, ElementRead](), Selections()
        for name, element in self._collection.elements.items():
            layout, row_shape, dtype = element.layout, element.row_shape, self._dtypes[name]
            read = ElementRead(
                layout=layout,
                row_shape=row_shape,
                dtype=dtype,
                order=order,
                bounds=bounds,
                first_number=len(reads) * (bounds.size - 1),
                rows=[PartRows.of(part, layout, row_shape, dtype) for part in parts[name]],
            )
            reads[name] = (
                read.with_layout(self._decoder, selection_cache) if read.is_known else read
            )
        delivered = rows[order]
        return PlannedRead(
            elements=reads,
            rows=delivered,
            obs={name: each.values[delivered] for name, each in self._collection.obs.items()},
            bounds=bounds,
            requests=Requests(
                _chunks_of(reads), [part for each in reads.values() for part in each.library_parts]
            ),
        )

    def with_layouts(self, planned: PlannedRead) -> PlannedRead:
        """Return the same read, after reading the chunks that determine the lengths of rows.

        This runs while the previous read is still in progress. Rows that a source reads itself
        are left to `read_planned`, since a source reads in one thread at a time.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        try:
            with self._counters.processor_time(Counter.PLANNING):
                selection_cache = Selections()
                elements = {
                    name: each.with_layout(self._decoder, selection_cache)
                    if each.is_decoded_here
                    else each
                    for name, each in planned.elements.items()
                }
        except BaseException:
            planned.requests.cancel()
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
            planned.requests.cancel()

    def _read(self, planned: PlannedRead, *, first_alone: bool) -> Iterator[Cells]:
        if self._remaining is not None:  # which is due before this
            wait([self._remaining])
            self._remaining = None
        if self._collection.delivers_obs_names:
            names = self._remaining_thread.submit(self._read_names, planned.rows)
            planned = replace(planned, obs_names=names)
        with self._counters.processor_time(Counter.PLANNING):
            selection_cache = Selections()
            layouts = {
                name: each.find_layout(self._decoder, selection_cache)
                for name, each in planned.elements.items()
            }
            memory = {name: self._memory(each) for name, each in layouts.items()}
            bases = np.array([each.address for some in memory.values() for each in some], np.int64)
            reads = ChunkReads.concatenate(
                [reads for each in layouts.values() for reads in each.reads]
            )
        if first_alone and planned.bounds[1:-1].size and _are_local_chunks(layouts, reads):
            return self._first_alone(planned, layouts, memory, bases, reads)
        ordered = self._fill(layouts, bases, reads)
        distinct = {} if ordered else self._sorted(layouts, memory)
        self._transform(layouts, memory, distinct)
        return self._delivered(planned, layouts, memory, distinct)

    def _read_names(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        with self._counters.wall_time(Counter.LIBRARY):
            return self._collection.obs_names(rows)

    def _memory(self, layout: RowLayout) -> list[Buffer]:
        """Return memory for each group."""
        buffers = list[Buffer]()
        for group in layout.groups:
            pool = self._pools.sparse if group.layout == "csr" else self._pools.others
            buffers.append(pool.acquire(group.n_bytes))
            if layout.is_zeroed:
                buffers[-1].array(np.dtype(np.uint8), group.n_bytes)[...] = 0
        return buffers

    def _first_alone(
        self,
        planned: PlannedRead,
        layouts: Mapping[str, RowLayout],
        memory: Mapping[str, list[Buffer]],
        bases: NDArray[np.int64],
        reads: ChunkReads,
    ) -> Iterator[Cells]:
        """Read the chunks of the first group, and the others while the first is used."""
        is_first = np.zeros(bases.size, np.bool_)
        is_first[:: planned.bounds.size - 1] = True  # of each element
        first_reads, other_reads = divide_reads(reads, is_first)
        first_ascend = first_reads.run(bases, self._decoder).ascending

        def finished(which: slice, *, ascending: bool) -> Iterator[Cells]:
            bounds = planned.bounds[which.start : None if which.stop is None else which.stop + 1]
            own = {name: replace(each, groups=each.groups[which]) for name, each in layouts.items()}
            own_memory = {name: each[which] for name, each in memory.items()}
            distinct = {} if ascending else self._sorted(own, own_memory)
            self._transform(own, own_memory, distinct)
            return self._delivered(replace(planned, bounds=bounds), own, own_memory, distinct)

        def remaining() -> Iterator[Cells]:
            others_ascend = other_reads.run(bases, self._decoder).ascending
            return finished(slice(1, None), ascending=first_ascend and others_ascend)

        first = finished(slice(0, 1), ascending=first_ascend)
        self._remaining = self._remaining_thread.submit(remaining)
        return _first_and_remaining(first, self._remaining)

    def _fill(
        self, layouts: Mapping[str, RowLayout], bases: NDArray[np.int64], reads: ChunkReads
    ) -> bool:
        """Fill memory; return whether the columns of each sparse row ascend strictly."""
        ordered = reads.run(bases, self._decoder).ascending
        for each in layouts.values():
            for place in each.placed:
                with self._counters.wall_time(Counter.LIBRARY):
                    ordered &= place(bases)
            for sources, targets, sizes in each.copies:
                with self._counters.wall_time(Counter.PLACING):
                    kernels.copy_all(bind(sources, bases), bind(targets, bases), sizes)
        return ordered

    def _sorted(
        self, layouts: Mapping[str, RowLayout], memory: Mapping[str, Sequence[Buffer]]
    ) -> dict[str, list[bool]]:
        """Sort sparse rows by column; return for each group whether columns are distinct."""

        def sort(some: Sequence[tuple[Group, Buffer]]) -> list[bool]:
            with self._counters.wall_time(Counter.PLACING):
                return [group.sort(buffer) for group, buffer in some]

        distinct = dict[str, list[bool]]()
        for name, each in layouts.items():
            pairs = [*zip(each.groups, memory[name], strict=True)]
            step = max(1, -(-len(pairs) // self._decoder.num_threads))
            shares = [pairs[k : k + step] for k in range(0, len(pairs), step)]
            distinct[name] = [one for share in self._threads.map(sort, shares) for one in share]
        return distinct

    def _transform(
        self,
        layouts: Mapping[str, RowLayout],
        memory: Mapping[str, Sequence[Buffer]],
        distinct: Mapping[str, Sequence[bool]],
    ) -> None:
        """Transform values, except in groups whose duplicate columns must be summed first."""
        for name, transforms in self._transforms.items():
            layout = layouts[name]
            is_distinct = distinct.get(name, [True] * len(layout.groups))
            located = [
                group.located(buffer)
                for group, buffer, is_done in zip(
                    layout.groups, memory[name], is_distinct, strict=True
                )
                if is_done and group.layout != "ragged"  # which have no transforms
            ]
            begin = time.perf_counter_ns()
            num_threads = self._decoder.num_threads
            transforms.apply(located, self._threads, num_threads)
            taken = time.perf_counter_ns() - begin
            self._counters.add(Counter.PLACING, taken * num_threads)

    def _delivered(
        self,
        planned: PlannedRead,
        layouts: Mapping[str, RowLayout],
        memory: Mapping[str, list[Buffer]],
        distinct: Mapping[str, Sequence[bool]],
    ) -> Iterator[Cells]:
        """Yield the groups.

        Each is made when it is due, by the thread that uses it: meanwhile the next fetch is
        decoded.
        """
        for some in memory.values():
            some.reverse()
        bounds, groups = planned.bounds.tolist(), {n: each.groups for n, each in layouts.items()}
        all_names = None if planned.obs_names is None else planned.obs_names.result()
        del layouts
        for k, here in enumerate(map(slice, bounds[:-1], bounds[1:])):
            elements: dict[str, Any] = {}
            for name, of_element in groups.items():
                # Memory is popped, so that only the minibatch refers to it.
                group, buffer = of_element[k], memory[name].pop()
                is_distinct = not distinct or distinct[name][k]
                if group.layout == "csr" and self._sum_duplicates and not is_distinct:
                    summed = group.over(buffer, distinct=False)
                    if name in self._transforms:
                        self._transforms[name].apply([summed.located()])
                    elements[name] = summed
                    del summed
                else:
                    elements[name] = group.over(buffer)
                del buffer
            obs = {name: values[here] for name, values in planned.obs.items()}
            names = None if all_names is None else all_names[here]
            cells = Cells(elements, obs, planned.rows[here], names)
            del elements
            yield cells
            del cells

    def read_bytes(self, planned: PlannedRead) -> int:
        """Read the bytes of the chunks of a fetch and discard them; return how many there are."""
        return planned.chunks.without_decoding().decompress(self._decoder).n_bytes

    def decompress(self, planned: PlannedRead) -> None:
        """Read and decompress the chunks of a fetch, without placing rows."""
        planned.chunks.decompress(self._decoder)

    def finished(self, groups: Iterator[Cells], *, dense: bool, key: int) -> Iterator[Cells]:
        """Return groups whose elements are dense or replaced; threads make the next ones meanwhile.

        Parameters
        ----------
        groups
            The groups.
        dense
            Whether sparse elements are made dense.
        key
            Key of the epoch, for what row transforms draw.
        """
        return self._finished(groups, dense, key) if dense or self._replaced else groups

    def _finished(self, groups: Iterator[Cells], dense: bool, key: int) -> Iterator[Cells]:  # noqa: FBT001
        def finish(cells: Cells) -> Cells:
            elements = dict[str, Any]()
            for name, rows in cells.items():
                if name in self._replaced:
                    transform, replace_rows = self._replaced[name]
                    with self._counters.wall_time(Counter.TOKENIZING):
                        made = replace_rows(rows, cells.rows, key, self._pools.dense)
                    elements |= require_rows(made, transform, len(cells), cells.obs)
                elif dense:
                    with self._counters.wall_time(Counter.DENSIFYING):
                        elements[name] = self._dense_rows(rows)
                else:
                    elements[name] = rows
            return replace(cells, elements=elements)

        if self._remaining is not None:  # the first group arrives before the others
            yield from map(finish, islice(groups, 1))
        yield from prefetched(finish, groups, self._dense_threads, self._decoder.num_threads)

    def _dense_rows(self, rows: Any) -> Any:
        if not isinstance(rows, CsrRows):
            return rows
        group = Group.dense(*rows.shape, rows.data.dtype)
        memory = self._pools.dense.acquire(group.n_bytes)
        dense = group.over(memory)
        rows.densify_into(dense)
        return dense


def _first_and_remaining(
    first: Iterator[Cells], remaining: Future[Iterator[Cells]]
) -> Iterator[Cells]:
    yield from first
    yield from remaining.result()


def _are_local_chunks(layouts: Mapping[str, RowLayout], reads: ChunkReads) -> bool:
    """Return whether all rows come from chunks of local files, each row once."""
    are_others = any(each.placed for each in layouts.values())
    are_copied = any(sizes.size for each in layouts.values() for *_, sizes in each.copies)
    return not (are_others or are_copied or reads.are_requested)


# Dividing reads by destination, so that some groups can be used before the others.


def divide_reads(reads: ChunkReads, is_first: NDArray[np.bool_]) -> tuple[ChunkReads, ChunkReads]:
    """Divide reads into the chunks of some groups of rows, and the remaining chunks.

    Running both parts, one after the other, is equivalent to the original reads. A chunk in the
    first part is decoded there for other groups too.

    Parameters
    ----------
    reads
        The reads.
    is_first
        Whether each group is complete after the first part, shape (n_groups,).
    """
    table, segments = reads.chunks, reads.segments
    n_segments = table[:, fields.END_SEGMENT] - table[:, fields.FIRST_SEGMENT]
    n_before = np.append(0, np.cumsum(is_first[groups_of(segments[:, fields.TO])]))
    of_first = n_before[table[:, fields.END_SEGMENT]] > n_before[table[:, fields.FIRST_SEGMENT]]

    def part(*, first: bool) -> ChunkReads:
        are_in = of_first == first
        chunks, ends = table[are_in], np.cumsum(n_segments[are_in])
        chunks[:, fields.FIRST_SEGMENT] = ends - n_segments[are_in]
        chunks[:, fields.END_SEGMENT] = ends
        own = segments[np.repeat(are_in, n_segments)]
        crossings = reads.crossings[is_first[groups_of(reads.crossings)] == first]
        return replace(reads, chunks=chunks, segments=own, crossings=crossings)

    return part(first=True), part(first=False)


# Reading the fetches of an epoch ahead of their delivery.


def fetches_of(
    share: Share,
    reader: Reader,
    *,
    are_whole: bool,
    prefetch: int,
    prefetch_bytes: int,
    counters: Counters,
) -> Generator[tuple[Fetch, Iterator[Cells]], None, None]:
    """Read fetches ahead: one while another is delivered, and further ones are requested.

    Parameters
    ----------
    share
        The share of this process in an epoch.
    reader
        The reader; closed at the end.
    are_whole
        Whether each fetch is read as one group, with all its rows, in storage order.
    prefetch
        Number of fetches that are planned and requested beyond the one that is read.
    prefetch_bytes
        Maximum number of bytes in flight for these fetches and for the one that is read.
    counters
        Counters of work and time.

    Yields
    ------
    Each fetch, and its groups of rows, such as minibatches.
    """
    undelivered, budget = deque[Fetch](), ByteBudget(prefetch_bytes)
    is_waited_for = iter([True])  # the first one, as nothing was prefetched before it

    def begun(number: int) -> Future[PlannedRead]:
        with counters.processor_time(Counter.PLANNING):
            if are_whole:
                fetch = share.whole_fetch(number)
                read = reader.plan(fetch.rows, np.arange(fetch.rows.size), fetch.rows.size)
            else:
                fetch = share.fetch(number)
                read = reader.plan(fetch.rows, *fetch.in_groups(share.plan.minibatch_size))
        undelivered.append(fetch)
        counters.add(Counter.FETCHES, 1)
        return budget.begin(read.requests.expected_bytes, read.readahead)

    def laid_out(begun: Future[PlannedRead]) -> PlannedRead:
        read = begun.result()
        try:
            return reader.with_layouts(read)
        except BaseException:
            budget.release(read.requests.expected_bytes)
            raise

    def read(laid_out: PlannedRead) -> Iterator[Cells]:
        try:
            return reader.read_planned(laid_out, first_alone=next(is_waited_for, False))
        finally:
            budget.release(laid_out.requests.expected_bytes)

    if prefetch == 1:  # without a thread of their own for plans
        stages = [Stage(lambda number: laid_out(begun(number)), 1), Stage(read, 1)]
    else:
        # The one that is laid out and not yet read is one of them.
        stages = [Stage(begun, prefetch - 1), Stage(laid_out, 1), Stage(read, 1)]
    with reader, in_stages(share.numbers, stages) as groups, budget:
        # `map` drops each group once yielded; a generator expression would keep it.
        yield from map(lambda each: (undelivered.popleft(), each), groups)  # noqa: C417
