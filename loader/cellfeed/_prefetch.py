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
    """Iterate over ``make(item)``, of which the next ``n_ahead`` are made by ``threads``."""
    rest = iter(items)
    pending: list[Future[_Made]] = [threads.submit(make, item) for item in islice(rest, n_ahead)]
    try:
        while pending:
            made = pending.pop(0).result()
            pending += [threads.submit(make, item) for item in islice(rest, 1)]
            yield made
    finally:
        for future in pending:
            future.cancel()
