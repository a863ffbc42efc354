"""Epochs that are counted as they are consumed, and can be stopped and resumed."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, Generic, TypeVar

from cellfeed._chunks import Counters
from cellfeed._dataset._epochs import Start
from cellfeed._dataset._iteration import Iteration, end_without_parent
from cellfeed._dataset._loader import check_other_loader, errors_that_travel
from cellfeed._dataset._ranks import RanksCompared
from cellfeed._dataset._run import Counted, Divided, Place, Run, ShareLike
from cellfeed._dataset._state import place_of, state_of
from cellfeed._dataset._statistics import Statistics
from cellfeed._dataset._trainers import (
    check_data_loader,
    check_lightning,
    is_overfitting,
    require_kept_whole,
)
from cellfeed._errors import ParameterError, StateError
from cellfeed._torch import IterableDataset, get_worker_info
from cellfeed.sampling import Progress

__all__ = ["ResumableDataset"]

S = TypeVar("S", bound=ShareLike)


class ResumableDataset(IterableDataset[Any], ABC, Generic[S]):
    """Delivers epochs that the processes of a training divide among them.

    Parameters
    ----------
    compared
        The ranks that train together.
    """

    def __init__(self, compared: RanksCompared) -> None:
        super().__init__()
        self._compared = compared
        self._counters = Counters()
        self._run = Run[S](self._counters, compared)

    @property
    def n_resumed(self) -> int:
        """How often a state was loaded; workers started earlier do not know of it."""
        return self._run.n_resumed

    @property
    def is_at_end(self) -> bool:
        """Whether the last minibatch of an epoch was delivered, and none since."""
        return self._run.is_at_end

    @property
    @abstractmethod
    def rank(self) -> int:
        """The current rank of this process."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The current number of processes that train together."""

    @property
    @abstractmethod
    def _minibatch_bytes(self) -> int:
        """Mean size of a minibatch as it is read, in bytes; 0 if unknown."""

    @abstractmethod
    def _meet(self) -> None:
        """Agree with other ranks, all of which call this when an epoch begins."""

    @abstractmethod
    def _plan_of(self, *, epoch: int, after: tuple[Progress, ...]) -> Divided[S]:
        """Return the plan of an epoch on this rank, or of the rest of it."""

    @abstractmethod
    def _minibatches(self, share: S) -> Generator[Any, None, None]:
        """Deliver a share, with the current attributes of this dataset."""

    @abstractmethod
    def _let_go(self, *, unless: int | None = None) -> None:
        """Discard fetches that were read ahead, unless they are of this epoch."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the ``data`` and ``configuration`` of a state, as JSON values."""

    @abstractmethod
    def _n_of(
        self, *, seed: Any, epoch: int, after: tuple[Progress, ...], world_size: int
    ) -> int | None:
        """Return the number of minibatches of each rank, or None if these are never resumed."""

    @abstractmethod
    def _seed_values(self) -> Any:
        """Return the seeds as a JSON value."""

    @abstractmethod
    def _take_seeds(self, seeds: Any) -> None:
        """Use the seeds of a resumed run; raise `StateError` if others were given."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # torch asks for it where a DataLoader is made, before it refuses options in its own words.
        check_data_loader(self, sys._getframe().f_back)  # noqa: SLF001 - there is no other way
        return type(self)

    def __getitem__(self, index: Any) -> Any:
        msg = (
            f"a dataset has no minibatch {index!r}: it is iterated over, in the order of its "
            "strategy; index the collection to read rows, as in `collection[rows]`, and to divide "
            "or choose cells, give rows to the strategy: `train, test = random_split(collection, "
            "[0.8, 0.2], seed=0)` of cellfeed, then `BlockShuffling(16, indices=train)`"
        )
        raise ParameterError(msg)

    def __iter__(self) -> Iteration[Any]:
        if get_worker_info() is None:
            # Begun with the first minibatch, so that trainers may set the epoch until then.
            return Iteration(self._begin)
        end_without_parent()
        check_other_loader(self, self._minibatch_bytes)
        return Iteration(errors_that_travel(self._begin()))

    def _begin(self) -> Generator[Any, None, None]:
        """Begin an epoch, and return its minibatches."""
        if get_worker_info() is None:
            self._prepare()
        # Begun here and not in the generator, which starts at its first use.
        share, counted = self._run.begin(self._plan_of)
        return counted.counting(self._minibatches(share))

    def _prepare(self) -> None:
        """Agree with other ranks and with the trainer, before an epoch begins in this process."""
        self._meet()
        if is_overfitting():  # on the same minibatches each time
            self.set_epoch(0)
        elif not self._run.is_resumed:
            check_lightning(self)

    @property
    def counters(self) -> Counters:
        """Counters of this dataset and its copies in worker processes; see `statistics`."""
        return self._counters

    def statistics(self) -> Statistics:
        """Return counts and times of all stages since this dataset was made.

        They include all epochs and worker processes. Subtract two statistics for the work done
        in between.

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

        This is not needed as long as all ranks train in the same iterations, since each of these is
        the next epoch, also after `load_state_dict`. An iteration begins with its first minibatch.
        If the given epoch is about to be resumed from a state, it still is.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, is negative or is too large; or Accelerate calls this for
            a DataLoader that it divides among ranks a second time.
        StateError
            Accelerate calls this with its own count, which would discard the position in a state.
        """
        require_kept_whole(
            self,
            world_size=self.world_size,
            goes_on_elsewhere=self._run.goes_on_elsewhere(epoch),
        )
        self._run.set_epoch(epoch)
        self._let_go(unless=epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop, from which `load_state_dict` resumes.

        The position is exact after any minibatch, whatever has been read ahead. Ranks that have
        consumed the same number of minibatches have the same state, so one rank can save it for
        all. With worker processes, call ``state_dict`` of the loader instead.

        Returns
        -------
        A dictionary of JSON values, a few hundred bytes: format and version; identifiers of data,
        parameters and seed; the epoch; how many minibatches of it each rank has delivered, with
        the number of ranks and workers; and a checksum.

        Raises
        ------
        StateError
            The minibatches came from worker processes of a DataLoader that does not count them.
        ParameterError
            The ranks have not agreed on a seed yet.
        """
        return state_of(self._identity() | {"seed": self._seed_values()}, self._run.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next iteration delivers the rest of its epoch.

        With the same number of ranks and workers, it delivers exactly the minibatches that
        would have followed. With other numbers, the remaining cells are divided again, as an epoch
        of their own: none is missing and none comes twice, except for the cells that are
        repeated (or, with ``drop_last``, left out) to give all ranks the same number.

        Parameters
        ----------
        state
            The dictionary that `state_dict` returned, or the same after a round trip through JSON;
            the same on all ranks.

        Raises
        ------
        StateError
            The state is damaged, has a newer version, is of other data, parameters or another
            seed, or says that more was delivered than the epoch has.
        """
        place = place_of(state, self._identity())
        self._require_in_range(place, state["seed"])
        self._take_seeds(state["seed"])
        self._run.go_on(place)
        self._let_go()

    def _require_in_range(self, place: Place, seed: Any) -> None:
        """Check that an epoch can have come as far as a state says.

        Raises
        ------
        StateError
            It cannot.
        """
        worker, progress = place.worker, place.progress
        if worker is not None and not 0 <= worker < progress.num_workers:
            msg = f"the state is damaged: it is of worker {worker} of {progress.num_workers}"
            raise StateError(f"{msg}; load an earlier one")
        parts = (*place.after, progress)
        for k, each in enumerate(parts):
            try:
                n = self._n_of(
                    seed=seed, epoch=place.epoch, after=parts[:k], world_size=each.world_size
                )
            except ParameterError as error:
                raise StateError(f"the state is damaged: {error}; load an earlier one") from error
            if n is not None and each.n_minibatches > n:
                msg = (
                    f"the state is damaged: each of {each.world_size} ranks has delivered "
                    f"{each.n_minibatches:,} of {n:,} minibatches; load an earlier one"
                )
                raise StateError(msg)

    def begin_for_workers(
        self, first: Start | None, iteration: int, num_workers: int
    ) -> tuple[Start, Counted]:
        """Begin an epoch that worker processes deliver; see `EpochCounter.claim_for_workers`."""
        self._prepare()
        self._let_go()  # before processes are forked, which would share its memory
        return self._run.begin_for_workers(self._plan_of, first, iteration, num_workers)
