"""Preparing the next items while the current one is used; and reading tables concurrently."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Event, Lock
from typing import Any, Self, TypeVar

from cellfeed._progress import ProgressLine
from cellfeed.bytes import cancellable_threads, set_cancel_events
from cellfeed.bytes._buffers import BufferPool, SharedPool
from cellfeed.bytes._remote import outside_lock
from cellfeed.bytes._tables import save_records
from cellfeed.machine import usable_cpu_count
from cellfeed.sources import Source, StoredElement

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Stage:
    """A step that is applied to each item, in its own thread.

    Parameters
    ----------
    make
        Function from an item to the input of the next stage.
    prefetch
        Number of items that are done or in progress beyond the one that the next stage has taken.
    """

    make: Callable[[Any], Any]
    prefetch: int


@contextmanager
def in_stages(items: Iterable[Any], stages: Sequence[Stage]) -> Iterator[Iterator[Any]]:
    """Iterate over the results of applying the stages to items, each stage in its own thread.

    The consumer waits only for the next result, and an error is raised in its place. At exit,
    steps that have not begun and requests that a server has not answered are cancelled, and other
    steps in progress are waited for.

    Examples
    --------
    >>> with in_stages([1, 2], [Stage(str, 3), Stage(len, 1)]) as made:
    ...     print(list(made))
    [1, 1]
    """
    left = Event()
    threads = [
        ThreadPoolExecutor(
            1,
            thread_name_prefix="cellfeed-prefetch",
            initializer=set_cancel_events,
            initargs=(left,),
        )
        for _ in stages
    ]
    begun: Iterator[Future[Any]] = map(_done, items)
    with ExitStack() as on_leaving:
        for thread in threads:
            on_leaving.callback(thread.shutdown)
        for stage, thread in zip(stages[:-1], threads[:-1], strict=True):
            due = _due(_passed_to(stage, thread, begun), stage.prefetch)
            begun = on_leaving.enter_context(closing(due))
        made = _results(_passed_to(stages[-1], threads[-1], begun), stages[-1].prefetch)
        on_leaving.enter_context(closing(made))
        for thread in threads:  # before any of them is waited for
            on_leaving.callback(thread.shutdown, wait=False, cancel_futures=True)
        on_leaving.callback(left.set)
        yield made


def prefetched(
    make: Callable[[_Item], _Made],
    items: Iterable[_Item],
    threads: ThreadPoolExecutor,
    n: int,
) -> Generator[_Made, None, None]:
    """Iterate over ``make(item)``; ``threads`` make the next ``n`` results.

    If iterating over items fails, the results of earlier items still come first.
    """
    return _results(_submitted(make, items, threads), n)


def _results(futures: Iterator[Future[_Made]], n: int) -> Generator[_Made, None, None]:
    """Iterate over results, while the next ``n`` are in progress."""
    pending = deque(islice(futures, n))
    try:
        while pending:
            made = pending.popleft().result()
            pending.extend(islice(futures, n - len(pending)))
            yield made
            del made
    finally:
        for future in pending:
            future.cancel()
        pending.clear()  # an error refers to this frame, and what was made may not live as long


def _due(futures: Iterator[Future[_Made]], n: int) -> Generator[Future[_Made], None, None]:
    """Yield futures after ``n`` more have begun; keep no reference to yielded ones."""
    pending = deque[Future[_Made]]()
    while True:
        pending.extend(islice(futures, 1 + n - len(pending)))
        if not pending:
            return
        yield pending.popleft()


def _passed_to(
    stage: Stage, thread: ThreadPoolExecutor, items: Iterator[Future[Any]]
) -> Iterator[Future[Any]]:
    def made(item: Future[Any]) -> Any:
        return stage.make(item.result())

    def begun(item: Future[Any]) -> Future[Any]:
        return thread.submit(made, item)

    return map(begun, items)  # which keeps no item, as a loop would


def _done(item: _Item) -> Future[_Item]:
    future = Future[_Item]()
    future.set_result(item)
    return future


def _submitted(
    make: Callable[[_Item], _Made], items: Iterable[_Item], threads: ThreadPoolExecutor
) -> Iterator[Future[_Made]]:
    remaining = iter(items)
    while True:
        try:
            item = next(remaining)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - it is raised where the item is due
            failed = Future[_Made]()
            failed.set_exception(error)
            yield failed
            return
        yield threads.submit(make, item)
        del item


# A limit for the bytes of prefetched fetches that are requested concurrently.

_Begun = TypeVar("_Begun")


class ByteBudget:
    """Starts requests in order, each as soon as its bytes fit into the budget.

    A request always starts if nothing else is in flight, however large it is. No thread waits
    here, so none has to be woken when Python exits. This is a context manager; after it exits,
    nothing starts.

    Parameters
    ----------
    n_bytes
        Maximum number of bytes in flight.

    Examples
    --------
    >>> budget = ByteBudget(10)
    >>> first, second = budget.begin(8, str), budget.begin(8, str)
    >>> first.done(), second.done()
    (True, False)
    >>> budget.release(8)
    >>> second.done()
    True
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._in_flight = 0
        self._is_left = False
        self._waiting = deque[tuple[int, Callable[[], Any], Future[Any]]]()
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._is_left = True
            for *_, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    def begin(self, n_bytes: int, begin: Callable[[], _Begun]) -> Future[_Begun]:
        """Call a function that returns immediately, now or when the budget allows it.

        Parameters
        ----------
        n_bytes
            Bytes in flight from then on, until they are released.
        begin
            The function. The thread that releases bytes calls it; functions are called in order.

        Returns
        -------
        A future with its result.
        """
        future = Future[_Begun]()
        with self._lock:
            if self._is_left:
                future.cancel()
            else:
                self._waiting.append((n_bytes, begin, future))
                self._begin_waiting()
        return future

    def release(self, n_bytes: int) -> None:
        """Release bytes that are no longer in flight."""
        with self._lock:
            self._in_flight -= n_bytes
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting:
            n_bytes, begin, future = self._waiting[0]
            if self._in_flight and self._in_flight + n_bytes > self._n_bytes:
                return
            self._waiting.popleft()
            try:
                begun = begin()
            except Exception as error:  # noqa: BLE001 - it is raised where the result is due
                future.set_exception(error)
            else:
                self._in_flight += n_bytes
                future.set_result(begun)


