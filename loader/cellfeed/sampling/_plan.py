"""The plan of an epoch: a pure function from a fetch's number to its rows.

Terms: a *minibatch* is one batch of the training loop; a *fetch* is ``fetch_factor`` minibatches
that are read together; a *position* is an index into the epoch's order, before it is divided into
fetches.

Rows are first permuted and then divided among ranks. In round ``i``, rank ``r`` of ``R`` takes
the fetch of F rows at positions ``[(i R + r) F, (i R + r + 1) F)``; in the last round, all ranks
take equally fewer rows. Every rank therefore delivers the same number of minibatches, of the same
sizes.

Where an epoch has more streams than ranks, each stream is divided off as a rank would be, and a
rank joins the minibatches of its streams: the i-th of each are one minibatch.

An epoch that was stopped is resumed as a plan of its remaining rows, on any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, require_integer, require_positive, require_seed
from cellfeed.sampling._base import EpochOrder, MatchedOrder, Progress, SamplingStrategy
from cellfeed.sampling._permutation import derive_key, random_words

# The remaining rows of an epoch that was stopped, as positions of an epoch of their own.
#
# Fetches that were not begun keep their positions, so that blocks stay whole. The fetch that each
# rank had begun leaves its undelivered minibatches. Both are intervals, as many as ranks, and one.

# An interval: its start, which is a position, or an index into a fetch that was begun; its size;
# and the fetch that was begun, and its rank, -1 for intervals of positions.
_Interval = tuple[int, int, int, int]


class RemainingRows:
    """The remaining rows of an epoch, by their new positions 0 .. ``n`` - 1.

    Parameters
    ----------
    plan
        The plan of the epoch.
    progress
        How far the epoch has come.
    """

    def __init__(self, plan: "EpochPlan", progress: Progress) -> None:
        self._plan = plan
        intervals = np.array(_remaining_intervals(plan, progress), np.int64).reshape(-1, 4)
        self._starts, self._sizes, self._fetches, self._ranks = intervals.T
        self._ends = np.cumsum(self._sizes)
        self.n = int(self._sizes.sum())

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the rows at the given positions."""
        return self._plan.rows_at(self._before(positions))

    def companions(self, positions: NDArray[np.int64], *, together: int) -> NDArray[np.int64]:
        """Return the companions at the given positions, which do not change by a stop."""
        del together  # which is that of the plan
        return self._plan.companions_at(self._before(positions))

    def _before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in the plan of the epoch before it was stopped."""
        flat = positions.ravel()
        which = np.searchsorted(self._ends, flat, side="right")
        places = self._starts[which] + flat - (self._ends[which] - self._sizes[which])
        for k in np.unique(which[self._fetches[which] >= 0]):
            order = self._plan.delivery_order(int(self._fetches[k]), int(self._ranks[k]))
            own = which == k
            places[own] = order[places[own]]
        return places.reshape(positions.shape)


def _remaining_intervals(plan: "EpochPlan", progress: Progress) -> list[_Interval]:
    """Return the intervals of the remaining rows, in the order of their new positions."""
    number, n_begun = divmod(progress.n_minibatches, plan.fetch_factor)
    intervals = list[_Interval]()
    if n_begun:
        intervals = _intervals_of_round(plan, number, n_begun)
        number += 1
    begin = min(number * plan.fetch_size, plan.rows_per_stream) * plan.world_size
    if begin < plan.n_positions:
        intervals.append((begin, plan.n_positions - begin, -1, -1))
    return intervals


def _intervals_of_round(plan: "EpochPlan", number: int, n_delivered: int) -> list[_Interval]:
    """Return the remaining intervals of the fetches with one number, one fetch per rank."""
    size = min(plan.fetch_size, plan.rows_per_stream - number * plan.fetch_size)
    begin = number * plan.fetch_size * plan.world_size
    done = min(n_delivered * plan.batch_size, size)
    n_left = plan.n_positions - begin  # beyond these, rows are repeated
    if done == size:
        return []
    intervals = list[_Interval]()
    for rank in range(plan.world_size):
        if (rank + 1) * size <= n_left:
            intervals.append((done, size - done, number, rank))
        else:
            is_new = plan.delivery_order(number, rank)[done:] < plan.n_positions
            steps = np.flatnonzero(np.diff(is_new, prepend=False, append=False))
            runs = zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True)
            intervals += [(done + start, end - start, number, rank) for start, end in runs]
    return intervals


_MOST_ROWS = 2**62  # of a fetch of all ranks, so that positions fit into 64 bits

# Purposes of the random streams of one (seed, epoch).
_STRATEGY, _WITHIN_FETCH = range(2)


@dataclass(frozen=True, slots=True)
class Fetch:
    """The rows of a fetch, and the order in which they are delivered.

    Parameters
    ----------
    rows
        The distinct rows to read, ascending, int64, shape (n_distinct,).
    order
        ``rows[order]`` are the rows in the order of delivery, intp, shape (n_delivered,). It is
        longer than ``rows`` if a row is delivered twice.
    companions
        ``rows[companions]`` are the companions of each of these, intp, shape (n_delivered,
        n_companions); None if the strategy has none.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.intp]
    companions: NDArray[np.intp] | None = None

    def in_groups(self, batch_size: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the order of delivery of all rows, and where groups begin and end in it.

        Groups are minibatches, each followed by the companions of its cells, if there are any.
        """
        ends = np.append(np.arange(0, max(1, self.order.size), batch_size), self.order.size)
        if self.companions is None:
            return self.order, ends
        n_companions, pieces = self.companions.shape[1], list[NDArray[np.intp]]()
        for first, stop in pairwise(ends.tolist()):
            pieces += self.order[first:stop], self.companions[first:stop].ravel()
        firsts = ends * (1 + n_companions)
        bounds = np.empty(2 * ends.size - 1, np.int64)
        bounds[::2], bounds[1::2] = firsts, firsts[:-1] + np.diff(ends)
        return np.concatenate(pieces), bounds


# Without slots, for which dataclasses of Python before 3.11.4 replace `__getstate__`.
@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One rank's share of one epoch, with random access to its fetches.

    Memory and start-up time do not depend on ``n_rows``, except for the order that the strategy
    prepares. It is prepared at the first fetch and kept as long as the plan, so take all fetches of
    an epoch from one plan. The order is not part of the plan's value: pickled copies prepare it
    again, and it is the same.

    Parameters
    ----------
    strategy
        Which rows are visited, and in which order.
    n_rows
        Number of rows of the collection.
    batch_size
        Number of rows in a minibatch.
    fetch_factor
        Number of minibatches in a fetch.
    drop_last
        What to do if rows do not divide evenly. If true, rows are left out so that every rank
        has the same number of full minibatches. If false, all rows are kept, so the last minibatch
        may be short; with several ranks, up to ``world_size - 1`` rows are repeated (or up to
        ``world_size - 1`` sets, if the strategy keeps sets of rows together), so that all ranks
        have equally many.
    seed, epoch
        Seed and number of the epoch, which alone determine the random order.
    rank, world_size
        This rank and the number of ranks.
    streams
        Number of streams into which the epoch is divided, a multiple of ``world_size``; if None,
        one for each rank. ``batch_size`` is the size of the minibatches of a stream. A rank joins
        those of its ``streams / world_size`` streams, so that all ranks together deliver the same
        rows in each step, however many they are.
    after
        How far the epoch had come, and how it was divided, each time that it was stopped and
        divided again. The plan covers the remaining rows, as an epoch of its own.

    Raises
    ------
    ParameterError
        A size or ``n_rows`` is below one, the fetches of all ranks have more than 2**62 rows,
        ``rank`` is outside [0, world_size), ``streams`` is no multiple of ``world_size``, or
        ``batch_size`` is not a multiple of the number of rows that the strategy keeps together.

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
    streams: int | None = None
    after: tuple[Progress, ...] = ()
    _order: EpochOrder | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the sizes and the rank."""
        for name in ("n_rows", "batch_size", "fetch_factor", "world_size"):
            object.__setattr__(self, name, require_positive(name, getattr(self, name)))
        object.__setattr__(self, "seed", require_seed(self.seed))
        for name in ("epoch", "rank"):
            object.__setattr__(self, name, require_integer(name, getattr(self, name)))
        if not 0 <= self.rank < self.world_size:
            msg = f"`0 <= rank < world_size` must hold, but got {self.rank=}, {self.world_size=}"
            raise ParameterError(msg.replace("self.", ""))
        if self.streams is not None:
            object.__setattr__(self, "streams", require_positive("streams", self.streams))
        if self.n_streams % self.world_size:
            msg = (
                f"`streams` must be a multiple of the number of ranks, but got {self.streams=} and "
                f"{self.world_size} ranks"
            )
            raise ParameterError(msg.replace("self.", ""))
        if self.fetch_size * self.n_streams > _MOST_ROWS:
            msg = (
                "`batch_size * fetch_factor` of all streams must be at most 2**62, but got "
                f"{self.batch_size=}, {self.fetch_factor=}, {self.n_streams} of them"
            )
            raise ParameterError(msg.replace("self.", ""))
        if self.batch_size % self.strategy.n_together:
            msg = (
                f"`batch_size` must be a multiple of {self.strategy.n_together}, the number of "
                f"cells that the strategy keeps together, but got batch_size={self.batch_size}"
            )
            raise ParameterError(msg)

    @property
    def n_streams(self) -> int:
        """Number of streams into which the epoch is divided."""
        return self.streams or self.world_size

    @property
    def streams_per_rank(self) -> int:
        """Number of streams whose minibatches this rank joins."""
        return self.n_streams // self.world_size

    @property
    def minibatch_size(self) -> int:
        """Number of rows in a whole minibatch of this rank."""
        return self.batch_size * self.streams_per_rank

    @property
    def fetch_size(self) -> int:
        """Number of rows of one stream in a whole fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def n_positions(self) -> int:
        """Number of positions that all ranks divide: those of the epoch, or the remaining ones."""
        if not self.after:
            return self.strategy.n_positions(self.n_rows)
        return cast(RemainingRows, self._epoch_order()).n

    @property
    def rows_per_stream(self) -> int:
        """Number of rows that each stream delivers in the epoch."""
        if self.drop_last:
            per_stream = self.n_positions // self.n_streams
            return per_stream - per_stream % self.batch_size
        together = self.strategy.n_together
        return -(-self.n_positions // (together * self.n_streams)) * together

    @property
    def n_minibatches(self) -> int:
        """Number of minibatches that this rank delivers in the epoch."""
        return -(-self.rows_per_stream // self.batch_size)

    @property
    def n_fetches(self) -> int:
        """Number of fetches of this rank in the epoch; all but the last are whole."""
        return -(-self.rows_per_stream // self.fetch_size)

    @property
    def n_whole_fetches(self) -> int:
        """Number of fetches of exactly `fetch_size` rows."""
        return self.rows_per_stream // self.fetch_size

    def fetch(self, number: int, *, first_minibatch: int = 0) -> Fetch:
        """Return the rows of a fetch, and the order in which they are delivered.

        Parameters
        ----------
        number
            Number of the fetch.
        first_minibatch
            The first of its minibatches to deliver; earlier ones are left out.

        Raises
        ------
        IndexError
            ``number`` is outside [0, n_fetches).
        """
        first = first_minibatch * self.minibatch_size
        delivered = self.delivered_rows(number)[0, first:]
        if not self.strategy.n_companions:
            return Fetch(*np.unique(delivered, return_inverse=True))
        companions = self.delivered_companions(number)[first:]
        together = np.concatenate([delivered, companions.ravel()])
        rows, inverse = np.unique(together, return_inverse=True)
        order, of_companions = np.split(inverse, [delivered.size])
        return Fetch(rows, order, of_companions.reshape(companions.shape))

    def share(self, *, first: int = 0, step: int = 1, n_delivered: int = 0) -> "Share":
        """Return the fetches that one worker of this rank reads.

        Parameters
        ----------
        first, step
            First of the fetches that are left, from 0, and the distance to the next: each of n
            workers takes every n-th.
        n_delivered
            Number of minibatches that the rank has already delivered.
        """
        if n_delivered >= self.n_minibatches:  # the last fetch may be short
            return Share(self, range(0), n_delivered)
        begin = n_delivered // self.fetch_factor + first
        return Share(self, range(begin, self.n_fetches, step), n_delivered)

    def delivered_rows(self, first: int, n: int = 1) -> NDArray[np.int64]:
        """Return the rows of ``n`` consecutive fetches in the order of delivery.

        Parameters
        ----------
        first
            Number of the first fetch.
        n
            Number of fetches; more than one only if all of them are whole.

        Returns
        -------
        Rows, int64, shape (n, rows of a fetch).

        Raises
        ------
        IndexError
            A fetch is outside [0, n_fetches), or a short fetch is requested together with others.
        """
        size = min(self.fetch_size, self.rows_per_stream - first * self.fetch_size)
        if first < 0 or size <= 0 or (n > 1 and first + n > self.n_whole_fetches):
            msg = (
                f"fetches {first} to {first + n - 1} were requested, but this epoch has "
                f"{self.n_fetches} fetches, {self.n_whole_fetches} of them whole"
            )
            raise IndexError(msg)
        # Beyond the last position, rows are repeated so that ranks are equal.
        places = self._places(first, n, self.rank * self.streams_per_rank, size)
        return self._delivered(places, self.rows_at(places % self.n_positions), n)

    def delivered_companions(self, number: int) -> NDArray[np.int64]:
        """Return what comes with the rows of a fetch in the order of delivery.

        Returns
        -------
        Rows, int64, shape (rows of a fetch, n_companions).
        """
        return self.companions_at(self.delivery_order(number, self.rank) % self.n_positions)

    def delivery_order(self, number: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's fetch in the order of delivery.

        Positions from ``n_positions`` on stand for repeated rows.
        """
        size = min(self.fetch_size, self.rows_per_stream - number * self.fetch_size)
        places = self._places(number, 1, rank * self.streams_per_rank, size)
        return self._delivered(places, places, 1).reshape(-1)

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at positions in [0, n_positions), in the shape of ``positions``."""
        return self._epoch_order()(positions)

    def companions_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the companions of these rows, shape ``(*positions.shape, n_companions)``."""
        order = cast(MatchedOrder, self._epoch_order())
        return order.companions(positions, together=self.fetch_size)

    def _places(self, first: int, n: int, stream: int, size: int) -> NDArray[np.int64]:
        """Return the positions of fetches of ``size`` rows, shape (n * streams_per_rank, size)."""
        rounds = np.arange(first, first + n, dtype=np.int64) * (self.fetch_size * self.n_streams)
        streams = np.arange(stream, stream + self.streams_per_rank, dtype=np.int64) * size
        starts = (rounds[:, None] + streams).reshape(-1, 1)
        return starts + np.arange(size, dtype=np.int64)

    def _delivered(
        self, places: NDArray[np.int64], rows: NDArray[np.int64], n: int
    ) -> NDArray[np.int64]:
        """Return the rows of ``n`` fetches of all streams in the order of delivery."""
        if self.strategy.shuffles_fetch:
            rows = np.take_along_axis(rows, self._shuffle(places), axis=1)
        if self.streams_per_rank == 1:
            return rows
        of_streams = rows.reshape(n, self.streams_per_rank, -1)
        starts = range(0, of_streams.shape[2], self.batch_size)
        joined = [of_streams[:, :, k : k + self.batch_size].reshape(n, -1) for k in starts]
        return np.concatenate(joined, axis=1)

    def _epoch_order(self) -> EpochOrder:
        order = self._order
        if order is None:  # in several threads at once, each prepares the same
            if self.after:
                *before, last = self.after
                n = last.world_size
                stopped = replace(self, after=tuple(before), rank=0, world_size=n, streams=None)
                order = RemainingRows(stopped, last)
            else:
                key = derive_key(self.seed, self.epoch, _STRATEGY)
                order = self.strategy.epoch_order(n_rows=self.n_rows, epoch_key=key)
            object.__setattr__(self, "_order", order)
        return order

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def _shuffle(self, places: NDArray[np.int64]) -> NDArray[np.intp]:
        stops = (len(self.after),) if self.after else ()
        key = derive_key(self.seed, self.epoch, _WITHIN_FETCH, *stops)
        # A word for each set of rows that stay together. No two words are the same.
        together = self.strategy.n_together
        words = random_words(key, places[:, ::together] // together)
        firsts = np.argsort(words, axis=1) * together
        return (firsts[:, :, None] + np.arange(together)).reshape(places.shape)


@dataclass(frozen=True, slots=True)
class Share:
    """What one reader of a rank reads of the rest of an epoch.

    Parameters
    ----------
    plan
        The plan of the rank's epoch.
    numbers
        Numbers of its fetches in the plan; part of the rank's first may have been delivered.
    n_delivered
        Number of minibatches that the rank has already delivered.
    """

    plan: EpochPlan
    numbers: Sequence[int]
    n_delivered: int = 0

    def n_minibatches_of(self, number: int) -> int:
        """Return the number of minibatches that are left of a fetch."""
        plan = self.plan
        end = min((number + 1) * plan.fetch_factor, plan.n_minibatches)
        return end - max(number * plan.fetch_factor, self.n_delivered)

    def fetch(self, number: int) -> Fetch:
        """Return the remaining rows of a fetch."""
        return self.plan.fetch(number, first_minibatch=self._n_begun(number))

    def whole_fetch(self, number: int) -> Fetch:
        """Return all rows of a fetch, and the order of the remaining ones."""
        fetch, n = self.plan.fetch(number), self._n_begun(number) * self.plan.minibatch_size
        companions = None if fetch.companions is None else fetch.companions[n:]
        return Fetch(fetch.rows, fetch.order[n:], companions)

    def _n_begun(self, number: int) -> int:
        """Return how many minibatches of a fetch have already been delivered."""
        return max(0, self.n_delivered - number * self.plan.fetch_factor)
