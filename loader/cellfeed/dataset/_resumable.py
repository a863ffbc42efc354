"""The base class of datasets: epochs that begin together, are counted, stopped and resumed."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from operator import add, sub
from typing import Any, Self

from cellfeed._errors import ParameterError, StateError, require_not_negative, require_positive
from cellfeed._torch import IterableDataset, default_convert, get_worker_info, require_torch
from cellfeed.dataset._loader import (
    MinibatchLoader,
    as_it_is,
    context_without_threads,
    to_be_called,
)
from cellfeed.dataset._ranks import CommonSeed, Ranks, begin_together, flat
from cellfeed.dataset._run import Beginning, Epoch, Iteration, Position, Run
from cellfeed.dataset._state import position_of, require_epoch, state_of
from cellfeed.decode import Counter, Counters
from cellfeed.rows import Cells
from cellfeed.rows._minibatch import refuse_collating
from cellfeed.sampling import Progress

refuse_collating(Cells)

# Numbers of epochs that follow from torch's seed are below this.
_DRAWN_EPOCHS = 1 << 61


# What a dataset has done, and the time that it took.


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts of the work done, and the time of each stage in seconds.

    The times of reading stages are sums over all threads and processes, which run concurrently with
    each other and with training. ``waiting`` and ``training`` are times of the training loop, one
    after the other, and show whether training waits for the loader.

    Parameters
    ----------
    n_fetches, n_minibatches, n_cells
        Fetches that were planned, minibatches that the training loop received, and cells that
        were made into minibatches, without controls and neighbours.
    n_chunks, bytes_read, bytes_decompressed, bytes_used
        Chunks that were read, their stored bytes, their bytes after decompression, and how many
        of these were used. Chunks that the format's own library reads are not counted.
    n_tokens, n_unknown
        Tokens that tokenizers made, without padding, and values other than 0 that they left out
        since their genes are not in the vocabulary.
    planning
        Choosing rows, chunks and their positions in minibatches; CPU time.
    reading
        Waiting for bytes, from storage or the page cache.
    decompressing
        Decompressing chunks and undoing their filters.
    placing
        Copying elements into minibatches, with casts and transforms.
    library
        Reading by the format's own library, by a custom source, or by your ``fetch_callback``.
    densifying
        Making sparse rows dense.
    tokenizing
        Making tokens of rows.
    making_tensors
        Making tensors from the buffers that were read.
    functions
        Running your functions on fetches and minibatches.
    sending
        Sending minibatches from worker processes.
    waiting
        Time in which the training loop waited for the next minibatch.
    training
        Time of the training loop between minibatches.

    Examples
    --------
    ``after - before`` gives the work done in between.
    """

    n_fetches: int
    n_minibatches: int
    n_cells: int
    n_chunks: int
    bytes_read: int
    bytes_decompressed: int
    bytes_used: int
    n_tokens: int
    n_unknown: int
    planning: float
    reading: float
    decompressing: float
    placing: float
    library: float
    densifying: float
    tokenizing: float
    making_tensors: float
    functions: float
    sending: float
    waiting: float
    training: float

    def __sub__(self, other: Self) -> Self:
        return self._with(other, sub)

    def __add__(self, other: Self) -> Self:
        return self._with(other, add)

    @property
    def waiting_share(self) -> float:
        """Share of its time that the training loop waited; NaN before the first minibatch."""
        whole = self.waiting + self.training
        return self.waiting / whole if whole else float("nan")

    def scalars(self) -> dict[str, float]:
        """Return what is worth a curve: throughput, and the times of all stages.

        Returns
        -------
        ``cellfeed/cells_per_second`` of the training loop, ``cellfeed/waiting_share``, and for each
        stage its microseconds per cell, summed over threads, such as
        ``cellfeed/decompressing_us_per_cell``. Empty before the first minibatch.
        """
        seconds = self.waiting + self.training
        if not seconds:
            return {}
        found = {"cells_per_second": self.n_cells / seconds, "waiting_share": self.waiting_share}
        found |= {f"{name}_us_per_cell": each for name, each in self._stages().items()}
        return {f"cellfeed/{name}": float(value) for name, value in found.items()}

    def __str__(self) -> str:
        waited = f"{self.waiting:,.2f} s ({self.waiting_share:.0%})"
        lines = [
            f"{self.n_cells:,} cells in {self.n_minibatches:,} minibatches",
            f"the training loop waited {waited} and trained {self.training:,.2f} s",
        ]
        lines += [
            f"{name.replace('_', ' '):<15}{each:>9.2f} us per cell"
            for name, each in self._stages().items()
            if each
        ]
        return "\n".join(lines)

    def _stages(self) -> dict[str, float]:
        """Return the microseconds per cell of each stage."""
        names, per_cell = _NAMES[Counter.PLANNING : Counter.WAITING], 1e6 / max(1, self.n_cells)
        return {name: getattr(self, name) * per_cell for name in names}

    def _with(self, other: Self, operation: Callable[[float, float], float]) -> Self:
        values: dict[str, Any] = {
            name: operation(getattr(self, name), getattr(other, name)) for name in _NAMES
        }
        return type(self)(**values)


