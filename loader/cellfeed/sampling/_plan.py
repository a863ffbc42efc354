"""The plan of an epoch: a pure function from a fetch's number to its rows.

Terms: a *minibatch* is what the training loop gets; a *fetch* is ``fetch_factor`` minibatches
read together; a *position* is a place in the epoch's order, before it is divided into fetches.

Rows are permuted first and divided among ranks after. In round ``i``, rank ``r`` of ``R`` takes
the fetch at positions ``[(i R + r) F, (i R + r + 1) F)``; in the last round all ranks take
equally fewer. Every rank therefore delivers the same number of minibatches, of the same sizes.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, require_integer, require_positive
from cellfeed.sampling._base import EpochOrder, SamplingStrategy
from cellfeed.sampling._random import derive_key, random_words

__all__ = ["EpochPlan", "Fetch"]

# Purposes of the random streams of one (seed, epoch).
_STRATEGY, _WITHIN_FETCH = range(2)


@dataclass(frozen=True, slots=True)
class Fetch:
    """What to read at once, and the order in which it leaves.

    Parameters
    ----------
    rows
        The distinct rows to read, ascending, int64, shape (n_distinct,).
    order
        ``rows[order]`` are the rows in the order of delivery, intp, shape (n_delivered,).
        Longer than ``rows`` where a row is delivered twice.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One rank's share of one epoch, from which any fetch can be taken at any time.

    Memory and start-up time do not depend on ``n_rows``, beyond what the strategy prepares for an
    epoch. That is done at the first fetch and kept as long as the plan, so whoever wants many
    fetches of one epoch takes them from one plan. It is not part of the plan's value: copies
    that are pickled prepare anew, and give the same.

    Parameters
    ----------
    strategy
        Which rows are visited, and in which order.
    n_rows
        Rows of the collection.
    batch_size
        Rows of a minibatch.
    fetch_factor
        Minibatches of a fetch.
    drop_last
        What happens where rows do not divide evenly: if true, leave out rows until every rank
        has the same number of full minibatches; if false, keep all rows, so that the last
        minibatch may be short, and with several ranks repeat up to ``world_size - 1`` rows, or
        as many sets of rows that stay together, so that all ranks have equally many.
    seed, epoch
        The order depends on these two alone.
    rank, world_size
        This rank and the number of ranks.

    Raises
    ------
    ParameterError
        A size or ``n_rows`` is below one, ``rank`` is outside [0, world_size), or minibatches
        would tear apart what the strategy keeps together.

    Examples
    --------
    >>> from cellfeed import BlockShuffling
    >>> plan = EpochPlan(
    ...     strategy=BlockShuffling(block_size=4), n_rows=1_000_000_000, batch_size=64,
    ...     fetch_factor=16, seed=0,
    ... )
    >>> plan.n_minibatches, plan.n_fetches
    (15625000, 976563)
    >>> plan.fetch(900_000).rows.shape
    (1024,)
    """

    strategy: SamplingStrategy
    n_rows: int
    batch_size: int
    fetch_factor: int
    drop_last: bool = False
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    _order: EpochOrder | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the sizes and the rank."""
        for name in ("n_rows", "batch_size", "fetch_factor", "world_size"):
            object.__setattr__(self, name, require_positive(name, getattr(self, name)))
        for name in ("seed", "epoch", "rank"):
            object.__setattr__(self, name, require_integer(name, getattr(self, name)))
        if not 0 <= self.rank < self.world_size:
            msg = f"`0 <= rank < world_size` must hold, but got {self.rank=}, {self.world_size=}"
            raise ParameterError(msg.replace("self.", ""))
        if self.batch_size % self.strategy.n_together:
            msg = (
                f"`batch_size` must be a multiple of {self.strategy.n_together}, the number of "
                f"cells that the strategy keeps together, but got batch_size={self.batch_size}"
            )
            raise ParameterError(msg)

    @property
    def fetch_size(self) -> int:
        """Rows of a whole fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def n_delivered(self) -> int:
        """Rows that this rank delivers in the epoch."""
        n_positions = self.strategy.n_positions(self.n_rows)
        if self.drop_last:
            per_rank = n_positions // self.world_size
            return per_rank - per_rank % self.batch_size
        together = self.strategy.n_together
        return -(-n_positions // (together * self.world_size)) * together

    @property
    def n_minibatches(self) -> int:
        """Minibatches that this rank delivers in the epoch."""
        return -(-self.n_delivered // self.batch_size)

    @property
    def n_fetches(self) -> int:
        """Fetches that this rank makes in the epoch; all but the last are whole."""
        return -(-self.n_delivered // self.fetch_size)

    @property
    def n_whole_fetches(self) -> int:
        """Fetches of exactly `fetch_size` rows."""
        return self.n_delivered // self.fetch_size

    def fetch(self, number: int) -> Fetch:
        """Return what to read for a fetch, and the order in which its rows leave.

        Raises
        ------
        IndexError
            ``number`` is outside [0, n_fetches).
        """
        delivered = self.delivered_rows(number)[0]
        rows, order = np.unique(delivered, return_inverse=True)
        return Fetch(rows, order)

    def delivered_rows(self, first: int, n: int = 1) -> NDArray[np.int64]:
        """Return the rows of ``n`` consecutive fetches in the order of delivery.

        Parameters
        ----------
        first
            Number of the first fetch.
        n
            How many; more than one at a time only of whole fetches.

        Returns
        -------
        Rows, int64, shape (n, rows of a fetch).

        Raises
        ------
        IndexError
            A fetch is outside [0, n_fetches), or short and not asked for on its own.
        """
        size = min(self.fetch_size, self.n_delivered - first * self.fetch_size)
        if first < 0 or size <= 0 or (n > 1 and first + n > self.n_whole_fetches):
            msg = (
                f"fetches {first} to {first + n - 1} asked for, "
                f"but this epoch has {self.n_fetches}, of which {self.n_whole_fetches} are whole"
            )
            raise IndexError(msg)
        rounds = np.arange(first, first + n, dtype=np.int64)
        starts = rounds * (self.fetch_size * self.world_size) + self.rank * size
        places = starts[:, None] + np.arange(size, dtype=np.int64)
        # Beyond the last position, rows are repeated so that ranks are equal.
        rows = self._epoch_order()(places % self.strategy.n_positions(self.n_rows))
        if self.strategy.shuffles_fetch:
            rows = np.take_along_axis(rows, self._shuffle(places), axis=1)
        return rows

    def _epoch_order(self) -> EpochOrder:
        order = self._order
        if order is None:  # in several threads at once, each prepares the same
            order = self.strategy.epoch_order(
                n_rows=self.n_rows, epoch_key=derive_key(self.seed, self.epoch, _STRATEGY)
            )
            object.__setattr__(self, "_order", order)
        return order

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in (state | {"_order": None}).items():
            object.__setattr__(self, name, value)

    def _shuffle(self, places: NDArray[np.int64]) -> NDArray[np.intp]:
        key = derive_key(self.seed, self.epoch, _WITHIN_FETCH)
        # What stays together has one word, and its order, since sorting is stable.
        words = random_words(key, places // self.strategy.n_together)
        return np.argsort(words, axis=1, kind="stable")
