"""The remaining rows of an epoch that was stopped, as positions of an epoch of their own.

Fetches that were not begun keep their positions, so that blocks stay whole. Fetches that were begun
(one for each worker of each rank) leave their undelivered minibatches. Both are intervals, and
their number depends only on the numbers of ranks and workers.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed.sampling._progress import Progress, delivered_by_worker

__all__ = ["Rest", "minibatches_by_worker"]


class DividedEpoch(Protocol):
    """An epoch that was divided among ranks; see `EpochPlan`."""

    @property
    def batch_size(self) -> int: ...
    @property
    def fetch_factor(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def n_positions(self) -> int: ...
    @property
    def n_delivered(self) -> int: ...
    @property
    def n_minibatches(self) -> int: ...
    @property
    def n_fetches(self) -> int: ...
    @property
    def fetch_size(self) -> int: ...

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at positions of the undivided epoch."""
        ...

    def delivery_order(self, number: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a fetch in the order of delivery."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Intervals:
    """Intervals of the remaining rows, in the order of their new positions.

    Parameters
    ----------
    starts
        Start of each interval: a position, or an index into a fetch that was begun, shape (n,).
    sizes
        Number of positions in each interval, above 0, shape (n,).
    fetches, ranks
        The fetch that was begun, and its rank; -1 for intervals of positions, shape (n,).
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    fetches: NDArray[np.int64]
    ranks: NDArray[np.int64]


class Rest:
    """The remaining rows of an epoch, by their new positions 0 .. ``n`` - 1.

    Parameters
    ----------
    plan
        The plan of the epoch.
    progress
        How far the epoch has come.
    """

    def __init__(self, plan: DividedEpoch, progress: Progress) -> None:
        self._plan = plan
        self._intervals = _intervals(plan, progress)
        self._ends = np.cumsum(self._intervals.sizes)
        self.n = int(self._ends[-1]) if self._ends.size else 0

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the rows at the given positions."""
        left, flat = self._intervals, positions.ravel()
        which = np.searchsorted(self._ends, flat, side="right")
        places = left.starts[which] + flat - (self._ends[which] - left.sizes[which])
        for k in np.unique(which[left.fetches[which] >= 0]):
            order = self._plan.delivery_order(int(left.fetches[k]), int(left.ranks[k]))
            own = which == k
            places[own] = order[places[own]]
        return self._plan.rows_at(places).reshape(positions.shape)


def minibatches_by_worker(
    n_minibatches: int, fetch_factor: int, num_workers: int
) -> NDArray[np.int64]:
    """Return the number of minibatches of each worker of a rank, int64, shape (num_workers,)."""
    n_fetches = -(-n_minibatches // fetch_factor)
    workers = np.arange(num_workers, dtype=np.int64)
    totals = (n_fetches - workers + num_workers - 1) // num_workers * fetch_factor
    if n_fetches:
        totals[(n_fetches - 1) % num_workers] -= n_fetches * fetch_factor - n_minibatches
    return np.maximum(totals, 0)


def _intervals(plan: DividedEpoch, progress: Progress) -> _Intervals:
    n_workers, factor = progress.num_workers, plan.fetch_factor
    totals = minibatches_by_worker(plan.n_minibatches, factor, n_workers)
    delivered = delivered_by_worker(totals, progress.n_minibatches)
    workers = np.arange(n_workers)
    # Fetches before the first are done, and those from `stop` on are untouched.
    first = int((workers + n_workers * (delivered // factor)).min())
    stop = int((workers + n_workers * -(-delivered // factor)).max(where=delivered > 0, initial=0))
    stop = min(max(first, stop), plan.n_fetches)
    first = min(first, plan.n_fetches)
    parts = [
        part
        for number in range(first, stop)
        for part in _of_round(
            plan, number, int(delivered[number % n_workers]) - number // n_workers * factor
        )
    ]
    begin = stop * plan.fetch_size * plan.world_size
    if stop == plan.n_fetches:
        begin = plan.n_delivered * plan.world_size
    if begin < plan.n_positions:
        parts.append((begin, plan.n_positions - begin, -1, -1))
    table = np.array(parts, np.int64).reshape(-1, 4)
    return _Intervals(starts=table[:, 0], sizes=table[:, 1], fetches=table[:, 2], ranks=table[:, 3])


def _of_round(plan: DividedEpoch, number: int, n_delivered: int) -> list[tuple[int, int, int, int]]:
    """Return the remaining intervals of the fetches with one number, one fetch per rank."""
    size = min(plan.fetch_size, plan.n_delivered - number * plan.fetch_size)
    begin = number * plan.fetch_size * plan.world_size
    done = min(max(0, n_delivered) * plan.batch_size, size)
    n_left = plan.n_positions - begin  # beyond these, rows are repeated
    if done == 0:
        return [(begin, min(n_left, size * plan.world_size), -1, -1)] if n_left > 0 else []
    if done == size:
        return []
    parts = list[tuple[int, int, int, int]]()
    for rank in range(plan.world_size):
        if (rank + 1) * size <= n_left:
            parts.append((done, size - done, number, rank))
        else:
            kept = plan.delivery_order(number, rank)[done:] < plan.n_positions
            steps = np.flatnonzero(np.diff(kept, prepend=False, append=False))
            runs = zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True)
            parts += [(done + start, end - start, number, rank) for start, end in runs]
    return parts