_NAMES = [each.name for each in fields(Statistics)]


class ResumableDataset(IterableDataset[Any], ABC):
    """Delivers epochs that the processes of a training divide among them.

    Parameters
    ----------
    ranks
        The ranks that train together.
    streams
        Number of streams of an epoch; if None, as many as ranks.
    """

    _is_made = False
    _num_workers = 0
    _has_parts = False  # datasets with seeds of their own
    as_torch: bool

    def __init__(self, ranks: Ranks, streams: int | None) -> None:
        super().__init__()
        self._ranks = ranks
        self.streams = None if streams is None else require_positive("streams", streams)
        self._counters = Counters()
        self._run = Run()

    def __setattr__(self, name: str, value: Any) -> None:
        is_parameter = name in vars(self) or hasattr(type(self), name)
        if self._is_made and is_parameter and not name.startswith("_"):
            msg = (
                f"`{name}` is fixed when a dataset is made, but was set to {value!r}; make another "
                "dataset with it"
            )
            raise ParameterError(msg)
        super().__setattr__(name, value)

    @property
    def is_at_end(self) -> bool:
        """Whether the last minibatch of an epoch was delivered, and none since."""
        return self._run.is_at_end

    @property
    def rank(self) -> int:
        """The current rank of this process."""
        return self._ranks.look()[0]

    @property
    def world_size(self) -> int:
        """The current number of processes that train together."""
        return self._ranks.look()[1]

    @property
    @abstractmethod
    def _length(self) -> int:
        """Number of minibatches in a whole epoch on this rank."""

    def __len__(self) -> int:
        """Return the number of minibatches that an epoch delivers to this rank.

        In an epoch that was resumed, this includes the minibatches delivered before, so that a
        loop that continues its count ends with this number.
        """
        latest, upcoming, n_of_epoch = self._run.latest, self._run.upcoming, 0
        if latest is not None and not self._run.is_at_end:
            n_of_epoch = latest.start.n_minibatches + latest.n_left
        elif latest is None and upcoming.n_minibatches:
            n_of_epoch = upcoming.n_minibatches + self._n_left(self._beginning_at(upcoming))
        return max(self._length, n_of_epoch)

    # What an epoch is made of.

    @property
    @abstractmethod
    def _seeds(self) -> tuple[CommonSeed, ...]:
        """The seeds of all datasets."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the ``data`` and ``configuration`` of a state, as JSON values."""

    @abstractmethod
    def _read_identity(self) -> Any:
        """Return what identifies the values that are read, in which ranks must not differ."""

    @abstractmethod
    def _n_left(self, beginning: Beginning) -> int:
        """Return how many minibatches are left of an epoch."""

    @property
    @abstractmethod
    def _can_be_forked(self) -> bool:
        """Whether workers that are forked can read what this process has open."""

    def _minibatches(self, beginning: Beginning) -> Generator[Any, None, None]:
        """Deliver the rest of an epoch in this process."""
        return self._of_worker(beginning, 0, 1)

    @abstractmethod
    def _sizes(self, beginning: Beginning) -> Iterable[int]:
        """Return the number of minibatches of each fetch that is left of an epoch."""

    @abstractmethod
    def _sources(self, beginning: Beginning) -> Iterable[int]:
        """Return which of these fetches each minibatch that is left of an epoch comes from."""

    @abstractmethod
    def _of_worker(self, beginning: Beginning, first: int, step: int) -> Generator[Any, None, None]:
        """Deliver the minibatches of every n-th of these fetches."""

    @property
    @abstractmethod
    def minibatch_bytes(self) -> int:
        """Mean size of a minibatch as it is read, in bytes; 0 if unknown."""

    def __copy__(self) -> Self:
        copied: Self = object.__new__(type(self))
        # A copy goes on by itself, at the next epoch.
        own = [name for name in ("_counters", "_run", "_seed") if name in vars(self)]
        copies = copy.deepcopy([vars(self)[name] for name in own])
        vars(copied).update(vars(self) | dict(zip(own, copies, strict=True)))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_latest")}

    def __getitem__(self, index: Any) -> Any:
        msg = (
            f"a dataset has no minibatch {index!r}: it is iterated over, in the order of its "
            "strategy; index the collection to read rows, as in `collection[rows]`, and to divide "
            "or choose cells, give rows to the strategy: `train, test = random_split(collection, "
            "[0.8, 0.2], seed=0)` of cellfeed, then `BlockShuffling(16, indices=train)`"
        )
        raise ParameterError(msg)

    def __iter__(self) -> Iteration[Any]:
        worker = get_worker_info()
        if worker is not None:
            refuse_second_division(self)
            beginning = self._beginning_of_another_loader(worker)
            return Iteration(lambda: self._of_worker(beginning, worker.id, worker.num_workers))
        # Begun with the first minibatch, so that the epoch may be set until then.
        return Iteration(self._delivered)

    def _delivered(self) -> Generator[Any, None, None]:
        """Begin an epoch, and return its minibatches."""
        with self.begun() as (beginning, epoch):
            return epoch.counting(self._minibatches(beginning))

    @contextmanager
    def begun(self) -> Iterator[tuple[Beginning, Epoch]]:
        """Begin the next epoch, together with other ranks; it has not begun if the block fails."""
        refuse_second_division(self)
        before = self._run.begin()
        try:
            position = before[0].divided_among(self.streams or self.world_size)
            group = self._ranks.group
            if group is not None:
                self._begin_together(group, position)
            beginning = self._beginning_at(position)
            n_left, run = self._n_left(beginning), weakref.ref(self._run)
            epoch = Epoch(start=position, n_left=n_left, run=run, counters=self._counters)
            self._run.latest = epoch
            yield beginning, epoch
        except BaseException:
            self._run.take_back(before)
            raise

    def _begin_together(self, group: Any, position: Position) -> None:
        """Begin an epoch on all ranks, which must be the same."""
        seeds, identity = self._seeds, self._identity()
        names = ["seed"] if len(seeds) == 1 else [f"seed.{k}" for k in range(len(seeds))]
        statement = flat(
            {
                "epoch": position.epoch,
                "after minibatches": position.n_minibatches,
                **{name: s.stated(group.rank()) for name, s in zip(names, seeds, strict=True)},
                "divided": [[each.world_size, each.n_minibatches] for each in position.after],
                **identity["data"],
                **identity["configuration"],
                "read": self._read_identity(),
                "world_size": self.world_size,
            }
        )
        first = begin_together(group, statement)
        for name, each in zip(names, seeds, strict=True):
            each.take(first[name])

    def _beginning_of_another_loader(self, worker: Any) -> Beginning:
        """Return what a worker of a DataLoader begins that is not `loader`.

        Nobody tells it the epoch. It is the one that was set before the workers started, else it
        follows from torch's seed, as the order of torch's own samplers does; and the next one in
        each further iteration of workers that persist.

        Raises
        ------
        StateError
            A state was loaded.
        ParameterError
            There are several ranks, and the epoch was not set.
        """
        remedy = "iterate over `dataset.loader(num_workers=...)`"
        position, world_size = self._run.upcoming, self._ranks.now()[1]
        if position.n_minibatches:
            msg = "a state was loaded, of which workers of another DataLoader do not know"
            raise StateError(f"{msg}; {remedy}")
        if not self._run.is_set:
            if world_size > 1:
                msg = (
                    "in workers of another DataLoader, ranks have to be told the epoch; call "
                    f"`set_epoch(epoch)` before each epoch, or {remedy}"
                )
                raise ParameterError(msg)
            position = Position(epoch=(worker.seed - worker.id) % _DRAWN_EPOCHS)
        self._run.go_to(Position(epoch=position.epoch + 1), is_set=True)
        return self._beginning_at(position)

    def _beginning_at(self, position: Position) -> Beginning:
        """Return what an epoch follows from that begins at a position on the ranks there are."""
        rank, world_size = self._ranks.now()
        return Beginning(
            position=position.divided_among(self.streams or world_size),
            rank=rank,
            world_size=world_size,
            seeds=tuple(each.use(world_size) for each in self._seeds),
        )

    def peek(self, n: int = 1) -> list[Any]:
        """Return the first minibatches of the coming epoch, which count as nothing.

        The next iteration delivers them again. No other rank is needed, unless ranks have not yet
        taken the seed of the first, and no worker process starts.

        Parameters
        ----------
        n
            Number of minibatches; fewer are returned if the epoch has fewer.

        Raises
        ------
        ParameterError
            ``n`` is below one, or ``seed`` was not given and ranks have not begun an epoch yet.

        Examples
        --------
        >>> import numpy as np
        >>> from cellfeed import BlockShuffling, CellDataset
        >>> dataset = CellDataset(np.arange(100), BlockShuffling(4), batch_size=10, seed=0)
        >>> first = dataset.peek()[0]
        >>> bool((next(iter(dataset)) == first).all())
        True
        """
        beginning = self._beginning_at(self._run.upcoming)
        self._n_left(beginning)  # which refuses what cannot go on
        return [*islice(Iteration(lambda: self._minibatches(beginning)), require_positive("n", n))]

    @to_be_called
    def loader(self, num_workers: int | None = None, **options: Any) -> MinibatchLoader:
        """Return a DataLoader over the minibatches, whose position can be saved and restored.

        Minibatches arrive in the order of the plan, with any number of workers. Each worker reads
        every n-th fetch, and sends minibatches ahead in memory that
        it shares with this process (and that needs no space in ``/dev/shm``): ``prefetch_factor``
        messages of up to 16 MiB, or of one minibatch if that is larger. If a `Collection` is on a
        server, in an object store or a TileDB-SOMA experiment, workers are not forked, since
        threads of this process may be reading it: the start method is "forkserver" unless you pass
        another ``multiprocessing_context``, so a script needs ``if __name__ == "__main__":``. A
        ``worker_init_fn`` gets the number of the worker; for torch's `get_worker_info`, each is the
        only one of its DataLoader.

        Parameters
        ----------
        num_workers
            Number of worker processes. If None, the number that ``autotune`` recommended, or 0
            without a recommendation.
        **options
            Other parameters of `torch.utils.data.DataLoader`. ``prefetch_factor`` counts messages,
            2 by default.

        Raises
        ------
        DeliveryError
            During iteration: workers persist, and another iteration has begun.
        ParameterError
            ``num_workers`` is negative or not an integer, or an option belongs to the dataset.
            During iteration: there are workers, although cells were loaded on a device.
        ImportError
            torch is not installed.
        """
        require_torch("`loader`")
        workers = self.num_workers if num_workers is None else num_workers
        require_not_negative("num_workers", workers)
        for name in ("batch_size", "drop_last", "shuffle", "sampler", "batch_sampler", "in_order"):
            if name in options:
                msg = (
                    f"`{name}` does not apply to `loader`: the dataset makes minibatches, of its "
                    "`batch_size`, in the order of its strategy; leave it out"
                )
                raise ParameterError(msg)
        options = {name: value for name, value in options.items() if value is not None}
        options.setdefault("collate_fn", default_convert if self.as_torch else as_it_is)
        if workers and not self._can_be_forked:
            options.setdefault("multiprocessing_context", context_without_threads())
        return MinibatchLoader(self, batch_size=None, num_workers=workers, **options)

    @property
    def num_workers(self) -> int:
        """Number of worker processes of `loader` that ``autotune`` recommended; else 0."""
        return self._num_workers

    @property
    def counters(self) -> Counters:
        """Counters of this dataset and its copies in worker processes; see `statistics`."""
        return self._counters

    def statistics(self) -> Statistics:
        """Return counts and times of all stages since this dataset was made.

        They include all epochs and worker processes. Of datasets that are interleaved, they include
        epochs of their own, but not the times of a training loop in these. Subtract two statistics
        for the work done in between.

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
        values = self._counters.values
        # What only the dataset counts that the training loop iterates over.
        of_loop = [Counter.MINIBATCHES, Counter.WAITING, Counter.TRAINING]
        own = values[of_loop]
        for each in self._counters.parts:
            values += each.values
        values[of_loop] = own
        counted, n = values.tolist(), Counter.PLANNING
        seconds = [nanoseconds / 1e9 for nanoseconds in counted[n:]]
        return Statistics(**dict(zip(_NAMES, [*counted[:n], *seconds], strict=True)))

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch.

        This is not needed, since each iteration is the next epoch, also after `load_state_dict`. An
        iteration begins with its first minibatch. If the given epoch is about to be resumed from a
        state, it still is.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, is negative or is too large; or Accelerate calls this for
            a DataLoader that it divides among ranks a second time.

        Warns
        -----
        UserWarning
            The position in a state that was loaded is discarded, within another epoch.
        """
        refuse_second_division(self)
        epoch, upcoming = require_epoch(epoch), self._run.upcoming
        if upcoming.n_minibatches and upcoming.epoch != epoch:
            warnings.warn(
                f"epoch {epoch} was set, so that the rest of epoch {upcoming.epoch}, after "
                f"{upcoming.n_minibatches:,} minibatches, is not delivered, as the loaded state "
                "would have; set the epoch of the state, or none",
                UserWarning,
                stacklevel=2,
            )
        if upcoming.epoch != epoch:
            upcoming = Position(epoch=epoch)
        self._run.go_to(upcoming, is_set=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop, from which `load_state_dict` resumes.

        The position is exact after any minibatch, whatever has been read ahead, and does not depend
        on worker processes. Of several iterations at once, it is that of the one that delivered
        the latest minibatch. Ranks that have consumed the same number of minibatches have the same
        state, so one rank can save it for all.

        Returns
        -------
        A dictionary of JSON values, a few hundred bytes: format and version; identifiers of data,
        parameters and seed; the epoch; how many minibatches of it each rank has delivered, with
        the number of ranks; and a checksum.

        Raises
        ------
        StateError
            It is called in a worker process of a DataLoader that is not `loader`.
        ParameterError
            The ranks have not agreed on a seed yet, or the strategy has an attribute that a state
            cannot identify.
        """
        _require_no_worker()
        seeds = [each.use(self.world_size) for each in self._seeds]
        seed = seeds if self._has_parts else seeds[0]
        return state_of(self._identity() | {"seed": seed}, self._run.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next iteration delivers the rest of its epoch.

        With the same number of ranks (or the same ``streams``), it delivers exactly the minibatches
        that would have followed, with any number of workers. With another number, the remaining
        cells are divided again, as an epoch of their own: none is missing and none comes twice,
        except for the cells that are repeated (or, with ``drop_last``, left out) to give all ranks
        the same number.

        Parameters
        ----------
        state
            The dictionary that `state_dict` returned, or the same after a round trip through JSON;
            the same on all ranks.

        Raises
        ------
        StateError
            The state is damaged, has another version, is of other data, parameters or another
            seed, or says that more was delivered than the epoch has.
        ParameterError
            The strategy has an attribute that a state cannot identify.
        """
        _require_no_worker()
        position = position_of(state, self._identity())
        seeds = state["seed"] if self._has_parts else [state["seed"]]
        for each, seed in zip(self._seeds, seeds, strict=True):
            each.require_no_other(seed)
        self._require_in_range(position, tuple(seeds))
        for each, seed in zip(self._seeds, seeds, strict=True):
            each.take(seed)
        self._run.go_to(position)

    def _require_in_range(self, position: Position, seeds: tuple[int, ...]) -> None:
        """Check that an epoch can have come as far as a state says.

        Raises
        ------
        StateError
            It cannot.
        """
        parts = (*position.after, position.progress)
        for k, each in enumerate(parts):
            start = Position(
                epoch=position.epoch, after=parts[:k], progress=Progress(world_size=each.world_size)
            )
            whole = Beginning(position=start, rank=0, world_size=each.world_size, seeds=seeds)
            try:
                n = self._n_left(whole)
            except ParameterError as error:
                raise StateError(f"the state is damaged: {error}; load an earlier one") from error
            if each.n_minibatches > n:
                msg = (
                    f"the state is damaged: each of {each.world_size} ranks has delivered "
                    f"{each.n_minibatches:,} of {n:,} minibatches; load an earlier one"
                )
                raise StateError(msg)


def _require_no_worker() -> None:
    if get_worker_info() is not None:
        msg = "workers of another DataLoader have no state; iterate over `dataset.loader(...)`"
        raise StateError(msg)


def refuse_second_division(dataset: Any) -> None:
    """Check that Accelerate, if it iterates over a dataset, does not divide it a second time.

    Accelerate says in public which of its DataLoaders is iterated over.

    Raises
    ------
    ParameterError
        It is one over this dataset that is not `loader`, and there are several ranks.
    """
    if dataset.world_size == 1:
        return
    loaders, state = (sys.modules.get(f"accelerate.{name}") for name in ("data_loader", "state"))
    active = None if loaders is None or state is None else state.GradientState().active_dataloader
    if loaders is None or not isinstance(active, loaders.DataLoaderAdapter):
        return
    iterated = active.dataset
    if iterated is dataset or getattr(iterated, "dataset", None) is dataset:
        msg = (
            "Accelerate divides another DataLoader among ranks, but the dataset is divided "
            "already, so cells would be missing; pass `dataset.loader(...)` to "
            "`accelerator.prepare`"
        )
        raise ParameterError(msg)
