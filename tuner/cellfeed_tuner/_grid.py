"""The workers that are looked at if none are given, and what a collection allows."""

from typing import Literal

from cellfeed import Collection
from cellfeed.machine import usable_cpu_count
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._checks import cells_needed

__all__ = ["buffer_bytes", "default_workers", "obstacle"]

_MOST_WORKERS = 16


def default_workers(collection: Collection, n_ranks: int = 1) -> tuple[int, ...]:
    """Return 0 and the powers of two up to a rank's share of the usable cores.

    Of files on servers, 0 alone: there, it is many requests at a time that hide latency, and one
    process makes them.
    """
    if collection.is_remote:
        return (0,)
    most = min(_MOST_WORKERS, max(1, usable_cpu_count() // n_ranks))
    return (0, *(1 << power for power in range(most.bit_length())))


def buffer_bytes(configuration: Configuration, batch_size: int, row_bytes: float) -> float:
    """Return what the buffers of all fetches take that are in memory at once."""
    return configuration.minibatches_in_memory * batch_size * row_bytes


def obstacle(
    configuration: Configuration,
    *,
    n_cells: int,
    batch_size: int,
    row_bytes: float,
    memory_bytes: int,
) -> tuple[Literal["too few cells", "over memory"], str] | None:
    """Return why a configuration cannot run at all, if it cannot: the kind, and in words.

    Parameters
    ----------
    configuration
        The settings.
    n_cells, row_bytes
        Rows of the collection, and the mean size of one in a fetch's buffer.
    batch_size
        Cells of a minibatch.
    memory_bytes
        What buffers may take.
    """
    if configuration.block_size > n_cells:
        return "too few cells", f"a block has more than the {n_cells:,} cells there are"
    needed = cells_needed(configuration, batch_size)
    if needed > n_cells:
        return "too few cells", f"whole fetches need {needed:,} cells"
    buffers = buffer_bytes(configuration, batch_size, row_bytes)
    if buffers > memory_bytes:
        return "over memory", f"its buffers alone take {buffers / 1e6:,.0f} MB"
    return None
