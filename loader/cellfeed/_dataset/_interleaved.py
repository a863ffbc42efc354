"""Interleaved minibatches of several datasets."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import ceil, floor
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed._dataset._cell_dataset import CellDataset, Minibatches
from cellfeed._dataset._loader import MinibatchLoader, loader_over, to_be_called
from cellfeed._dataset._ranks import RanksCompared
from cellfeed._dataset._state import ResumableDataset
from cellfeed._decode import Counters
from cellfeed._errors import ParameterError, StateError, require_positive
from cellfeed.sampling import Permutation, Progress, derive_key
from cellfeed.sampling._base import delivered_by_worker, next_worker
from cellfeed.sampling._plan import minibatches_by_worker

Stop = Literal["first_exhausted", "all_exhausted"]

# Proportions are taken for fractions, so that 0.1 is a tenth.
_LARGEST_DENOMINATOR = 10**9
_QUEUED_MINIBATCHES = 8
# Apart, so that no epoch of a dataset comes again in a later epoch of all, also on other ranks.
_LATER_ROUNDS = 1 << 40
_ORDER = 0x1E  # apart from the keys of the datasets, which derive theirs from the same seed


class InterleavedDatasets(ResumableDataset):
    """Interleave the minibatches of several datasets at random, in given proportions.

    Each minibatch comes from one dataset, which has its own collection, strategy, sizes and
    transforms and delivers its minibatches in its own order. Each dataset delivers the same number
    of minibatches in every epoch. The order of turns depends on the seed of the first dataset, the
    epoch and the number of the minibatch, and is the same on all ranks. Worker processes divide
    the fetches of each dataset, and each worker interleaves its own share.

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
        There is no dataset, one is ``adaptive``, or ``proportions`` are not positive numbers, one
        for each dataset.
        Also when an epoch begins: the datasets have different ranks.

    Examples
    --------
    >>> from cellfeed import Streaming
    >>> few, many = (CellDataset(np.arange(n), Streaming(), 1, seed=0) for n in (10, 1000))
    >>> mixed = InterleavedDatasets([few, many], [1, 3])
    >>> len(mixed), np.bincount(mixed.turns(epoch=0))
    (40, array([10, 30]))
    """

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
        if any(each.adaptive for each in self.datasets):
            msg = (
                "`datasets` must not be `adaptive`, as each is a part of what the training loop "
                "waits for; leave `adaptive` out, and give `num_threads` and `prefetch`"
            )
            raise ParameterError(msg)
        super().__init__(RanksCompared(self.datasets[0]._ranks))  # noqa: SLF001
        self._counters.parts = [each.counters for each in self.datasets]
        if stop not in get_args(Stop):
            msg = f"`stop` must be one of {get_args(Stop)}, but got {stop!r}"
            raise ParameterError(msg)
        self.proportions = None if proportions is None else self._checked(proportions)
        self.stop = stop
        self.n_minibatches = (
            None if n_minibatches is None else require_positive("n_minibatches", n_minibatches)
        )

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
        lengths = [each.n_minibatches for each in self.datasets]
        shares = self.proportions or tuple(map(Fraction, lengths))
        if self.n_minibatches is not None:
            return _apportioned(self.n_minibatches, shares)
        turns = [length / share for length, share in zip(lengths, shares, strict=True)]
        if self.stop == "first_exhausted":
            return tuple(floor(min(turns) * share) for share in shares)
        return tuple(ceil(max(turns) * share) for share in shares)

    @property
    def rank(self) -> int:
        """The current rank of this process."""
        return self.datasets[0].rank

    @property
    def world_size(self) -> int:
        """The current number of processes that train together."""
        return self.datasets[0].world_size

    @property
    def settings(self) -> list[Any]:
        """See `ResumableDataset`; those of all datasets."""
        return [*super().settings, *(value for each in self.datasets for value in each.settings)]

    def turns(self, *, epoch: int, worker: int = 0, n_workers: int = 1) -> NDArray[np.int64]:
        """Return which dataset delivers each minibatch of an epoch, by its index in ``datasets``.

        After ``n`` minibatches, each dataset has delivered ``np.bincount(turns[:n])``.

        Parameters
        ----------
        epoch
            Number of the epoch.
        worker, n_workers
            The worker process, which has a share of each dataset, and the number of workers.
        """
        counts = self._counts(worker, n_workers)
        key = derive_key(self.datasets[0].seed, _ORDER, epoch, worker, n_workers)
        places = Permutation(sum(counts), key)(np.arange(sum(counts)))
        return np.searchsorted(np.cumsum(counts), places, side="right")

    @to_be_called
    def loader(self, num_workers: int = 0, **options: Any) -> MinibatchLoader:
        """Return a DataLoader over the minibatches; see `CellDataset.loader`.

        Parameters
        ----------
        num_workers
            Number of worker processes.
        **options
            Other parameters of `torch.utils.data.DataLoader`.
        """
        return loader_over(
            self,
            num_workers,
            options,
            n_queued=_QUEUED_MINIBATCHES,
            minibatch_bytes=self._minibatch_bytes,
            as_torch=any(each.as_torch for each in self.datasets),
            can_be_forked=all(each._can_be_forked for each in self.datasets),  # noqa: SLF001
        )

    def _all_counters(self) -> list[Counters]:
        return [self._counters, *self._counters.parts]

    @property
    def _minibatch_bytes(self) -> int:
        return max(each._minibatch_bytes for each in self.datasets)  # noqa: SLF001

    def _meet(self) -> None:
        """Agree on the seeds with other ranks."""
        ranks = {(each.rank, each.world_size) for each in self.datasets}
        if len(ranks) > 1:
            msg = f"`datasets` must all have the same rank and world_size, but got {sorted(ranks)}"
            raise ParameterError(msg)
        for each in self.datasets:
            each._meet()  # noqa: SLF001

    def _plan_of(self, *, epoch: int, after: tuple[Progress, ...]) -> "_MixedEpoch":
        if after:
            stopped = after[-1]
            msg = (
                f"the state is of {stopped.world_size} ranks with {stopped.num_workers} workers "
                f"each, but there are {self.world_size} ranks now, or another number of workers; "
                "resume interleaved datasets with the same numbers"
            )
            raise StateError(msg)
        return _MixedEpoch(
            epoch=epoch,
            seed=self._seed_values(),
            world_size=self.world_size,
            n_minibatches=sum(self.minibatches_of_each),
            n_of_workers=lambda n: np.array([sum(self._counts(k, n)) for k in range(n)]),
        )

    def _n_of(
        self,
        *,
        seed: Any,  # noqa: ARG002 - all epochs have as many
        epoch: int,  # noqa: ARG002
        after: tuple[Progress, ...],
        world_size: int,
    ) -> int | None:
        is_resumed = not after and world_size == self.world_size
        return sum(self.minibatches_of_each) if is_resumed else None

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

    def _seed_values(self) -> list[int]:
        return [each.seed for each in self.datasets]

    def _take_seeds(self, seeds: list[int]) -> None:
        for each, seed in zip(self.datasets, seeds, strict=True):
            each._seed.require_no_other(seed)  # noqa: SLF001 - before any is taken
        for each, seed in zip(self.datasets, seeds, strict=True):
            each._take_seeds(seed)  # noqa: SLF001

    def _minibatches(self, share: "_MixedShare") -> Minibatches:
        turns = self.turns(epoch=share.epoch, worker=share.worker, n_workers=share.num_workers)
        begun = np.bincount(turns[: share.n_delivered], minlength=len(self.datasets)).tolist()
        with ExitStack() as stack:
            parts = [
                stack.enter_context(closing(self._part(number, share, begun[number])))
                for number in range(len(self.datasets))
            ]
            for turn in turns[share.n_delivered :].tolist():
                yield next(parts[turn])

    def _part(self, number: int, share: "_MixedShare", n_begun: int) -> Minibatches:
        """Deliver this process's share of the minibatches of one dataset, after the first."""
        dataset = self.datasets[number]
        counts = self._shares(number, share.worker, share.num_workers)
        for times, count in enumerate(counts):
            skipped = min(n_begun, count)
            n_begun -= skipped
            if skipped == count:
                continue
            plan = dataset.plan(epoch=share.epoch + times * _LATER_ROUNDS)
            own = plan.share_of_worker(
                worker=share.worker, num_workers=share.num_workers, n_delivered=skipped
            )
            with closing(dataset._minibatches(own)) as minibatches:  # noqa: SLF001
                n_left = count - skipped
                is_all = n_left == own.n_minibatches
                yield from minibatches if is_all else islice(minibatches, n_left)

    def _counts(self, worker: int, n_workers: int) -> list[int]:
        """Return how many minibatches a worker delivers of each dataset in an epoch."""
        return [sum(self._shares(k, worker, n_workers)) for k in range(len(self.datasets))]

    def _shares(self, number: int, worker: int, n_workers: int) -> list[int]:
        """Return how many minibatches a worker delivers of each epoch of a dataset."""
        dataset, n = self.datasets[number], self.minibatches_of_each[number]
        length, factor = dataset.n_minibatches, dataset.fetch_factor
        return [
            int(minibatches_by_worker(min(length, n - start), factor, n_workers)[worker])
            for start in range(0, n, length)
        ]

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


