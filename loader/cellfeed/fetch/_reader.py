"""Reading rows of a collection directly into minibatches, in the order of delivery."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.bytes._buffers import Buffer, BufferPool, bind, groups_of
from cellfeed.decode import ChunkReads, Counter, Counters, Decoder, ValueSteps, Verify, kernels
from cellfeed.decode._kernels import _fields as fields
from cellfeed.fetch._element_read import ElementRead, Part, Selections
from cellfeed.fetch._prefetch import ByteBudget, Pools, Stage, in_stages, prefetched
from cellfeed.machine import usable_cpu_count
from cellfeed.rows import Cells, CsrRows, Dtypes, Element, Group, ObsColumn, dtypes_of
from cellfeed.sampling import Fetch, Share
from cellfeed.transforms import Transform

# Transforms that replace the rows of an element in each minibatch, such as tokenizers.


ReplaceRows = Callable[[CsrRows | NDArray[Any], NDArray[np.int64], int, BufferPool], dict[str, Any]]
"""Makes what a minibatch has in place of rows; called by several threads at once.

It gets the rows of one minibatch, float32 or float64, to which transforms of values have been
applied: sparse, or dense of shape (n_rows, n_columns); the row of each in the collection, int64,
shape (n_rows,); the key of (seed, epoch), for what is drawn at random (see
`cellfeed.sampling.random_words`); and memory for large arrays, which is used again once the
minibatch is dropped: ``pool.acquire(n_bytes).array(dtype, n)``. It returns arrays, `RaggedRows` or
`CsrRows` of as many rows, by the name they get.
"""


class RowTransform(ABC):
    """Base class of what replaces the rows of an element in each minibatch, such as tokenizers.

    In ``CellDataset(transform=[...])`` it comes after transforms of values
    (`cellfeed.transforms`). The decoding threads call it once the rows of a minibatch have
    arrived. Derived classes are frozen dataclasses, whose fields identify them in states.
    """

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Upper bound of what a row takes in a minibatch, in bytes."""

    def require_fit(self, element: Element) -> None:  # noqa: B027 - any element, by default
        """Check that it can replace the rows of an element; called before anything is read.

        Parameters
        ----------
        element
            The element, with ``name``, ``layout``, ``row_shape`` and ``column_names``.

        Raises
        ------
        ParameterError
            It cannot.
        """

    @abstractmethod
    def bind(self, element: Element, counters: Counters) -> ReplaceRows:
        """Return the function that replaces rows of an element; see above.

        ``counters`` count what is made, as ``counters.add(Counter.TOKENS, n)``.
        """


def require_rows(
    made: Any, transform: RowTransform, n_rows: int, obs: Container[str]
) -> Mapping[str, Any]:
    """Return what a row transform made of the rows of a minibatch, if that can be delivered.

    Raises
    ------
    ParameterError
        It is no dictionary, has something else than one row for each cell, or the name of an obs
        column.
    """
    if not isinstance(made, Mapping):
        msg = (
            f"{transform!r} must return a dictionary of arrays, `CsrRows` or `RaggedRows`, but "
            f"returned {type(made).__name__}"
        )
        raise ParameterError(msg)
    for name, rows in made.items():
        shape = getattr(rows, "shape", ())
        if shape[:1] != (n_rows,):
            found = f"{shape[0]:,} rows" if shape else type(rows).__name__
            msg = (
                f"{transform!r} must return a row for each of {n_rows:,} cells, but {name!r} is "
                f"{found}"
            )
            raise ParameterError(msg)
        if name in obs:
            msg = f"{transform!r} returns {name!r}, which is an obs column; choose another name"
            raise ParameterError(msg)
    return made


Step = Transform | RowTransform


def split_steps(steps: Sequence[Step]) -> tuple[list[Transform], RowTransform | None]:
    """Return transforms of values, and the row transform after them."""
    of_rows = next((each for each in steps if isinstance(each, RowTransform)), None)
    return [each for each in steps if isinstance(each, Transform)], of_rows


Transforms = Mapping[str, Sequence[Step]]
"""Transforms by the name of the element, in the order in which they are applied."""


# Planning and reading fetches.

