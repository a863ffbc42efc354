"""Making the minibatches of an epoch: one class for each way of reading a fetch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import Cells
from cellfeed._chunks import Counter, Counters
from cellfeed._dataset._fetching import Fetching
from cellfeed._indexables import in_memory
from cellfeed._lazy import sp
from cellfeed._reading import ahead
from cellfeed.sampling import Share

__all__ = [
    "Callbacks",
    "Delivery",
    "IndexedDelivery",
    "Minibatches",
    "PlacedDelivery",
    "TransformedDelivery",
]

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
                    yield from ahead(self._transformed, minibatches, threads, n)

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