# Pools for the memory of rows.


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Memory pools for rows that are read, and for rows that are made dense.

    Parameters
    ----------
    sparse
        Pool for sparse rows.
    others
        Pool for rows of other layouts.
    dense
        Pool for sparse rows that are made dense, whose buffers have equal sizes and would be
        displaced by others.
    """

    sparse: BufferPool = field(default_factory=BufferPool)
    others: BufferPool = field(default_factory=BufferPool)
    dense: BufferPool = field(default_factory=BufferPool)

    def lending(self, shared: SharedPool, *, dense: bool) -> "Pools":
        """Return the same pools, except that delivered rows are in shared memory.

        Parameters
        ----------
        shared
            The pool of shared memory.
        dense
            Whether sparse rows are made dense, so that they are not delivered themselves.
        """
        return Pools(self.sparse if dense else shared, shared, shared)


# Reading row pointers and chunk tables of many matrices concurrently.

_AT_ONCE = 16


def load_tables(
    elements: Sequence[tuple[Source, StoredElement]], *, are_remote: bool = False
) -> None:
    """Make each element read its tables; see `StoredElement.load_tables`.

    Several sources do so concurrently. After two seconds, progress is shown on the terminal.

    Parameters
    ----------
    elements
        Elements with cells, and their sources.
    are_remote
        Whether reading them is limited by latency, not by the processor.

    Raises
    ------
    FormatError
        A table is damaged; the first one of those that are.
    """
    if not elements:
        return

    def load(element: tuple[Source, StoredElement]) -> None:
        with element[0].reading:
            outside_lock(element[1].load_tables)

    num_threads = min(len(elements), _AT_ONCE if are_remote else usable_cpu_count())
    with (
        cancellable_threads(num_threads, "cellfeed-tables") as threads,
        ProgressLine() as line,
    ):
        for n_read, _ in enumerate(threads.map(load, elements), 1):
            line.show(
                f"Reading row pointers and chunk tables: {n_read} of {len(elements)} matrices"
            )
    save_records()
