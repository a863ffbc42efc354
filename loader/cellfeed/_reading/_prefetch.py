"""The next one under way while this one is used."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

__all__ = ["ahead", "one_ahead"]

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@contextmanager
def one_ahead(make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[Iterator[_Made]]:
    """Iterate over ``make(item)``, of which the next is made in a thread meanwhile.

    Errors come where the result would have come. On leaving, what is under way is waited for.

    Examples
    --------
    >>> with one_ahead(str, [1, 2]) as made:
    ...     print(list(made))
    ['1', '2']
    """
    with ThreadPoolExecutor(1, thread_name_prefix="cellfeed-prefetch") as thread:
        yield ahead(make, items, thread, 1)


def ahead(
    make: Callable[[_Item], _Made],
    items: Iterable[_Item],
    threads: ThreadPoolExecutor,
    n_ahead: int,
) -> Iterator[_Made]:
    """Iterate over ``make(item)``, of which the next ``n_ahead`` are made by ``threads``.

    Where an item cannot be had, what was made of those before it still comes first.
    """
    futures = _submitted(make, items, threads)
    pending = list(islice(futures, n_ahead))
    try:
        while pending:
            made = pending.pop(0).result()
            pending += islice(futures, 1)
            yield made
            del made
    finally:
        for future in pending:
            future.cancel()


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
