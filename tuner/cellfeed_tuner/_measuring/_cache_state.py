"""Which state of caches a collection is measured in."""

from cellfeed import Collection, ParameterError
from cellfeed_tuner._machine._page_cache import CacheState

__all__ = ["cache_state"]


def cache_state(collection: Collection, asked: CacheState | None) -> CacheState:
    """Return the state that is asked for, or the one that a collection is measured in by default.

    Files of this machine are measured cold. Caches of servers cannot be dropped or filled from
    here, so that there is nothing to choose.

    Raises
    ------
    ParameterError
        A state is asked for that the collection cannot be brought into.
    """
    if not collection.is_remote:
        if asked == "remote":
            msg = (
                f"cache='remote' is for files on servers, but {collection.locations[0]} is none; "
                "give 'cold' or 'warm'"
            )
            raise ParameterError(msg)
        return asked or "cold"
    if asked in {"cold", "warm"}:
        first = next(each for each in collection.locations if each.is_remote)
        msg = (
            f"cache={asked!r} is for files of this machine, but {first} is read from a server, "
            "whose caches are not under control; leave `cache` out"
        )
        raise ParameterError(msg)
    return "remote"
