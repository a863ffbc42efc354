"""Interleaved minibatches of several datasets."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import groupby, islice, repeat
from math import ceil, floor
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, StateError, require_one_of, require_positive
from cellfeed.dataset._cell_dataset import CellDataset, Minibatches
from cellfeed.dataset._ranks import CommonSeed
from cellfeed.dataset._resumable import ResumableDataset
from cellfeed.dataset._run import Beginning
from cellfeed.sampling import Permutation, Share, derive_key

Stop = Literal["first_exhausted", "all_exhausted"]

# Proportions are taken for fractions, so that 0.1 is a tenth.
_LARGEST_DENOMINATOR = 10**9
# Apart, so that no epoch of a dataset comes again in a later epoch of all, also on other ranks.
_LATER_ROUNDS = 1 << 40
_ORDER = 0x1E  # apart from the keys of the datasets, which derive theirs from the same seed


class InterleavedDatasets(ResumableDataset):
    """Interleave the minibatches of several datasets at random, in given proportions.

    Each minibatch comes from one dataset, which has its own collection, strategy, sizes and
    transforms and delivers its minibatches in its own order. Each dataset delivers the same number
    of minibatches in every epoch. The order of turns depends on the seed of the first dataset, the
    epoch and the number of the minibatch, and is the same on all ranks and with any number
    of worker processes.

    Parameters
    ----------
    datasets
        The datasets, at least one, all with the same ranks.
    proportions
        Relative numbers of minibatches, one for each dataset. If None, each dataset counts
        in proportion to the minibatches that it has, so that each is delivered once.
    stop
        When an epoch ends. "first_exhausted": as soon as one dataset has delivered all its
        minibatches, and the others a number in proportion. "all_exhausted": when all datasets
        have delivered theirs; those that finish earlier continue with another epoch of their own.
    n_minibatches
        Number of minibatches in an epoch, in place of ``stop``; datasets that are exhausted
        continue with another epoch of their own.

    Raises
    ------
    ParameterError
        There is no dataset, one has another ``rank``, ``world_size`` or
        ``streams``, or ``proportions`` are not positive numbers, one for each dataset.

    Examples
    --------
    >>> from cellfeed import Streaming
    >>> few, many = (CellDataset(np.arange(n), Streaming(), 1, seed=0) for n in (10, 1000))
    >>> mixed = InterleavedDatasets([few, many], [1, 3])
    >>> len(mixed), np.bincount(mixed.turns(epoch=0))
    (40, array([10, 30]))
    """

    _has_parts = True
    _latest_order: "tuple[Beginning, list[_Fetch]] | None" = None

    def __init__(
        self,
        datasets: Sequence[CellDataset],
        proportions: Sequence[float] | None = None,
        *,
        stop: Stop = "first_exhausted",
        n_minibatches: int | None = None,
    ) -> None:
        self.datasets = tuple(datasets)
        if not self.datasets or not all(isinstance(each, CellDataset) for each in self.datasets):
            msg = f"`datasets` must be CellDatasets, at least one, but got {datasets!r}"
            raise ParameterError(msg)
        divisions = [(each.rank, each.world_size, each.streams) for each in self.datasets]
        if len({*divisions}) > 1:
            msg = (
                "`datasets` must all have the same rank, world_size and streams, but got "
                f"{divisions}"
            )
            raise ParameterError(msg)
        super().__init__(self.datasets[0]._ranks, self.datasets[0].streams)  # noqa: SLF001
        self._counters.parts = [each.counters for each in self.datasets]
        require_one_of("stop", stop, get_args(Stop))
        self.proportions = None if proportions is None else self._checked(proportions)
        self.stop = stop
        self.n_minibatches = (
            None if n_minibatches is None else require_positive("n_minibatches", n_minibatches)
        )
        self._is_made = True

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.counters.parts = [each.counters for each in self.datasets]
        return copied

    def __repr__(self) -> str:
        shares = None if self.proportions is None else [float(each) for each in self.proportions]
        datasets = ", ".join(map(repr, self.datasets))
        return f"{type(self).__name__}([{datasets}], {shares}, stop={self.stop!r})"

    @property
    def _length(self) -> int:
        return sum(self.minibatches_of_each)

    @property
    def minibatches_of_each(self) -> tuple[int, ...]:
        """Number of minibatches that each dataset delivers to this rank in an epoch."""
        return self._counts(self.world_size)

    def _counts(self, world_size: int) -> tuple[int, ...]:
        lengths = [each.plan_on(0, world_size).n_minibatches for each in self.datasets]
        shares = self.proportions or tuple(map(Fraction, lengths))
        if self.n_minibatches is not None:
            return _apportioned(self.n_minibatches, shares)
        turns = [length / share for length, share in zip(lengths, shares, strict=True)]
        if self.stop == "first_exhausted":
            return tuple(floor(min(turns) * share) for share in shares)
        return tuple(ceil(max(turns) * share) for share in shares)

    def turns(self, *, epoch: int) -> NDArray[np.int64]:
        """Return which dataset delivers each minibatch of an epoch, by its index in ``datasets``.

        After ``n`` minibatches, each dataset has delivered ``np.bincount(turns[:n])``.

        Parameters
        ----------
        epoch
            Number of the epoch.
        """
        return self._turns(self._seeds[0].use(self.world_size), epoch, self.world_size)

    def _turns(self, seed: int, epoch: int, world_size: int) -> NDArray[np.int64]:
        counts = self._counts(world_size)
        key = derive_key(seed, _ORDER, epoch, 0, 1)
        places = Permutation(sum(counts), key)(np.arange(sum(counts)))
        return np.searchsorted(np.cumsum(counts), places, side="right")

    @property
    def as_torch(self) -> bool:  # type: ignore[override]
        """Whether minibatches of any dataset are torch tensors."""
        return any(each.as_torch for each in self.datasets)

    @property
    def _can_be_forked(self) -> bool:
        return all(each._can_be_forked for each in self.datasets)  # noqa: SLF001

    @property
    def minibatch_bytes(self) -> int:
        """Mean size of the largest minibatch as it is read, in bytes; 0 if unknown."""
        return max(each.minibatch_bytes for each in self.datasets)

    @property
    def _seeds(self) -> tuple[CommonSeed, ...]:
        return tuple(each._seed for each in self.datasets)  # noqa: SLF001

    def _n_left(self, beginning: Beginning) -> int:
        position = beginning.position
        if position.after:
            msg = (
                f"the state is of {position.after[-1].world_size} ranks, but there are "
                f"{position.progress.world_size} ranks now; resume interleaved datasets on as many"
            )
            raise StateError(msg)
        return sum(self._counts(beginning.world_size)) - position.progress.n_minibatches

    def _read_identity(self) -> Any:
        return [each._read_identity() for each in self.datasets]  # noqa: SLF001

    def _identity(self) -> dict[str, Any]:
        parts = [each._identity() for each in self.datasets]  # noqa: SLF001
        shares = None if self.proportions is None else list(map(str, self.proportions))
        configuration = {
            "datasets": [part["configuration"] for part in parts],
            "proportions": shares,
            "stop": self.stop,
            "n_minibatches": self.n_minibatches,
        }
        return {
            "data": {"datasets": [part["data"] for part in parts]},
            "configuration": configuration,
        }

    def _minibatches(self, beginning: Beginning) -> Minibatches:
        with ExitStack() as stack:
            delivered = self._opened(self._order(beginning), stack)
            for turn in self._rest(beginning).tolist():
                yield next(delivered[turn])

    def _sizes(self, beginning: Beginning) -> Iterable[int]:
        return (each.n_minibatches for each in self._order(beginning))

    def _sources(self, beginning: Beginning) -> Iterator[int]:
        left: list[Iterator[int]] = [iter(())] * len(self.datasets)
        fetches = enumerate(self._sizes(beginning))
        for turn in self._rest(beginning).tolist():
            number = next(left[turn], None)
            if number is None:
                number, n = next(fetches)
                left[turn] = repeat(number, n - 1)
            yield number

    def _of_worker(self, beginning: Beginning, first: int, step: int) -> Minibatches:
        chosen = self._order(beginning)[first::step]
        with ExitStack() as stack:
            delivered = self._opened(chosen, stack)
            for each in chosen:
                yield from islice(delivered[each.dataset], each.n_minibatches)

    def _opened(self, fetches: "Sequence[_Fetch]", stack: ExitStack) -> list[Minibatches]:
        """Return the minibatches of given fetches, those of each dataset by themselves."""
        return [
            stack.enter_context(
                closing(_of_dataset(dataset, [e for e in fetches if e.dataset == k]))
            )
            for k, dataset in enumerate(self.datasets)
        ]

    def _rest(self, beginning: Beginning) -> NDArray[np.int64]:
        """Return which dataset delivers each minibatch that is left of an epoch."""
        position, seed = beginning.position, beginning.seeds[0]
        turns = self._turns(seed, position.epoch, beginning.world_size)
        return turns[position.progress.n_minibatches :]

    def _order(self, beginning: Beginning) -> "list[_Fetch]":
        """Return the fetches that are left of an epoch, in the order in which they are needed."""
        known = self._latest_order
        if known is None or known[0] != beginning:
            epoch = beginning.position.epoch
            turns = self._turns(beginning.seeds[0], epoch, beginning.world_size)
            all_left = (self._left(k, beginning, turns) for k in range(len(self.datasets)))
            found = [each for left in all_left for each in left]
            known = beginning, sorted(found, key=lambda each: each.needed)
            self._latest_order = known
        return known[1]

    def _left(
        self, number: int, beginning: Beginning, turns: NDArray[np.int64]
    ) -> "Iterator[_Fetch]":
        """Yield the fetches that are left of a dataset, of each of its own epochs."""
        position, dataset = beginning.position, self.datasets[number]
        places = np.flatnonzero(turns == number)
        n_begun = int(np.searchsorted(places, position.progress.n_minibatches))
        of_rank = partial(dataset.plan_on, beginning.rank, beginning.world_size)
        n, length = places.size, of_rank().n_minibatches
        for times in range(n_begun // length, ceil(n / length)):
            epoch = position.epoch + times * _LATER_ROUNDS
            plan = of_rank(seed=beginning.seeds[number], epoch=epoch)
            share = plan.share(n_delivered=max(0, n_begun - times * length))
            for fetch in share.numbers:
                first = times * length + max(share.n_delivered, fetch * plan.fetch_factor)
                n_left = min(share.n_minibatches_of(fetch), n - first)
                if n_left <= 0:
                    return
                yield _Fetch(int(places[first]), number, share, fetch, n_left)

    def _checked(self, proportions: Sequence[float]) -> tuple[Fraction, ...]:
        shares = [float(each) for each in proportions]
        if len(shares) != len(self.datasets) or not all(0 < each < np.inf for each in shares):
            msg = (
                f"`proportions` must be positive numbers, one for each of {len(self.datasets)} "
                f"datasets, but got {list(proportions)}"
            )
            raise ParameterError(msg)
        fractions = [Fraction(each).limit_denominator(_LARGEST_DENOMINATOR) for each in shares]
        return tuple(each or Fraction(share) for each, share in zip(fractions, shares, strict=True))


class _Fetch(NamedTuple):
    """A fetch of one of several datasets.

    Parameters
    ----------
    needed
        Number of the first minibatch of the epoch that comes from it.
    dataset
        Index of its dataset.
    share, number
        What is left of the epoch of its dataset, and its number there.
    n_minibatches
        How many of its minibatches are delivered.
    """

    needed: int
    dataset: int
    share: Share
    number: int
    n_minibatches: int


def _of_dataset(dataset: CellDataset, fetches: Sequence[_Fetch]) -> Minibatches:
    """Deliver some fetches of a dataset, of one of its epochs after another."""
    for _, group in groupby(fetches, key=lambda each: id(each.share)):
        of_epoch = [*group]
        share = replace(of_epoch[0].share, numbers=tuple(each.number for each in of_epoch))
        with closing(dataset.delivered(share)) as minibatches:
            yield from islice(minibatches, sum(each.n_minibatches for each in of_epoch))


def _apportioned(n: int, shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return ``n`` divided in proportion to shares, by largest remainders."""
    exact = [n * each / sum(shares) for each in shares]
    counts = [floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
    for k in by_remainder[: n - sum(counts)]:
        counts[k] += 1
    return tuple(counts)
