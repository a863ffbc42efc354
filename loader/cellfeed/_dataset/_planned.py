"""Epochs of one collection, planned by a strategy."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cellfeed._dataset._fetching import Fetches
from cellfeed._dataset._next_epoch import NextEpoch
from cellfeed._dataset._ranks import CommonSeed, Ranks, RanksCompared
from cellfeed._dataset._resumable import ResumableDataset
from cellfeed._dataset._state import data_identity, strategy_identity
from cellfeed._errors import CellfeedError, ParameterError, require_positive
from cellfeed._torch import get_worker_info
from cellfeed._workers import departures
from cellfeed.sampling import EpochPlan, Progress, SamplingStrategy, Share
from cellfeed.sampling._kernels import _permute, _radix  # noqa: F401 - which plans look for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PlannedDataset"]


class PlannedDataset(ResumableDataset[Share]):
    """Delivers the minibatches of planned epochs; subclasses read and make them.

    Parameters
    ----------
    collection, n_rows
        The collection, and the number of its rows.
    strategy, batch_size, fetch_factor, drop_last, rank, world_size, device_mesh, seed, \
    prefetch_next_epoch
        See `CellDataset`.
    """

    def __init__(
        self,
        collection: Any,
        n_rows: int,
        strategy: SamplingStrategy,
        *,
        batch_size: int,
        fetch_factor: int,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
        device_mesh: "DeviceMesh | None",
        seed: int | None,
        prefetch_next_epoch: bool,
    ) -> None:
        self._ranks = Ranks(rank, world_size, device_mesh)
        super().__init__(RanksCompared(self._ranks))
        if not isinstance(strategy, SamplingStrategy):
            msg = f"`strategy` must be a SamplingStrategy, but got {strategy!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        self.collection = collection
        self.strategy = strategy.bound_to(collection)
        self.batch_size = require_positive("batch_size", batch_size)
        self.fetch_factor = require_positive("fetch_factor", fetch_factor)
        self.drop_last = drop_last
        self._n_rows = n_rows
        self._seed = CommonSeed(seed)
        self._seed.agree(self._ranks.n_with_one_seed, self._compared)
        self.prefetch_next_epoch = prefetch_next_epoch
        self._next_epoch = NextEpoch[Fetches]()
        # Arrays are hashed, and files looked at, once.
        self._strategy_identity: tuple[SamplingStrategy, dict[str, Any]] | None = None
        self._data_identity: dict[str, Any] | None = None
        self._plan(*self._ranks.look())  # which refuses what cannot be

    def _values(self) -> dict[str, Any]:
        """Return the other parameters that values depend on, as JSON values."""
        return {}

    def __len__(self) -> int:
        """Return the number of minibatches that an epoch delivers to this rank.

        In an epoch that was resumed, this includes the minibatches delivered before, so that a
        loop that continues its count ends with this number.
        """
        return max(self.n_minibatches, self._run.n_of_epoch)

    @property
    def n_minibatches(self) -> int:
        """Number of minibatches in a whole epoch on this rank."""
        return self._plan(*self._ranks.now()).n_minibatches

    @property
    def rank(self) -> int:
        """The current rank of this process."""
        return self._ranks.look()[0]

    @property
    def world_size(self) -> int:
        """The current number of processes that train together."""
        return self._ranks.look()[1]

    @property
    def seed(self) -> int:
        """The seed, which determines the order of all epochs."""
        return self._seed.use(self.world_size)

    def plan(self, *, epoch: int) -> EpochPlan:
        """Return the plan of an epoch: which rows this rank delivers, and in which order.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, or ``seed`` was not given and ranks have not agreed on
            one yet.
        """
        return self._plan_of(epoch=epoch, after=())

    def _plan_of(self, *, epoch: int, after: tuple[Progress, ...]) -> EpochPlan:
        rank, world_size = self._ranks.now()
        seed = self._seed.use(world_size)
        return self._plan(rank, world_size, seed=seed, epoch=epoch, after=after)

    def _plan(
        self,
        rank: int,
        world_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        after: tuple[Progress, ...] = (),
    ) -> EpochPlan:
        plan = EpochPlan(
            strategy=self.strategy,
            n_rows=self._n_rows,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            drop_last=self.drop_last,
            seed=seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            after=after,
        )
        if plan.n_minibatches == 0 and not after:
            msg = (
                f"none of {self._n_rows:,} rows is left, since `drop_last` leaves out rows that "
                "do not fill a minibatch or a block; use smaller sizes, or drop_last=False"
            )
            raise ParameterError(msg)
        return plan

    def _n_of(
        self, *, seed: Any, epoch: int, after: tuple[Progress, ...], world_size: int
    ) -> int | None:
        return self._plan(0, world_size, seed=seed, epoch=epoch, after=after).n_minibatches

    def _following(self) -> Callable[[Share], Share | None]:
        """Return a function that returns the share to read ahead next, and keeps nothing alive."""
        itself = weakref.ref(self)

        def following(share: Share) -> Share | None:
            dataset = itself()
            return None if dataset is None else dataset._share_after(share)  # noqa: SLF001

        return following

    def _share_after(self, share: Share) -> Share | None:
        worker, lending = get_worker_info(), departures()
        is_last = worker is not None and (lending is None or not lending.are_persistent)
        if not self.prefetch_next_epoch or is_last:
            return None
        try:
            plan = self._plan_of(epoch=share.plan.epoch + 1, after=())
        except CellfeedError:  # which is raised where that epoch begins
            return None
        return plan.share(worker=0 if worker is None else worker.id, num_workers=share.num_workers)

    def _let_go(self, *, unless: int | None = None) -> None:
        self._next_epoch.let_go(unless=unless)

    def _meet(self) -> None:
        """Agree with other ranks, all of which call this when an epoch begins."""
        _, world_size = self._ranks.now()
        self._seed.agree(world_size, self._compared)
        self._seed.use(world_size)
        if self._compared.is_due:
            self._compared.compare(self._identity() | {"run": {"world_size": world_size}})

    def _seed_values(self) -> int:
        return self.seed

    def _take_seeds(self, seeds: int) -> None:
        self._seed.take(seeds)

    def _identity(self) -> dict[str, Any]:
        if self._strategy_identity is None or self._strategy_identity[0] is not self.strategy:
            self._strategy_identity = self.strategy, strategy_identity(self.strategy)
        if self._data_identity is None:
            self._data_identity = data_identity(self.collection, self._n_rows)
        configuration = self._strategy_identity[1] | {
            "batch_size": self.batch_size,
            "fetch_factor": self.fetch_factor,
            "drop_last": bool(self.drop_last),
            **self._values(),
        }
        return {"data": self._data_identity, "configuration": configuration}
