"""Epochs that are counted as they are consumed, can be stopped, and go on."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, Generic, TypeVar

from cellfeed._chunks import Counters
from cellfeed._dataset._accelerate import require_kept_whole
from cellfeed._dataset._epochs import Start
from cellfeed._dataset._iteration import Iteration, end_without_parent
from cellfeed._dataset._loader import errors_that_travel
from cellfeed._dataset._run import Counted, Divided, Run, ShareLike
from cellfeed._dataset._state import place_of, state_of
from cellfeed._dataset._statistics import Statistics
from cellfeed._torch import IterableDataset, get_worker_info
from cellfeed.sampling import Progress

__all__ = ["ResumableDataset"]

S = TypeVar("S", bound=ShareLike)


class ResumableDataset(IterableDataset[Any], ABC, Generic[S]):
    """Delivers epochs, of which each process of a training has a share."""

    def __init__(self) -> None:
        super().__init__()
        self._counters = Counters()
        self._run = Run[S](self._counters)

    @property
    def n_resumed(self) -> int:
        """How often a state was loaded; worker processes from before know nothing of it."""
        return self._run.n_resumed

    @property
    def is_at_end(self) -> bool:
        """Whether the last minibatch of an epoch was delivered, and none since."""
        return self._run.is_at_end

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process among those that train together, now."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes that train together, now."""

    @abstractmethod
    def _meet(self) -> None:
        """Agree with other ranks, which all come here when an epoch begins."""

    @abstractmethod
    def _plan_of(self, *, epoch: int, after: tuple[Progress, ...]) -> Divided[S]:
        """Return the plan of an epoch on this rank, or of what is left of it."""

    @abstractmethod
    def _minibatches(self, share: S) -> Generator[Any, None, None]:
        """Deliver a share, with what this data set was given by now."""

    @abstractmethod
    def _let_go(self, *, unless: int | None = None) -> None:
        """Give up what was read ahead of the next epoch, unless it is this one."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the ``data`` and ``configuration`` that a state is of, as JSON values."""

    @abstractmethod
    def _seed_values(self) -> Any:
        """Return the seeds as a JSON value."""

    @abstractmethod
    def _take_seeds(self, seeds: Any) -> None:
        """Use the seeds of a run that goes on; raise `StateError` where others were given."""

    def __iter__(self) -> Iteration[Any]:
        is_worker = get_worker_info() is not None
        if is_worker:
            end_without_parent()
        else:
            self._meet()
        # Begun here and not in the generator, which starts at its first use.
        share, counted = self._run.begin(self._plan_of)
        minibatches = counted.counting(self._minibatches(share))
        return Iteration(errors_that_travel(minibatches) if is_worker else minibatches)

    @property
    def counters(self) -> Counters:
        """What adds up what this and its copies in worker processes do; see `statistics`."""
        return self._counters

    def statistics(self) -> Statistics:
        """Return what was done since this was made, and how long each stage took.

        Fetches and minibatches of all epochs and of worker processes are counted. What a
        training loop waits for shows in the difference of two.

        Examples
        --------
        >>> import numpy as np
        >>> from cellfeed import BlockShuffling, CellDataset
        >>> dataset = CellDataset(np.arange(100), BlockShuffling(block_size=4), batch_size=10)
        >>> for minibatch in dataset:
        ...     pass
        >>> done = dataset.statistics()
        >>> done.n_minibatches, done.n_cells
        (10, 100)
        """
        return Statistics.of(self._counters.values)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch.

        Not needed as long as all ranks begin the same iterations: each is the next epoch by
        itself, also after `load_state_dict`. An epoch that goes on where it was stopped goes on,
        if it is this one.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, negative or huge; or Accelerate calls this for a
            DataLoader that it divides among ranks a second time.
        StateError
            Accelerate calls this with a count of its own, which drops the place in a state.
        """
        require_kept_whole(
            self,
            world_size=self.world_size,
            goes_on_elsewhere=self._run.goes_on_elsewhere(epoch),
        )
        self._run.set_epoch(epoch)
        self._let_go(unless=epoch)

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
        return state_of(self._identity() | {"seed": self._seed_values()}, self._run.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a state: the next iteration delivers the rest of its epoch.

        With as many ranks and workers as before, exactly the minibatches that would have come.
        With others, the cells that are left are divided anew, as an epoch of their own: none is
        missing and none comes twice, but for those that make ranks equal, which are repeated or,
        with ``drop_last``, left out.

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
        self._take_seeds(state["seed"])
        self._run.go_on(place)
        self._let_go()

    def begin_for_workers(
        self, first: Start | None, iteration: int, num_workers: int
    ) -> tuple[Start, Counted]:
        """Begin an epoch that worker processes deliver; see `EpochCounter.claim_for_workers`."""
        self._meet()
        self._let_go()  # before processes are forked, which would share its memory
        return self._run.begin_for_workers(self._plan_of, first, iteration, num_workers)
