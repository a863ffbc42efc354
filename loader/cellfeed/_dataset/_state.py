"""The state of a run as plain values: identifiers, and the position."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import astuple, fields, is_dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import SCHEMES
from cellfeed._collection import Collection
from cellfeed._dataset._epochs import Iteration, Ticket, end_without_parent, require_epoch
from cellfeed._dataset._loader import check_other_loader, errors_that_travel
from cellfeed._dataset._ranks import RanksCompared
from cellfeed._dataset._run import Counted, Position, Run
from cellfeed._dataset._statistics import (
    Statistics,
    StatisticsHistory,
    StatisticsLog,
    ranges_of,
    statistics_of,
)
from cellfeed._dataset._trainers import (
    align_lightning,
    check_data_loader,
    check_lightning,
    end_epoch_of_lightning,
    is_overfitting,
    require_kept_whole,
    warn_of_rest,
)
from cellfeed._decode import Counters
from cellfeed._errors import CellfeedError, ParameterError, StateError, require_integer
from cellfeed._lazy import pd
from cellfeed._rows import Dtypes, dtypes_of
from cellfeed._torch import IterableDataset, get_worker_info
from cellfeed.sampling import ABSENT_BY_DEFAULT, Progress, SamplingStrategy

_FORMAT, _VERSION = "cellfeed state", 1
_CONTENTS = "contents"  # of data: a digest of selections and versions, if there are any
_MOST_PROCESSES = 1 << 20
_MOST_SHOWN = 80  # characters of what is no state
_REMEDY = {
    "data": "resume with the files, query or object that it was saved with",
    "configuration": "resume with the same parameters",
    "seed": "leave `seed` out, or give the same",
}


def state_of(identity: Mapping[str, Any], position: Position) -> dict[str, Any]:
    """Return a state: a dictionary of JSON values, a few hundred bytes.

    Parameters
    ----------
    identity
        Identifiers ``data``, ``configuration`` and ``seed``, as JSON values.
    position
        Position of the run.
    """
    state = {
        "format": _FORMAT,
        "version": _VERSION,
        **identity,
        "epoch": position.epoch,
        "after": [list(astuple(each)) for each in position.after],
        "progress": list(astuple(position.progress)),
        "worker": position.worker,
    }
    return state | {"checksum": _checksum(state)}


def position_of(state: Any, identity: Mapping[str, Any]) -> Position:
    """Return the position in a state.

    Parameters
    ----------
    state
        The result of `state_of`, possibly after a round trip through JSON.
    identity
        The identifiers that it must have. Without ``seed``, any seed is accepted.

    Raises
    ------
    StateError
        It is damaged, of a newer version, or of another run.
    """
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        shown = repr(state)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]}..."
        msg = f"the state must be a result of `state_dict`, but got {shown}"
        raise StateError(f"{msg}; load the saved state")
    version = state.get("version")
    if isinstance(version, int) and version > _VERSION:
        msg = f"the state has version {version}, but this cellfeed knows up to {_VERSION}"
        raise StateError(f"{msg}; update cellfeed")
    if version != _VERSION:
        raise StateError(f"the state is damaged: it has {version=}; load an earlier one")
    content = {name: value for name, value in state.items() if name != "checksum"}
    if state.get("checksum") != _checksum(content):
        msg = "the state is damaged: its checksum does not match; load an earlier one"
        raise StateError(msg)
    for name, here in identity.items():
        _require_same(name, state[name], here)
    try:
        worker = state["worker"]
        return Position(
            epoch=require_epoch(state["epoch"]),
            after=tuple(map(_read, state["after"])),
            progress=_read(state["progress"]),
            worker=None if worker is None else require_integer("worker", worker),
        )
    except (KeyError, TypeError, ValueError, CellfeedError) as error:
        msg = f"the state is damaged: {error}; load an earlier one"
        raise StateError(msg) from error


def data_identity(collection: Any, n_rows: int) -> dict[str, Any]:
    """Return an identifier of data that does not depend on their location.

    For a collection, it has the names, cells and sizes of its files in order, the selection of each
    source's cells, and the version of sources that are not files or objects, such as databases and
    AnnData in memory. For anything else, it has type, length, shape and dtype.
    """
    if not isinstance(collection, Collection):
        marks = [str(getattr(collection, name, None)) for name in ("shape", "dtype")]
        return {"n_rows": n_rows, "type": type(collection).__name__, "array": marks}
    locations = collection.locations
    digest = hashlib.blake2b(digest_size=16)
    for location, n_cells in zip(locations, collection.cells_per_location, strict=True):
        path = location.path
        size = path.stat().st_size if path is not None and path.is_file() else None
        digest.update(repr((location.name, n_cells, size)).encode())
    data = {"n_rows": n_rows, "n_files": len(locations), "files": digest.hexdigest()}
    contents = []
    for source in collection.sources:
        # Copies of a file or an object have other versions.
        is_copied = source.location.path is not None or source.location.scheme in SCHEMES
        contents.append((source.selection(), None if is_copied else source.version()))
    if any(selection or version for selection, version in contents):
        data[_CONTENTS] = hashlib.blake2b(repr(contents).encode(), digest_size=16).hexdigest()
    return data


def read_identity(collection: Any, dtype: Dtypes) -> dict[str, Any]:
    """Return an identifier of what is read of the data, in which ranks must not differ."""
    if not isinstance(collection, Collection):
        return {}
    elements = collection.elements
    return {
        "elements": [*elements],
        "dtype": [str(each) for each in dtypes_of(elements, dtype).values()],
        # Without maps, they are the genes of the files, in their order.
        "genes": [each.column_maps and _hashed(each.column_names) for each in elements.values()],
    }


def strategy_identity(strategy: SamplingStrategy) -> dict[str, Any]:
    """Return the name of a strategy and its fields, with arrays hashed."""
    return {"strategy": type(strategy).__qualname__} | _fields_of(strategy)


def _fields_of(value: Any) -> dict[str, Any]:
    if is_dataclass(value):
        names = [
            each.name
            for each in fields(value)
            if each.metadata != ABSENT_BY_DEFAULT or getattr(value, each.name) is not each.default
        ]
    else:
        names = [*vars(value)]
    return {name: as_json(getattr(value, name)) for name in sorted(names)}


def as_json(value: Any) -> Any:
    """Return a JSON value that identifies a value; arrays are hashed."""
    if isinstance(value, np.generic):
        value = value.item()
    plain: Any = getattr(value, "__qualname__", type(value).__qualname__)
    if value is None or isinstance(value, bool | int | str):
        plain = value
    elif isinstance(value, float):
        plain = repr(value)
    elif isinstance(value, SamplingStrategy) or hasattr(value, "__dataclass_fields__"):
        plain = {"type": type(value).__qualname__} | _fields_of(value)
    elif isinstance(value, Mapping):
        plain = {str(name): as_json(each) for name, each in value.items()}
    elif isinstance(value, np.ndarray | pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        plain = _hashed(value)
    elif isinstance(value, list | tuple):
        plain = [as_json(each) for each in value]
    return plain


def _hashed(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(values, np.ndarray) and values.dtype != object:
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    else:
        hashes: NDArray[np.uint64] = pd.util.hash_array(pd.array(values).astype(object))
        digest.update(hashes.data)
    return f"{len(values)} values, blake2b {digest.hexdigest()}"


def _require_same(name: str, there: Any, here: Any) -> None:
    differing = [f"{name}={there!r} there, {name}={here!r} here"]
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        if _CONTENTS not in there:  # as in states of an older cellfeed
            here = {each: value for each, value in here.items() if each != _CONTENTS}
        differing = [
            f"{each}={there.get(each)!r} there, {each}={here.get(each)!r} here"
            for each in sorted({*there, *here})
            if there.get(each) != here.get(each)
        ]
    if there == here:
        return
    what = {"data": "data", "configuration": "parameters"}.get(name, name)
    msg = f"the state is of other {what}: {'; '.join(differing)}; {_REMEDY[name]}"
    raise StateError(msg)


def _read(written: Any) -> Progress:
    world_size, num_workers, n_minibatches = written
    if max(world_size, num_workers) > _MOST_PROCESSES:
        raise ValueError(f"it has {world_size=}, {num_workers=}")
    return Progress(world_size=world_size, num_workers=num_workers, n_minibatches=n_minibatches)


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# Epochs that are counted as they are consumed, and can be stopped and resumed.


class ResumableDataset(IterableDataset[Any], ABC):
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
        self._run = Run(self._counters, compared)

    @property
    def n_resumed(self) -> int:
        """How often a state was loaded; workers started earlier do not know of it."""
        return self._run.n_resumed

    @property
    def settings(self) -> list[Any]:
        """What may be set between two epochs; workers started earlier do not know of it."""
        return [value for name, value in vars(self).items() if not name.startswith("_")]

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
    def _length(self) -> int:
        """Number of minibatches in a whole epoch on this rank."""

    def __len__(self) -> int:
        """Return the number of minibatches that an epoch delivers to this rank.

        In an epoch that was resumed, this includes the minibatches delivered before, so that a
        loop that continues its count ends with this number.
        """
        return max(self._length, self._run.n_of_epoch)

    @property
    @abstractmethod
    def _minibatch_bytes(self) -> int:
        """Mean size of a minibatch as it is read, in bytes; 0 if unknown."""

    @abstractmethod
    def _meet(self) -> None:
        """Agree with other ranks, all of which call this when an epoch begins."""

    @abstractmethod
    def _plan_of(self, *, epoch: int, after: tuple[Progress, ...]) -> Any:
        """Return the plan of an epoch on this rank, or of its remaining rows."""

    @abstractmethod
    def _minibatches(self, share: Any) -> Generator[Any, None, None]:
        """Deliver a share, with the current attributes of this dataset."""

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
        caller = sys._getframe().f_back  # noqa: SLF001 - there is no other way
        check_data_loader(self, caller, lambda: self._run.n_resumed_after)
        return type(self)

    def __copy__(self) -> Self:
        copied: Self = object.__new__(type(self))
        # A copy goes on by itself, at the next epoch.
        own = [name for name in ("_compared", "_counters", "_run", "_seed") if name in vars(self)]
        copies = copy.deepcopy([vars(self)[name] for name in own])
        vars(copied).update(vars(self) | dict(zip(own, copies, strict=True)))
        return copied

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
        minibatches = errors_that_travel(self._begin())  # its epoch begins here
        return Iteration(lambda: minibatches)

    def _begin(self) -> Generator[Any, None, None]:
        """Begin an epoch, and return its minibatches."""
        if get_worker_info() is None:
            self._prepare(0)
        # Begun here and not in the generator, which starts at its first use.
        share, counted = self._run.begin(self._plan_of)
        if get_worker_info() is None:
            with counted.starting():
                align_lightning(self, self._length, counted.n_left, resumes=counted.resumes)
        return counted.counting(self._minibatches(share))

    def _prepare(self, num_workers: int) -> None:
        """Agree with other ranks and with the trainer, before an epoch begins in this process."""
        history = self._history()
        history.every = getattr(self, "fetch_factor", 1)
        self._adapt(history, num_workers)
        self._meet()
        if is_overfitting():  # on the same minibatches each time
            self.set_epoch(0)
        elif not self._run.is_resumed:
            check_lightning(self)

    def _adapt(self, history: StatisticsHistory, num_workers: int) -> None:
        """Let settings follow the run from here on, if that is requested."""

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
        return statistics_of(self._all_counters())

    def history(self) -> dict[str, NDArray[Any]]:
        """Return what was counted in each of the last thousand fetches.

        Where throughput falls by half for two seconds or more, because the training loop waits for
        minibatches, the logger ``cellfeed`` warns, and names the stage that takes longer.

        Returns
        -------
        An array for each field of `Statistics`, of the work since the fetch before, shape
        (n_fetches,), the latest last; times are seconds. ``time`` is when the training loop had
        received the fetch, in seconds since 1970. If the dataset is ``adaptive``, ``num_threads``
        and ``prefetch`` are the setting meanwhile. With worker processes, a fetch is as many
        minibatches of any of them; of interleaved datasets, it is a minibatch.

        Examples
        --------
        >>> import numpy as np
        >>> from cellfeed import BlockShuffling, CellDataset
        >>> dataset = CellDataset(np.arange(100), BlockShuffling(4), batch_size=10, fetch_factor=5)
        >>> for minibatch in dataset:
        ...     pass
        >>> dataset.history()["n_minibatches"]
        array([5, 5])
        """
        return self._history().arrays()

    def _history(self) -> StatisticsHistory:
        if self._run.history is None:
            self._run.history = StatisticsHistory(self._all_counters())
        return self._run.history

    def log_statistics(self, log: Any, *, every: int = 100) -> None:
        """Log statistics from now on, after every so many minibatches of the training loop.

        Each time, they are those of the work since the last time; see `Statistics.scalars`. The
        step is the number of minibatches that this dataset has delivered. This applies to epochs
        that begin afterwards.

        Parameters
        ----------
        log
            A function of a dictionary and a step: ``wandb.log``, ``mlflow.log_metrics``,
            ``accelerator.log``, the ``log_metrics`` of Lightning's loggers, or your own; or a
            ``SummaryWriter`` of TensorBoard. None logs no more.
        every
            Number of minibatches.

        Raises
        ------
        ParameterError
            ``log`` is nothing of this kind, or ``every`` is below one.

        Examples
        --------
        >>> import numpy as np
        >>> from cellfeed import BlockShuffling, CellDataset
        >>> dataset = CellDataset(np.arange(100), BlockShuffling(block_size=4), batch_size=10)
        >>> dataset.log_statistics(lambda values, step: print(step, len(values)), every=5)
        >>> for minibatch in dataset:
        ...     pass
        5 12
        10 12
        """
        self._run.log = None if log is None else StatisticsLog(self._all_counters(), log, every)

    def annotate(self, profiler: Literal["torch", "nvtx"] | None) -> None:
        """Show the stages of the work to a profiler as named ranges, or no more.

        Ranges are named ``cellfeed: waiting`` (in the training loop, for the next minibatch),
        ``cellfeed: making tensors`` and so on, as the stages of `Statistics`; compiled code that
        reads, decompresses and places is one range in each of its threads. This applies to epochs
        that begin afterwards. Without ranges, which is the default, nothing is measurable of this.

        Parameters
        ----------
        profiler
            "torch" for ranges of `torch.profiler.record_function`; "nvtx" for those of Nsight
            Systems, which need a torch with CUDA.

        Raises
        ------
        ParameterError
            ``profiler`` is something else, or this torch has no NVTX.
        ImportError
            torch is not installed.
        """
        ranges = None if profiler is None else ranges_of(profiler)
        for each in self._all_counters():
            each.ranges = ranges

    def _all_counters(self) -> list[Counters]:
        """Return its counters, and those of datasets that it is made of."""
        return [self._counters]

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

        Warns
        -----
        UserWarning
            The position in a state that was loaded is discarded, within another epoch.
        """
        discarded = self._run.discarded_by(epoch)
        require_kept_whole(self, world_size=self.world_size, resumes_another=discarded is not None)
        if discarded is not None:
            warn_of_rest(self, epoch, discarded.epoch, discarded.n_minibatches)
            if (discarded.epoch, discarded.n_minibatches) == (epoch + 1, 0):
                end_epoch_of_lightning(self, self._length)
        self._run.set_epoch(epoch)
        if self._run.is_resumed:
            align_lightning(self, self._length)

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
        return state_of(self._identity() | {"seed": self._seed_values()}, self._run.position)

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
        position = position_of(state, self._identity())
        self._require_in_range(position, state["seed"])
        self._take_seeds(state["seed"])
        self._run.resume(position)

    def _require_in_range(self, position: Position, seed: Any) -> None:
        """Check that an epoch can have come as far as a state says.

        Raises
        ------
        StateError
            It cannot.
        """
        worker, progress = position.worker, position.progress
        if worker is not None and not 0 <= worker < progress.num_workers:
            msg = f"the state is damaged: it is of worker {worker} of {progress.num_workers}"
            raise StateError(f"{msg}; load an earlier one")
        parts = (*position.after, progress)
        for k, each in enumerate(parts):
            try:
                n = self._n_of(
                    seed=seed, epoch=position.epoch, after=parts[:k], world_size=each.world_size
                )
            except ParameterError as error:
                raise StateError(f"the state is damaged: {error}; load an earlier one") from error
            if n is not None and each.n_minibatches > n:
                msg = (
                    f"the state is damaged: each of {each.world_size} ranks has delivered "
                    f"{each.n_minibatches:,} of {n:,} minibatches; load an earlier one"
                )
                raise StateError(msg)

    def begin_for_workers(self, latest: Ticket | None, num_workers: int) -> tuple[Ticket, Counted]:
        """Begin an epoch that worker processes deliver; see `EpochCounter.claim_for_workers`."""
        self._prepare(num_workers)
        ticket, counted = self._run.begin_for_workers(self._plan_of, latest, num_workers)
        with counted.starting():
            align_lightning(self, self._length, counted.n_left, resumes=counted.resumes)
        return ticket, counted