@dataclass(frozen=True, slots=True)
class _MixedShare:
    """The minibatches of an epoch that a worker still has to deliver."""

    epoch: int
    worker: int
    num_workers: int
    n_delivered: int
    n_minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _MixedEpoch:
    """An epoch of several datasets on this rank, divided among workers; see `EpochPlan`.

    ``n_of_workers`` returns the numbers of minibatches of each of ``num_workers`` workers.
    """

    epoch: int
    seed: list[int]
    world_size: int
    n_minibatches: int
    n_of_workers: Callable[[int], NDArray[np.int64]]
    after: tuple[Progress, ...] = ()

    def share(self, *, worker: int, num_workers: int, n_delivered: int) -> _MixedShare:
        """See `EpochPlan.share`."""
        totals = self.n_of_workers(num_workers)
        done = delivered_by_worker(totals, n_delivered)
        number = (worker + next_worker(totals, done)) % num_workers
        return self.share_of_worker(
            worker=number, num_workers=num_workers, n_delivered=int(done[number])
        )

    def share_of_worker(self, *, worker: int, num_workers: int, n_delivered: int) -> _MixedShare:
        """See `EpochPlan.share_of_worker`."""
        n_left = int(self.n_of_workers(num_workers)[worker]) - n_delivered
        return _MixedShare(self.epoch, worker, num_workers, n_delivered, n_left)


def _apportioned(n: int, shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return ``n`` divided in proportion to shares, by largest remainders."""
    exact = [n * each / sum(shares) for each in shares]
    counts = [floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
    for k in by_remainder[: n - sum(counts)]:
        counts[k] += 1
    return tuple(counts)
