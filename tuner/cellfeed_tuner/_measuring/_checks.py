"""Whether a collection can be measured as requested, checked before any time is spent."""

from collections.abc import Sequence
from typing import Literal

from cellfeed import Collection, ParameterError
from cellfeed.machine import usable_cpu_count, usable_memory_bytes
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import WARM_SHARE_OF_MEMORY
from cellfeed_tuner._machine._page_cache import CacheState

__all__ = [
    "bytes_on_disk", "cache_state", "cells_needed", "check_cache", "check_size", "default_workers",
    "obstacle",
]  # fmt: skip

_ROUNDS_PER_EPOCH_WITH_WORKERS = 2
_MOST_WORKERS = 16


def check_size(
    what: str, n_cells: int, grid: Sequence[Configuration], batch_size: int, n_ranks: int = 1
) -> None:
    """Raise `ParameterError` if there are too few cells for every configuration of a grid."""
    needed = n_ranks * min(cells_needed(configuration, batch_size) for configuration in grid)
    if needed > n_cells:
        msg = (
            f"{what} has {n_cells:,} cells, but even the smallest configuration "
            f"needs {needed:,} to be timed{f' on {n_ranks} ranks' if n_ranks > 1 else ''}; give "
            "smaller batch, fetch or worker numbers"
        )
        raise ParameterError(msg)


def check_cache(collection: Collection, cache: CacheState) -> None:
    """Raise `ParameterError` if the cache is to be warm but the files do not fit in memory."""
    size, available = bytes_on_disk(collection), usable_memory_bytes()
    if cache == "warm" and size > WARM_SHARE_OF_MEMORY * available:
        msg = (
            f"cache='warm' needs the files in memory, but they have {size / 1e9:.1f} GB "
            f"and {available / 1e9:.1f} GB are available; measure with cache='cold'"
        )
        raise ParameterError(msg)


def bytes_on_disk(collection: Collection) -> int:
    """Return the size of all files of a collection, on this machine or on servers."""
    return sum(source.file_bytes() for source in collection.sources)


def cache_state(collection: Collection, requested: CacheState | None) -> CacheState:
    """Return the cache state to measure in: as requested, or else cold, or remote on servers.

    Caches of servers cannot be dropped or filled from here, so there is nothing to choose. An
    impossible state is a `ParameterError`.
    """
    if not collection.is_remote:
        if requested == "remote":
            msg = (
                f"cache='remote' is for files on servers, but {collection.locations[0]} is on this "
                "machine; give 'cold' or 'warm'"
            )
            raise ParameterError(msg)
        if requested == "warm" and collection.direct_io:
            msg = f"cache='warm', but {collection.locations[0]} is read past the page cache"
            raise ParameterError(f"{msg}; leave `cache` out, or open it without `direct_io`")
        return requested or "cold"
    if requested in {"cold", "warm"}:
        first = next(each for each in collection.locations if each.is_remote)
        msg = (
            f"cache={requested!r} is for files of this machine, but {first} is read from a server, "
            "whose caches are not under control; leave `cache` out"
        )
        raise ParameterError(msg)
    return "remote"


def cells_needed(configuration: Configuration, batch_size: int) -> int:
    """Return how many cells are needed to time whole fetches."""
    rounds = _ROUNDS_PER_EPOCH_WITH_WORKERS if configuration.num_workers else 1
    return rounds * configuration.minibatches_per_round * batch_size


def default_workers(collection: Collection, n_ranks: int = 1) -> tuple[int, ...]:
    """Return 0 and the powers of two up to a rank's share of the usable cores.

    For files on servers, only 0: one process sends many concurrent requests to hide latency.
    """
    if collection.is_remote:
        return (0,)
    most = min(_MOST_WORKERS, max(1, usable_cpu_count() // n_ranks))
    return (0, *(1 << power for power in range(most.bit_length())))


def obstacle(
    configuration: Configuration,
    *,
    n_cells: int,
    batch_size: int,
    row_bytes: float,
    memory_bytes: int,
) -> tuple[Literal["too few cells", "over memory"], str] | None:
    """Return why a configuration cannot run, as a status and a note; None if it can.

    The buffers of all fetches in memory, with rows of ``row_bytes`` on average, may take
    ``memory_bytes``.
    """
    if configuration.block_size > n_cells:
        return "too few cells", f"a block has more than the {n_cells:,} cells there are"
    needed = cells_needed(configuration, batch_size)
    if needed > n_cells:
        return "too few cells", f"whole fetches need {needed:,} cells"
    buffers = configuration.minibatches_in_memory * batch_size * row_bytes
    if buffers > memory_bytes:
        return "over memory", f"its buffers alone take {buffers / 1e6:,.0f} MB"
    return None