_Groups = list[tuple[Group, Buffer]]  # of an element, with the memory of each


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
        for each in (*self._local, self._stored):
            self._pending += each.readahead()
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
        return ChunkReads.concatenate(
            [chunks for each in self.elements.values() for chunks in each.chunks]
        )

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        return all(each.is_decoded_here for each in self.elements.values())

    def readahead(self) -> "PlannedRead":
        """Begin the requests; return this, which keeps them alive."""
        self.requests.begin()
        return self


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
        self._ascend = True  # until columns of a row do not
        self._counters = Counters() if counters is None else counters
        self._transforms = dict[str, ValueSteps]()
        self._replaced = dict[str, tuple[RowTransform, ReplaceRows]]()
        for name, steps in (transforms or {}).items():
            element, (of_values, of_rows) = collection.elements[name], split_steps(steps)
            if of_values:
                self._transforms[name] = ValueSteps(of_values, self._dtypes[name], self._counters)
            if of_rows is not None:
                self._replaced[name] = of_rows, of_rows.bind(element, self._counters)
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
        parts, reads = self._collection.parts(rows), dict[str, ElementRead]()
        for name, element in self._collection.elements.items():
            layout, row_shape, dtype = element.layout, element.row_shape, self._dtypes[name]
            own = [part.planned(layout, row_shape, dtype) for part in parts[name]]
            read = ElementRead(
                layout=layout,
                row_shape=row_shape,
                dtype=dtype,
                order=order,
                bounds=bounds,
                first_number=len(reads) * (bounds.size - 1),
                parts=own,
            )
            is_known = all(part.lengths is not None for part in own)
            reads[name] = read.laid_out(self._decoder, {}) if is_known else read
        delivered = rows[order]
        return PlannedRead(
            elements=reads,
            rows=delivered,
            obs={name: each.values[delivered] for name, each in self._collection.obs.items()},
            bounds=bounds,
            requests=Requests(
                [chunks for each in reads.values() for chunks in each.chunks],
                [part for each in reads.values() for part in each.parts if part.chunks is None],
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
                selections: Selections = {}
                elements = {
                    name: each.laid_out(self._decoder, selections) if each.is_decoded_here else each
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
            selections: Selections = {}
            elements = {
                name: each.laid_out(self._decoder, selections)
                for name, each in planned.elements.items()
            }
            groups = {name: self._in_memory(each) for name, each in elements.items()}
            bases = np.array(
                [buffer.address for some in groups.values() for _, buffer in some], np.int64
            )
            # Whole rows are transformed in the cache, others once they are placed.
            inline = {} if first_alone or not self._ascend else self._transforms
            inline = {name: inline[name] for name in inline if elements[name].are_whole}
            named = ((name, own) for name, each in elements.items() for own in each.reads)
            reads = ChunkReads.concatenate(
                [own.with_steps(inline[name]) if name in inline else own for name, own in named]
            )
        copies = [each for read in elements.values() for each in read.copies if each[-1].size]
        placements = [each for read in elements.values() for each in read.placements]
        is_local = not (placements or copies or reads.are_requested)
        if first_alone and planned.bounds[1:-1].size and is_local:
            return self._first_alone(planned, groups, bases, reads)
        self._ascend = (ascending := reads.run(bases, self._decoder)) and self._ascend
        if inline and not ascending:
            # Duplicates are summed before they are transformed.
            inline = {}
            reads.with_steps(None).run(bases, self._decoder)
        for place in placements:
            with self._counters.wall_time(Counter.LIBRARY):
                ascending &= place(bases)
        with self._counters.wall_time(Counter.PLACING):
            for sources, targets, sizes in copies:
                kernels.copy_all(bind(sources, bases), bind(targets, bases), sizes)
        return self._completed(planned, groups, ascending=ascending, transformed=inline)

    def _read_names(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        with self._counters.wall_time(Counter.LIBRARY):
            return self._collection.obs_names(rows)

    def _in_memory(self, read: ElementRead) -> _Groups:
        """Return the groups of an element, each with memory."""
        groups = list[tuple[Group, Buffer]]()
        for group in read.groups or ():
            pool = self._pools.sparse if group.layout == "csr" else self._pools.others
            buffer = pool.acquire(group.n_bytes)
            if read.is_zeroed:
                buffer.array(np.dtype(np.uint8), group.n_bytes)[...] = 0
            groups.append((group, buffer))
        return groups

    def _first_alone(
        self,
        planned: PlannedRead,
        groups: Mapping[str, _Groups],
        bases: NDArray[np.int64],
        reads: ChunkReads,
    ) -> Iterator[Cells]:
        """Read the chunks of the first group, and the others while the first is used."""
        is_first = np.zeros(bases.size, np.bool_)
        is_first[:: planned.bounds.size - 1] = True  # of each element
        first_reads, other_reads = divide_reads(reads, is_first)
        self._ascend = are_first_ascending = first_reads.run(bases, self._decoder)

        def others() -> Iterator[Cells]:
            are_ascending = other_reads.run(bases, self._decoder) and are_first_ascending
            own = {name: some[1:] for name, some in groups.items()}
            read = replace(planned, bounds=planned.bounds[1:])
            return self._completed(read, own, ascending=are_ascending)

        own = {name: some[:1] for name, some in groups.items()}
        read = replace(planned, bounds=planned.bounds[:2])
        first = self._completed(read, own, ascending=are_first_ascending)
        self._remaining = self._remaining_thread.submit(others)
        return chain(first, chain.from_iterable(map(Future.result, [self._remaining])))

    def _completed(
        self,
        planned: PlannedRead,
        groups: Mapping[str, _Groups],
        *,
        ascending: bool,
        transformed: Container[str] = (),
    ) -> Iterator[Cells]:
        """Sort sparse rows by column if not ``ascending``, transform values, and yield the groups.

        Values of elements that are ``transformed`` already are left as they are.

        Groups are transformed here, except those whose duplicate columns must be summed first.
        """
        num_threads = self._decoder.num_threads
        distinct = dict[str, list[bool]]()
        for name, some in groups.items():
            distinct[name] = [True] * len(some) if ascending else self._sorted(some)
            if name in self._transforms and name not in transformed:
                located = [
                    group.located(buffer)
                    for (group, buffer), is_done in zip(some, distinct[name], strict=True)
                    if is_done and group.layout != "ragged"  # which have no transforms
                ]
                begin = time.perf_counter_ns()
                self._transforms[name].apply(located, self._threads, num_threads)
                taken = time.perf_counter_ns() - begin
                self._counters.add(Counter.PLACING, taken * num_threads)
        return self._delivered(planned, groups, distinct)

    def _sorted(self, groups: _Groups) -> list[bool]:
        """Sort sparse rows by column; return for each group whether columns are distinct."""

        def sort(some: _Groups) -> list[bool]:
            with self._counters.wall_time(Counter.PLACING):
                return [group.sort(buffer) for group, buffer in some]

        step = max(1, -(-len(groups) // self._decoder.num_threads))
        shares = [groups[k : k + step] for k in range(0, len(groups), step)]
        return [one for share in self._threads.map(sort, shares) for one in share]

    def _delivered(
        self,
        planned: PlannedRead,
        groups: Mapping[str, _Groups],
        distinct: Mapping[str, Sequence[bool]],
    ) -> Iterator[Cells]:
        """Yield the groups.

        Each is made when it is due, by the thread that uses it: meanwhile the next fetch is
        decoded.
        """
        for some in groups.values():
            some.reverse()
        bounds = planned.bounds.tolist()
        all_names = None if planned.obs_names is None else planned.obs_names.result()
        for k, here in enumerate(map(slice, bounds[:-1], bounds[1:])):
            elements: dict[str, Any] = {}
            for name, some in groups.items():
                # Memory is popped, so that only the minibatch refers to it.
                group, buffer = some.pop()
                if group.layout == "csr" and self._sum_duplicates and not distinct[name][k]:
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
        before = self._counters.values[Counter.BYTES_READ]
        planned.chunks.without_decoding().decompress(self._decoder)
        return int(self._counters.values[Counter.BYTES_READ] - before)

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
        if not (dense or self._replaced):
            return groups

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

        # The first group may arrive before the others.
        first = islice(groups, 0 if self._remaining is None else 1)
        num_threads = self._decoder.num_threads
        others = prefetched(finish, groups, self._dense_threads, num_threads)
        return chain(map(finish, first), others)

    def _dense_rows(self, rows: Any) -> Any:
        if not isinstance(rows, CsrRows):
            return rows
        n_rows, n_columns = rows.shape
        memory = self._pools.dense.acquire(n_rows * n_columns * rows.data.itemsize)
        dense = memory.array(rows.data.dtype, n_rows * n_columns).reshape(rows.shape)
        rows.densify_into(dense)
        return dense


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
    is_waited_for = iter([True])  # the first fetch: nothing else is there to deliver

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

    # Of `prefetch` fetches, one is laid out, and waits to be read.
    stages = [Stage(begun, prefetch - 1), Stage(laid_out, 1), Stage(read, 1)]
    with reader, in_stages(share.numbers, stages) as groups, budget:
        # `map` drops each group once yielded; a generator expression would keep it.
        yield from map(lambda each: (undelivered.popleft(), each), groups)  # noqa: C417
