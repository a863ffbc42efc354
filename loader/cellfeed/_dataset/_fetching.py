"""Reading the fetches of a collection ahead of their delivery, one epoch after another."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cellfeed._dataset._epochs import Iteration
from cellfeed._decode import Counter, Counters
from cellfeed._fetch import ByteBudget, PlannedRead, Reader, Stage, in_stages
from cellfeed._rows import Cells
from cellfeed.sampling import Fetch, Share

# Returns the share of this process in the epoch after that of a given share; None if it must not
# be prefetched.
Following: TypeAlias = Callable[[Share], Share | None]


@dataclass(frozen=True, slots=True, eq=False)
class Fetches:
    """Fetches in progress, of one share and of those that follow it.

    Parameters
    ----------
    reader
        The reader.
    groups
        The groups of rows of each fetch, such as minibatches.
    whole
        Whole fetches that were planned and not yet delivered.
    upcoming
        The shares after the current one from which fetches have been prefetched.
    """

    reader: Reader
    groups: Generator[Iterator[Cells], None, None]
    whole: deque[Fetch]
    upcoming: deque[Share]


def fetches_from(
    share: Share,
    following: Following,
    reader: Reader,
    *,
    are_whole: bool,
    prefetch: int,
    prefetch_bytes: int,
    counters: Counters,
) -> Fetches:
    """Read fetches ahead: one while another is delivered, and further ones are requested.

    Parameters
    ----------
    share
        The share to begin with.
    following
        See `Following`. It must not refer to the `NextEpoch` that may hold the fetches.
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
    """
    whole, upcoming = deque[Fetch](), deque[Share]()
    numbered, budget = _numbered(share, following, upcoming), ByteBudget(prefetch_bytes)
    is_waited_for = iter([True])  # the first one, as nothing was prefetched before it

    def begun(fetch_of: tuple[Share, int]) -> Future[PlannedRead]:
        share, number = fetch_of
        with counters.processor_time(Counter.PLANNING):
            if are_whole:
                fetch = share.whole_fetch(number)
                whole.append(fetch)
                read = reader.plan(fetch.rows, np.arange(fetch.rows.size), fetch.rows.size)
            else:
                fetch = share.fetch(number)
                read = reader.plan(fetch.rows, *fetch.in_groups(share.plan.batch_size))
            read = read.advised()
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

    def groups() -> Generator[Iterator[Cells], None, None]:
        with reader, in_stages(numbered, stages) as fetches, budget:
            yield from fetches

    return Fetches(reader, groups(), whole, upcoming)


def _numbered(
    share: Share, following: Following, upcoming: deque[Share]
) -> Iterator[tuple[Share, int]]:
    """Iterate over the fetches of a share and of those that follow, by number, as long as any."""
    while True:
        for number in share.numbers:
            yield share, number
        after = following(share)
        if after is None or not after.numbers:
            return
        upcoming.append(after)
        share = after


class _Held(NamedTuple):
    process: int
    fetches: Fetches
    share: Share
    settings: tuple[object, ...]
    waiting: Iteration[Any]


class NextEpoch:
    """Holds fetches of one dataset that were prefetched, until their or another epoch begins.

    They are closed if other fetches are needed next, or if this is dropped; a thread closes them,
    since no Python code may run then. Pickled copies and forked processes have none.
    """

    def __init__(self) -> None:
        self._held = deque[_Held]()  # whose methods are atomic: any thread may begin an epoch

    @contextmanager
    def fetches(
        self,
        share: Share,
        settings: tuple[object, ...],
        begin: Callable[[], Fetches],
        following: Following,
    ) -> Iterator[Fetches]:
        """Provide fetches, beginning with those of a share.

        If the block ends without an error, all of these have been delivered, and fetches of the
        next epoch are held for it. Otherwise all are discarded.

        Parameters
        ----------
        share
            The share.
        settings
            Objects that affect what is read; compared by identity.
        begin
            Begins fetches, if those that are held are not of this share or of other settings.
        following
            See `Following`.
        """
        fetches, is_held = self._take(share, settings) or begin(), False
        try:
            yield fetches
            wanted = following(share)
            begun = fetches.upcoming.popleft() if fetches.upcoming else None
            # What a plan follows from may have been changed meanwhile.
            if wanted is not None and begun is not None and _are_same(begun, wanted):
                self.cancel()
                waiting = Iteration(lambda: fetches.groups).begin()
                self._held.append(_Held(os.getpid(), fetches, begun, settings, waiting))
                is_held = True
        finally:
            if not is_held:
                fetches.groups.close()

    def cancel(self, *, unless: int | None = None) -> None:
        """Discard the fetches, unless they are of this epoch, and wait for their end."""
        held = self._pop()
        if held is not None and held.share.plan.epoch == unless:
            self._held.append(held)
        elif held is not None:
            held.waiting.close()

    def _take(self, share: Share, settings: tuple[object, ...]) -> Fetches | None:
        held = self._pop()
        if held is None or held.process != os.getpid():
            return None
        if _are_same(held.share, share) and all(map(is_, held.settings, settings)):
            held.waiting.release()
            return held.fetches
        held.waiting.close()
        return None

    def _pop(self) -> _Held | None:
        try:
            return self._held.pop()
        except IndexError:
            return None

    def __reduce__(self) -> "tuple[type[NextEpoch], tuple[()]]":
        return NextEpoch, ()


def _are_same(one: Share, other: Share) -> bool:
    """Return whether shares are equal; strategies, which have arrays, are compared by identity."""
    return one.plan.strategy is other.plan.strategy and one == other
