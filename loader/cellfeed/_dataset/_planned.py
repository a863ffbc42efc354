"""Epochs that are planned: divided among ranks and workers, counted, stopped and resumed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from cellfeed._dataset._delivery import Delivery
from cellfeed._dataset._epochs import Start
from cellfeed._dataset._iteration import Iteration
from cellfeed._dataset._loader import errors_that_travel
from cellfeed._dataset._ranks import CommonSeed, Ranks, RanksCompared
from cellfeed._dataset._run import Counted, Run
from cellfeed._dataset._state import data_identity, place_of, state_of, strategy_identity
from cellfeed._errors import ParameterError, require_positive
from cellfeed._torch import IterableDataset, get_worker_info
from cellfeed.sampling import EpochPlan, Progress, SamplingStrategy

__all__ = ["PlannedDataset"]


class PlannedDataset(IterableDataset[Any], ABC):
    """Delivers the minibatches of planned epochs; how they come about is said by subclasses.

    Parameters
    ----------
    collection, n_rows
        What is read, and how many rows it has.
    strategy, batch_size, fetch_factor, drop_last, rank, world_size, seed
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
        seed: int | None,
    ) -> None:
        super().__init__()
        if not isinstance(strategy, SamplingStrategy):
            msg = f"`strategy` must be a SamplingStrategy, but got {strategy!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        self.collection = collection
        self.strategy = strategy.bound_to(collection)
        self.batch_size = require_positive("batch_size", batch_size)
        self.fetch_factor = require_positive("fetch_factor", fetch_factor)
        self.drop_last = drop_last
        self._n_rows = n_rows
        self._ranks = Ranks(rank, world_size)
        self._seed = CommonSeed(seed)
        self._seed.agree(self._ranks.look()[1])
        self._run = Run()
        self._compared = RanksCompared()
        self._plan(*self._ranks.look())  # which refuses what cannot be

    def _values(self) -> dict[str, Any]:
        """Return what else values depend on, as JSON values."""
        return {}

    @abstractmethod
    def _delivery(self) -> Delivery:
        """Return how minibatches come about, with what this data set was given by now."""

    def __len__(self) -> int:
        """Return the number of minibatches that an epoch delivers to this rank.

        While an epoch goes on that was stopped, those from before count too, so that a loop that
        counts on from there comes out right.
        """
        n_minibatches = self._plan(*self._ranks.now()).n_minibatches
        return max(n_minibatches, self._run.n_of_epoch)

    def __iter__(self) -> Iteration[Any]:
        is_worker = get_worker_info() is not None
        if not is_worker:
            self._meet()
        # Begun here and not in the generator, which starts at its first use.
        share, counted = self._run.begin(self._plan_of)
        minibatches = counted.counting(self._delivery().minibatches(share))
        return Iteration(errors_that_travel(minibatches) if is_worker else minibatches)

    @property
    def rank(self) -> int:
        """Number of this process among those that train together, now."""
        return self._ranks.look()[0]

    @property
    def world_size(self) -> int:
        """The number of processes that train together, now."""
        return self._ranks.look()[1]

    @property
    def seed(self) -> int:
        """What fixes the order of all epochs."""
        return self._seed.use(self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch.

        Not needed as long as all ranks begin the same iterations: each is the next epoch by
        itself, also after `load_state_dict`. An epoch that goes on where it was stopped goes on,
        if it is this one.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, negative or huge.
        """
        self._run.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is: all that is needed to go on from there.

        It is exact after any minibatch, whatever has been read ahead. Ranks that are in step have
        the same state, so that one of them saves it for all. The one of a loader with worker
        processes is had from the loader.

        Returns
        -------
        A dictionary of JSON values, a few hundred bytes: format and version; what tells data,
        parameters and seed from others; the epoch; how many minibatches each rank has had of it,
        on how many ranks and workers; and a checksum.

        Raises
        ------
        StateError
            Minibatches were delivered by worker processes of a DataLoader that does not count.
        ParameterError
            Ranks have not agreed on a seed yet.
        """
        return state_of(self._identity() | {"seed": self.seed}, self._run.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a state: the next iteration delivers the rest of its epoch.

        With as many ranks and workers as before, exactly the minibatches that would have come.
        With others, the cells that are left are divided anew: none comes twice, and none is
        missing. ``drop_last`` applies to what is left.

        Parameters
        ----------
        state
            What `state_dict` returned, perhaps by way of JSON; the same on all ranks.

        Raises
        ------
        StateError
            It is damaged, of a newer version, or of other data, parameters or another seed.
        """
        place = place_of(state, self._identity())
        self._seed.take(state["seed"])
        self._run.go_on(place)

    def plan(self, *, epoch: int) -> EpochPlan:
        """Return the plan of an epoch: which rows come when, on this rank.

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
                f"nothing is left of {self._n_rows:,} rows, since `drop_last` drops what does not "
                "fill a minibatch or a block; use smaller sizes, or keep what is left over"
            )
            raise ParameterError(msg)
        return plan

    def _meet(self) -> None:
        """Agree with other ranks, which all come here when an epoch begins."""
        _, world_size = self._ranks.now()
        self._seed.agree(world_size)
        seed = self._seed.use(world_size)
        if self._ranks.are_asked_for:
            self._compared.compare(self._identity() | {"run": {"seed": seed}})

    def begin_for_workers(
        self, first: Start | None, iteration: int, num_workers: int
    ) -> tuple[Start, Counted]:
        """Begin an epoch that worker processes deliver; see `EpochCounter.claim_for_workers`."""
        self._meet()
        return self._run.begin_for_workers(self._plan_of, first, iteration, num_workers)

    def _identity(self) -> dict[str, Any]:
        """Return what a state is of, as JSON values."""
        configuration = strategy_identity(self.strategy) | {
            "batch_size": self.batch_size,
            "fetch_factor": self.fetch_factor,
            "drop_last": bool(self.drop_last),
            **self._values(),
        }
        data = data_identity(self.collection, self._n_rows)
        return {"data": data, "configuration": configuration}
