"""Reading from many files, concurrently if they are on servers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from cellfeed._bytes import Location, threads_until_left
from cellfeed._reading import ahead
from cellfeed._remote import outside_lock

__all__ = ["side_by_side"]

_AT_ONCE = 16


class _Located(Protocol):
    @property
    def location(self) -> Location: ...


_Item = TypeVar("_Item", bound=_Located)
_Read = TypeVar("_Read")


def side_by_side(read: Callable[[_Item], _Read], items: Sequence[_Item]) -> Iterator[_Read]:
    """Iterate over ``read(item)``; an error is raised in place of its result.

    Parameters
    ----------
    read
        Reads from an item. It must be repeatable, since it is called again if it needs pages from
        a server.
    items
        Items with a location. Local ones are read one after another.
    """

    def read_outside(item: _Item) -> _Read:
        return outside_lock(lambda: read(item))

    if not any(item.location.is_remote for item in items):
        yield from map(read, items)
        return
    if len(items) == 1:
        yield read_outside(items[0])
        return
    with threads_until_left(_AT_ONCE, "cellfeed-open") as threads:
        yield from ahead(read_outside, items, threads, _AT_ONCE)
