"""Reading the fetches of a collection ahead of their delivery."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future

import numpy as np

from cellfeed._decode import Counter, Counters
from cellfeed._fetch import ByteBudget, PlannedRead, Reader, Stage, in_stages
from cellfeed._rows import Cells
from cellfeed.sampling import Fetch, Share


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
                read = reader.plan(fetch.rows, *fetch.in_groups(share.plan.batch_size))
            read = read.advised()
        undelivered.append(fetch)
        counters.add(Counter.FETCHES, 1)
        return budget.begin(read.expected_bytes, read.begun)

    def laid_out(begun: Future[PlannedRead]) -> PlannedRead:
        read = begun.result()
        try:
            return reader.with_layouts(read)
        except BaseException:
            budget.release(read.expected_bytes)
            raise

    def read(laid_out: PlannedRead) -> Iterator[Cells]:
        try:
            return reader.read_planned(laid_out, first_alone=next(is_waited_for, False))
        finally:
            budget.release(laid_out.expected_bytes)

    if prefetch == 1:  # without a thread of their own for plans
        stages = [Stage(lambda number: laid_out(begun(number)), 1), Stage(read, 1)]
    else:
        # The one that is laid out and not yet read is one of them.
        stages = [Stage(begun, prefetch - 1), Stage(laid_out, 1), Stage(read, 1)]
    with reader, in_stages(share.numbers, stages) as groups, budget:
        # Which keeps no group, as a generator expression would.
        yield from map(lambda each: (undelivered.popleft(), each), groups)  # noqa: C417
