"""One depth of reading ahead of a server."""

from dataclasses import dataclass

from cellfeed_tuner._interval import Estimate

__all__ = ["PrefetchResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """What was measured of the chosen configuration with so many fetches read ahead.

    Parameters
    ----------
    prefetch
        As of `cellfeed.CellDataset`.
    cells_per_second
        Throughput, with its 95 % interval; None if there were too few rounds.
    n_rounds, n_turns
        Rounds of whole fetches that were timed, in so many turns with other depths.
    peak_memory_bytes
        Highest memory of the process and its workers.
    """

    prefetch: int
    cells_per_second: Estimate | None
    n_rounds: int
    n_turns: int
    peak_memory_bytes: int
