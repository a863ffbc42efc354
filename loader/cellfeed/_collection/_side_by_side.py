"""Something is read of each of many files, of servers side by side."""

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
    """Iterate over ``read(item)``; errors come where the result would have come.

    Parameters
    ----------
    read
        Reads something of an item; called again where it needs pages of a server, so it leaves
        nothing behind that a second call minds.
    items
        What has a location. Those of this machine are read one after the other.
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
