"""Epochs of one collection, planned by a strategy."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import DTypeLike

import cellfeed.sampling._kernels  # noqa: F401 - which plans look for
from cellfeed._collection import Collection
from cellfeed._dataset._epochs import NextEpoch
from cellfeed._dataset._fetching import Fetches
from cellfeed._dataset._ranks import CommonSeed, Ranks, RanksCompared
from cellfeed._dataset._state import ResumableDataset, data_identity, strategy_identity
from cellfeed._dataset._workers import departures
from cellfeed._decode import Verify
from cellfeed._errors import CellfeedError, ParameterError, require_positive
from cellfeed._rows import Dtypes
from cellfeed._torch import HAS_TORCH, get_worker_info, torch
from cellfeed.machine import usable_memory_bytes
from cellfeed.sampling import EpochPlan, Progress, SamplingStrategy, Share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


# Checks of the parameters that control how a dataset reads its collection.

AnyDtype: TypeAlias = "DTypeLike | torch.dtype"


def require_that_they_apply(
    collection: Any,
    *,
    has_callback: bool,
    dense: bool,
    dtype: Dtypes,
    num_threads: int | None,
    transform: object = None,
    prefetch: int | None = None,
    prefetch_next_epoch: bool = False,
    verify: Verify = "first",
) -> None:
    """Check that parameters for reading a `Collection` are given only if cellfeed reads one.

    Raises
    ------
    ParameterError
        A given parameter would be ignored.
    """
    given = {
        "dtype": None if dtype is None else str(dtype),
        "num_threads": num_threads,
        "transform": transform,
        "prefetch": prefetch,
        "prefetch_next_epoch": prefetch_next_epoch or None,
        "verify": None if verify == "first" else verify,
    }
    if not isinstance(collection, Collection):
        given = {"dense": dense or None, **given}
        reader = f"an indexable of type {type(collection).__name__}"
    elif has_callback:
        reader = "a `fetch_callback`"
    else:
        return
    ignored = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if ignored:
        msg = (
            "`dense`, `dtype`, `num_threads`, `transform`, `prefetch`, `prefetch_next_epoch` "
            f"and `verify` apply only when cellfeed reads a Collection, but got {ignored} "
            f"with {reader}; leave it out, and convert in `batch_transform`"
        )
        raise ParameterError(msg)


def require_callables(**functions: object) -> None:
    """Check that each given function can be called.

    Raises
    ------
    ParameterError
        One is not callable.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            msg = f"`{name}` must be a function, but got {function!r}"
            raise ParameterError(msg)


def warn_if_too_large(n_bytes: float) -> None:
    """Warn if fetches take more memory than is available, of which the system gives no notice."""
    available = usable_memory_bytes()
    if n_bytes > available:
        msg = (
            f"fetches take about {n_bytes / 1e6:,.0f} MB of memory, but {available / 1e6:,.0f} MB "
            "are available; choose a smaller `batch_size` or `fetch_factor`"
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def numpy_dtypes(dtype: "AnyDtype | Mapping[str, AnyDtype] | None") -> Dtypes:
    """Return dtypes of NumPy or torch, for all elements or for some by name, as NumPy dtypes.

    Raises
    ------
    ParameterError
        One is not a numeric dtype of torch.
    """
    if isinstance(dtype, Mapping):
        by_name = cast("Mapping[str, AnyDtype]", dtype)
        return {name: _numpy_dtype(each) for name, each in by_name.items()}
    return None if dtype is None else _numpy_dtype(dtype)


def _numpy_dtype(dtype: AnyDtype) -> np.dtype[Any]:
    try:
        if HAS_TORCH and isinstance(dtype, torch.dtype):
            native = torch.empty(0, dtype=dtype).numpy().dtype
        else:
            native = np.dtype(cast("DTypeLike", dtype))
    except TypeError:
        native = np.dtype(object)
    of_torch = native.isnative and native.itemsize <= np.dtype(np.float64).itemsize
    if native.kind not in "biuf" or not of_torch:
        msg = (
            f"`dtype` must be a numeric dtype that torch has, such as 'float32', but got {dtype!r}"
        )
        raise ParameterError(msg)
    return native
