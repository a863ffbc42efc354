"""Preparing the next items while the current one is used."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from threading import Event
from typing import Any, TypeVar

from cellfeed._bytes import until_left

__all__ = ["Stage", "ahead", "in_stages"]

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Stage:
    """A step that is applied to each item, in its own thread.

    Parameters
    ----------
    make
        Function from an item to the input of the next stage.
    n_ahead
        Number of items that are done or in progress beyond the one that the next stage has taken.
    """

    make: Callable[[Any], Any]
    n_ahead: int


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
            1, thread_name_prefix="cellfeed-prefetch", initializer=until_left, initargs=(left,)
        )
        for _ in stages
    ]
    begun: Iterator[Future[Any]] = map(_done, items)
    with ExitStack() as on_leaving:
        for thread in threads:
            on_leaving.callback(thread.shutdown)
        for stage, thread in zip(stages[:-1], threads[:-1], strict=True):
            kept = _kept_ahead(_passed_to(stage, thread, begun), stage.n_ahead)
            begun = on_leaving.enter_context(closing(kept))
        made = _results(_passed_to(stages[-1], threads[-1], begun), stages[-1].n_ahead)
        on_leaving.enter_context(closing(made))
        for thread in threads:  # before any of them is waited for
            on_leaving.callback(thread.shutdown, wait=False, cancel_futures=True)
        on_leaving.callback(left.set)
        yield made


def ahead(
    make: Callable[[_Item], _Made],
    items: Iterable[_Item],
    threads: ThreadPoolExecutor,
    n_ahead: int,
) -> Generator[_Made, None, None]:
    """Iterate over ``make(item)``; ``threads`` make the next ``n_ahead`` results.

    If iterating over items fails, the results of earlier items still come first.
    """
    return _results(_submitted(make, items, threads), n_ahead)


def _results(futures: Iterator[Future[_Made]], n_ahead: int) -> Generator[_Made, None, None]:
    """Iterate over results, while the next ``n_ahead`` are in progress."""
    pending = deque(islice(futures, n_ahead))
    try:
        while pending:
            made = pending.popleft().result()
            pending.extend(islice(futures, 1))
            yield made
            del made
    finally:
        for future in pending:
            future.cancel()
        pending.clear()  # an error refers to this frame, and what was made may not live as long


def _kept_ahead(
    futures: Iterator[Future[_Made]], n_ahead: int
) -> Generator[Future[_Made], None, None]:
    """Yield futures after ``n_ahead`` more have begun; keep no reference to yielded ones."""
    pending = deque(islice(futures, n_ahead))
    while True:
        pending.extend(islice(futures, 1))
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
    rest = iter(items)
    while True:
        try:
            item = next(rest)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - it is raised where the item is due
            failed = Future[_Made]()
            failed.set_exception(error)
            yield failed
            return
        yield threads.submit(make, item)
        del item
