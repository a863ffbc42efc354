"""Reading the fetches of a collection ahead, one epoch after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed._collection import Collection
from cellfeed._collection._indexables import in_memory
from cellfeed._dataset._epochs import NextEpoch, are_same
from cellfeed._decode import Counter, Counters, Verify
from cellfeed._errors import ParameterError
from cellfeed._fetch import (
    ByteBudget,
    PlannedRead,
    Pools,
    Reader,
    Stage,
    Transforms,
    as_stored,
    in_stages,
    prefetched,
)
from cellfeed._lazy import sp
from cellfeed._rows import Cells, Dtypes, Element
from cellfeed._torch import get_worker_info
from cellfeed.machine import threads_per_process
from cellfeed.sampling import Share
from cellfeed.transforms import Binarize, Log1p, NormalizeTotal, Scale, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionReading:
    """Reads the fetches of a collection ahead.

    Parameters
    ----------
    collection
        The collection.
    dtype
        Dtype of all elements, or dtypes of some by name; those of the collection if None.
    num_threads
        Number of threads that read and decode; if None, this process's share of the processors.
    pools
        Pools for memory.
    transforms
        Transforms by element.
    verify
        How often chunks are checked; see `Decoder`.
    prefetch
        Number of fetches that are planned and requested beyond the one that is read.
    prefetch_bytes
        Maximum number of bytes in flight for these fetches and for the one that is read.
    counters
        Counters of work and time.
    """

    collection: Collection
    dtype: Dtypes
    num_threads: int | None
    pools: Pools
    transforms: Transforms
    verify: Verify
    prefetch: int
    prefetch_bytes: int
    counters: Counters

    def reader(self) -> Reader:
        """Return a reader with its own threads."""
        worker = get_worker_info()
        n_processes = 1 if worker is None else worker.num_workers
        threads = self.num_threads or threads_per_process(n_processes)
        return Reader(
            self.collection,
            dtype=self.dtype,
            num_threads=threads,
            pools=self.pools,
            transforms=self.transforms,
            verify=self.verify,
            counters=self.counters,
        )

    def fetched(
        self,
        reader: Reader,
        planned: Callable[[_Numbered], PlannedRead],
        numbered: Iterator[_Numbered],
    ) -> Generator[Iterator[Cells], None, None]:
        """Read fetches ahead: one while another is delivered, and further ones are requested.

        Parameters
        ----------
        reader
            The reader; closed at the end.
        planned
            Plans a fetch.
        numbered
            The fetches, in order.
        """

        def begun(number: _Numbered) -> Future[PlannedRead]:
            with self.counters.processor_time(Counter.PLANNING):
                read = planned(number).advised()
            self.counters.add(Counter.FETCHES, 1)
            return budget.begin(read.expected_bytes, read.begun)

        def laid_out(begun: Future[PlannedRead]) -> PlannedRead:
            read = begun.result()
            try:
                return reader.with_layouts(read)
            except BaseException:
                budget.release(read.expected_bytes)
                raise

        is_waited_for = iter([True])  # the first one, as nothing was read ahead of it

        def read(laid_out: PlannedRead) -> Iterator[Cells]:
            try:
                return reader.read_planned(laid_out, first_alone=next(is_waited_for, False))
            finally:
                budget.release(laid_out.expected_bytes)

        if self.prefetch == 1:  # without a thread of their own for plans
            stages = [Stage(lambda number: laid_out(begun(number)), 1), Stage(read, 1)]
        else:
            # The one that is laid out and not yet read is one of them.
            stages = [Stage(begun, self.prefetch - 1), Stage(laid_out, 1), Stage(read, 1)]
        with (
            reader,
            in_stages(numbered, stages) as fetches,
            ByteBudget(self.prefetch_bytes) as budget,
        ):
            yield from fetches


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A fetch of an epoch, by its number in the plan."""

    share: Share
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Fetches:
    """Fetches that are read ahead, from one on.

    Parameters
    ----------
    reader
        The reader.
    groups
        The groups of rows of each fetch, such as minibatches.
    orders
        Orders of delivery of whole fetches that were planned and not yet delivered.
    upcoming
        The shares after the current one from which fetches have been read ahead.
    """

    reader: Reader
    groups: Generator[Iterator[Cells], None, None]
    orders: deque[NDArray[np.intp]] = field(default_factory=deque)
    upcoming: deque[Share] = field(default_factory=deque)

    def first(self, share: Share) -> Iterator[Iterator[Cells]]:
        """Return as many fetches as a share has; they must belong to the share."""
        return islice(self.groups, len(share.numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """Fetches of one epoch after another.

    Parameters
    ----------
    reading
        Reads the fetches.
    are_whole
        Whether each fetch is read as one group, with all its rows, in storage order.
    following
        Returns the share of this process in the epoch after that of a given share; None if it
        must not be read ahead. It must not refer to the owner of `next_epoch`.
    next_epoch
        Keeps fetches that were read ahead of their epoch.
    settings
        Objects that affect what is read; compared by identity.
    """

    reading: CollectionReading
    are_whole: bool
    following: Callable[[Share], Share | None]
    next_epoch: NextEpoch[Fetches]
    settings: tuple[object, ...]

    @contextmanager
    def of(self, share: Share) -> Iterator[Fetches]:
        """Provide fetches, beginning with those of a share.

        If the block ends without an error, all of these have been delivered, and fetches of the
        next epoch are kept for it. Otherwise all are discarded.
        """
        fetches = self.next_epoch.take(share, self.settings) or self._begun(share)
        try:
            yield fetches
            wanted = self.following(share)
            begun = fetches.upcoming.popleft() if fetches.upcoming else None
            # What a plan follows from may have been changed meanwhile.
            if wanted is not None and begun is not None and are_same(begun, wanted):
                self.next_epoch.keep(fetches, begun, self.settings)
                return
        except BaseException:
            fetches.groups.close()
            raise
        fetches.groups.close()

    def _begun(self, share: Share) -> Fetches:
        # What waits for an epoch may not refer to where it waits, which is here.
        reader, orders, are_whole = self.reading.reader(), deque[NDArray[np.intp]](), self.are_whole
        upcoming = deque[Share]()

        def planned(numbered: _Numbered) -> PlannedRead:
            share, number = numbered.share, numbered.number
            if not are_whole:
                fetch = share.fetch(number)
                return reader.plan(fetch.rows, fetch.order, share.plan.batch_size)
            fetch = share.whole_fetch(number)
            orders.append(fetch.order)
            return reader.plan(fetch.rows, np.arange(fetch.rows.size), fetch.rows.size)

        numbered = _from(share, self.following, upcoming)
        return Fetches(reader, self.reading.fetched(reader, planned, numbered), orders, upcoming)


def _from(
    share: Share, following: Callable[[Share], Share | None], upcoming: deque[Share]
) -> Iterator[_Numbered]:
    """Iterate over the fetches of an epoch and of following epochs, as long as there are any."""
    while True:
        for number in share.numbers:
            yield _Numbered(share, number)
        after = following(share)
        if after is None or not after.numbers:
            return
        upcoming.append(after)
        share = after


# Making the minibatches of an epoch: one class for each way of reading a fetch.

Minibatches = Generator[Any, None, None]


class Delivery(Protocol):
    """Makes minibatches from the fetches of an epoch."""

    def minibatches(self, share: Share) -> Minibatches:
        """Deliver the minibatches of a worker's share, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The functions of a user that change fetches and minibatches; see `CellDataset`."""

    fetch_transform: Callable[[Any], Any] | None
    batch_callback: Callable[[Any, NDArray[Any]], Any] | None
    batch_transform: Callable[[Any], Any] | None
    transform_threads: int
    first_alone: bool
    dense: bool
    as_torch: bool
    counters: Counters

    def minibatches_of(
        self, fetched: Any, order: NDArray[np.intp], batch_size: int
    ) -> Iterator[Any]:
        """Take minibatches from a fetch, in the order of delivery."""
        if self.fetch_transform is not None:
            with self.counters.wall_time(Counter.FUNCTIONS):
                fetched = self.fetch_transform(fetched)
        for start in range(0, order.size, batch_size):
            # Kept by nobody but the consumer: torch ends the process where a tensor goes with this
            # frame, in a thread of its own, while Python shuts down.
            yield self._minibatch(fetched, order[start : start + batch_size])

    def _minibatch(self, fetched: Any, indices: NDArray[np.intp]) -> Any:
        if self.batch_callback is not None:
            with self.counters.wall_time(Counter.FUNCTIONS):
                batch = self.batch_callback(fetched, indices)
        else:
            with self.counters.wall_time(Counter.PLACING):
                batch = fetched[indices]
        self.counters.add(Counter.CELLS, len(indices))
        return self.minibatch_of(batch, dense=self.dense) if isinstance(batch, Cells) else batch

    def minibatch_of(self, cells: Cells, *, dense: bool = False) -> Any:
        """Return cells as tensors if requested and torch is installed, else in SciPy."""
        with self.counters.wall_time(Counter.MAKING_TENSORS):
            return cells.to_torch(dense=dense) if self.as_torch else _in_scipy(cells, dense=dense)

    def transformed(self, minibatches: Minibatches) -> Minibatches:
        """Yield minibatches after the user's ``batch_transform``, run by threads if any."""
        with closing(minibatches):
            if self.batch_transform is None:
                yield from minibatches
            elif not self.transform_threads:
                yield from map(self._transformed, minibatches)
            else:
                n = self.transform_threads
                with ThreadPoolExecutor(n, thread_name_prefix="cellfeed-transform") as threads:
                    if self.first_alone:  # what the others need may not have been read yet
                        yield from threads.map(self._transformed, islice(minibatches, 1))
                    yield from prefetched(self._transformed, minibatches, threads, n)

    def _transformed(self, minibatch: Any) -> Any:
        assert self.batch_transform is not None  # noqa: S101 - asked before
        with self.counters.wall_time(Counter.FUNCTIONS):
            return self.batch_transform(minibatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDelivery:
    """Reads rows of a collection directly into minibatches."""

    fetching: Fetching
    callbacks: Callbacks

    def minibatches(self, share: Share) -> Minibatches:
        """Deliver the minibatches of a worker's share, in order."""
        with self.fetching.of(share) as fetches:
            for groups in fetches.first(share):
                for cells in fetches.reader.densified(groups) if self.callbacks.dense else groups:
                    # Memory is free, and tensors are gone, as soon as the consumer drops them.
                    delivered = [self.callbacks.minibatch_of(cells)]
                    self.callbacks.counters.add(Counter.CELLS, len(cells.rows))
                    del cells
                    yield delivered.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformedDelivery:
    """Passes whole fetches of a collection to the user's functions, which take minibatches."""

    fetching: Fetching
    callbacks: Callbacks

    def minibatches(self, share: Share) -> Minibatches:
        """Deliver the minibatches of a worker's share, in order."""
        with self.fetching.of(share) as fetches:
            for groups in fetches.first(share):
                fetched = next(groups).to_scipy()
                yield from self.callbacks.minibatches_of(
                    fetched, fetches.orders.popleft(), share.plan.batch_size
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDelivery:
    """Reads fetches with the user's function, or by indexing with row numbers.

    Parameters
    ----------
    collection
        The collection.
    fetch_callback
        ``fetch_callback(collection, rows)`` reads rows in place of ``collection[rows]``.
    callbacks
        The user's functions for fetches and minibatches.
    """

    collection: Any
    fetch_callback: Callable[[Any, NDArray[Any]], Any] | None
    callbacks: Callbacks

    def minibatches(self, share: Share) -> Minibatches:
        """Deliver the minibatches of a worker's share, in order."""
        counters = self.callbacks.counters
        for number in share.numbers:
            with counters.processor_time(Counter.PLANNING):
                fetch = share.whole_fetch(number)
            with counters.wall_time(Counter.LIBRARY):
                if self.fetch_callback is not None:
                    fetched = self.fetch_callback(self.collection, fetch.rows)
                else:
                    fetched = in_memory(self.collection[fetch.rows])
            counters.add(Counter.FETCHES, 1)
            yield from self.callbacks.minibatches_of(fetched, fetch.order, share.plan.batch_size)


def _in_scipy(cells: Cells, *, dense: bool) -> Cells:
    cells = cells.to_scipy()
    if not dense:
        return cells
    elements = {
        name: each.toarray() if isinstance(each, sp.csr_array) else each
        for name, each in cells.elements.items()
    }
    return replace(cells, elements=elements)


# The transforms of each element of a collection.

AnyTransform: TypeAlias = (
    Transform | Sequence[Transform] | Mapping[str, Transform | Sequence[Transform]]
)

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def transforms_of(
    transform: AnyTransform | None, elements: Mapping[str, Element], *, are_made_dense: bool
) -> Transforms:
    """Return the transforms of each element that has any.

    Parameters
    ----------
    transform
        Transforms of the first element, or of some elements by name; see `CellDataset`.
    elements
        The elements to read.
    are_made_dense
        Whether sparse rows are made dense when they are read.

    Raises
    ------
    ParameterError
        ``transform`` has something else, names a missing element, or does not fit an element.
    """
    if transform is None:
        return {}
    by_name = transform if isinstance(transform, Mapping) else {next(iter(elements)): transform}
    found = {name: _sequence(each) for name, each in by_name.items()}
    for name, transforms in found.items():
        if name not in elements:
            there = ", ".join(map(repr, elements))
            msg = f"`transform` names {name!r}, which is not among the elements read: {there}"
            raise ParameterError(msg)
        _require_fit(elements[name], transforms, is_made_dense=are_made_dense)
    return {name: transforms for name, transforms in found.items() if transforms}


def _sequence(transform: Any) -> tuple[Transform, ...]:
    given = transform if isinstance(transform, Sequence) else [transform]
    for each in given:
        if not isinstance(each, NormalizeTotal | Log1p | Binarize | Scale):
            msg = (
                "`transform` must be from `cellfeed.transforms`, such as Log1p(), but got "
                f"{each!r}; pass a function of your own as `batch_transform`"
            )
            raise ParameterError(msg)
    return tuple(given)


def _require_fit(element: Element, transforms: Sequence[Transform], *, is_made_dense: bool) -> None:
    if transforms and (element.layout == "ragged" or element.dtype.names is not None):
        what = "rows of any length" if element.layout == "ragged" else "values with fields"
        msg = (
            f"{element.name!r} has {what}, which `transform` does not support; use "
            "`batch_transform`"
        )
        raise ParameterError(msg)
    for each in transforms:
        if isinstance(each, Scale) and each.n_columns != element.n_columns:
            msg = (
                f"`Scale` must have a mean and std for each column, but got {each.n_columns:,} "
                f"for the {element.n_columns:,} columns of {element.name!r}; give those of the "
                "delivered columns, in their order"
            )
            raise ParameterError(msg)
    n_stored = len(as_stored(transforms, element.layout))
    if n_stored < len(transforms) and not is_made_dense:
        msg = (
            f"{element.name!r} is sparse, and {transforms[n_stored]!r} changes its zeros; use "
            "dense=True without `fetch_transform` and `batch_callback` or, for Scale, "
            "zero_center=False"
        )
        raise ParameterError(msg)


def float_dtypes(elements: Mapping[str, Element], dtype: Dtypes, transforms: Transforms) -> Dtypes:
    """Return the dtypes for reading, float32 or float64 for transformed elements.

    Other stored values, such as integer counts, are read as float32.

    Raises
    ------
    ParameterError
        Another dtype is requested.
    """
    as_floats = dict[str, np.dtype[Any]]()
    for name in transforms:
        asked = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        if asked is not None and asked not in _FLOATS:
            msg = (
                f"`dtype` must be float32 or float64 with a `transform`, but got {asked} for "
                f"{name!r}; leave it out to read such values as float32"
            )
            raise ParameterError(msg)
        if asked is None and elements[name].dtype not in _FLOATS:
            as_floats[name] = _FLOATS[0]
    if not as_floats:
        return dtype
    return as_floats | (dict(dtype) if isinstance(dtype, Mapping) else {})
