"""Reading the fetches of a collection ahead, one epoch after another."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import Cells
from cellfeed._chunks import Counter, Counters, Verify
from cellfeed._collection import Collection
from cellfeed._dataset._next_epoch import NextEpoch, are_same
from cellfeed._layouts import Dtypes
from cellfeed._reading import (
    ByteBudget,
    PlannedRead,
    Pools,
    Reader,
    Stage,
    Transforms,
    in_stages,
)
from cellfeed._torch import get_worker_info
from cellfeed.machine import threads_per_process
from cellfeed.sampling import Share

__all__ = ["CollectionReading", "Fetches", "Fetching"]


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
        planned: Callable[["_Numbered"], PlannedRead],
        numbered: Iterator["_Numbered"],
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
                return reader.laid_out(read)
            except BaseException:
                budget.give_back(read.expected_bytes)
                raise

        is_waited_for = iter([True])  # the first one, as nothing was read ahead of it

        def read(laid_out: PlannedRead) -> Iterator[Cells]:
            try:
                return reader.read_planned(laid_out, first_alone=next(is_waited_for, False))
            finally:
                budget.give_back(laid_out.expected_bytes)

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
    next_epoch: "NextEpoch[Fetches]"
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
