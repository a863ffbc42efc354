"""The bytes to decompress per cell, which follow from the plan and the files' chunks."""

from cellfeed import Collection, EpochPlan, ParameterError
from cellfeed.stages import FetchStages

__all__ = ["decoded_bytes_per_cell"]


def decoded_bytes_per_cell(
    collection: Collection, plan: EpochPlan, *, n_cells: int = 16_384
) -> float | None:
    """Return the bytes decompressed per cell in a plan's first whole fetches.

    A chunk is decompressed up to the last element that is needed, once for each fetch that touches
    it. Nothing is timed, and X is not read.

    Parameters
    ----------
    collection
        The collection that the plan is for.
    plan
        Of any strategy.
    n_cells
        Over about how many cells to count: at least one fetch, at most the epoch.

    Returns
    -------
    Bytes, of values and column indices together; None, for unknown, if the format's own library
    reads.

    Raises
    ------
    ParameterError
        The plan has no whole fetch.
    """
    n_fetches = min(max(1, n_cells // plan.fetch_size), plan.n_whole_fetches)
    if not n_fetches:
        msg = f"a fetch needs {plan.fetch_size:,} cells, but there are {plan.n_rows:,}"
        raise ParameterError(msg)
    with FetchStages(collection, plan.batch_size) as stages:
        volumes = [stages.volume(stages.plan(plan.fetch(number))) for number in range(n_fetches)]
    known = [each.decoded_bytes for each in volumes if each is not None]
    if len(known) < n_fetches:
        return None
    return sum(known) / (n_fetches * plan.fetch_size)
