"""The configurations that are looked at, and which of them a collection allows."""

from collections.abc import Sequence
from itertools import product
from typing import Literal

from cellfeed import ParameterError
from cellfeed.machine import usable_cpu_count
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._measure import cells_needed

__all__ = [
    "DEFAULT_BLOCK_SIZES",
    "DEFAULT_FETCH_FACTORS",
    "default_workers",
    "grid_of",
    "obstacle",
]

DEFAULT_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)
_MOST_WORKERS = 16


def default_workers() -> tuple[int, ...]:
    """Return 0 and the powers of two up to the usable cores."""
    most = min(_MOST_WORKERS, usable_cpu_count())
    return (0, *(1 << power for power in range(most.bit_length())))


def grid_of(
    block_sizes: Sequence[int], fetch_factors: Sequence[int], workers: Sequence[int]
) -> list[Configuration]:
    """Return all combinations, in order.

    Raises
    ------
    ParameterError
        There are none, or a size is below what it may be.
    """
    grid = [
        Configuration(block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers)
        for block_size, fetch_factor, num_workers in product(
            sorted(set(block_sizes)), sorted(set(fetch_factors)), sorted(set(workers))
        )
    ]
    if not grid:
        msg = "block sizes, fetch factors and workers must each have at least one value"
        raise ParameterError(msg)
    return grid


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
    buffers = configuration.minibatches_in_memory * batch_size * row_bytes
    if buffers > memory_bytes:
        return "over memory", f"its buffers alone take {buffers / 1e6:,.0f} MB"
    return None
