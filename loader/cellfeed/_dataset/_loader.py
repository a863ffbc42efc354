"""The DataLoader of a dataset, which notices if a minibatch is lost between processes."""

import errno
import functools
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from operator import is_
from pathlib import Path
from typing import Any, TypeVar, cast

from cellfeed._dataset import _workers
from cellfeed._dataset._epochs import Iteration, Ticket, wait_for_dropped
from cellfeed._dataset._run import Counted
from cellfeed._dataset._trainers import accumulating
from cellfeed._decode import Counter
from cellfeed._errors import (
    CellfeedError,
    DeliveryError,
    ParameterError,
    StateError,
    require_integer,
)
from cellfeed._torch import DataLoader, default_convert, get_worker_info, require_torch
from cellfeed.interrupts import interrupts_held
from cellfeed.machine import local_world_size, usable_memory_bytes

_F = TypeVar("_F", bound=Callable[..., Any])

# Where torch keeps what processes share, if workers cannot lend memory.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not a temporary file
_SHARE = 0.75  # of what is free: minibatches differ in size, and others want some of it
_OF_THE_CONSUMER = 2  # minibatches: one in use, and one handed over
# Each minibatch takes a file descriptor while it is queued, of which a process often has 1024.
_DESCRIPTORS = 512
_N_OF_OTHER_LOADERS = 2  # minibatches that each worker of torch's DataLoader keeps by default


# Options of a DataLoader, and why the loader does not take them.
_NOT_TAKEN = dict.fromkeys(
    ("batch_size", "drop_last"), "is a parameter of the dataset; give it there"
) | dict.fromkeys(
    ("shuffle", "sampler", "batch_sampler"),
    "does not apply; the strategy of the dataset determines the order",
)


class _EpochSampler:
    """Sampler of a DataLoader, on which trainers call ``set_epoch``.

    Parameters
    ----------
    dataset
        The dataset whose epoch is set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """See `CellDataset.set_epoch`."""
        self._dataset.set_epoch(epoch)


class MinibatchLoader(DataLoader[Any]):
    """A DataLoader that begins each epoch in this process, and counts what its workers deliver.

    Epochs are therefore numbered in the order in which iterations began, however late a worker
    starts, and ranks that have just met can agree on a seed. If workers deliver fewer minibatches
    than an epoch has, iteration raises `DeliveryError`.

    ``accelerator.prepare`` returns it unchanged; ``accelerator.save_state`` and ``load_state`` save
    and restore it.
    """

    dataset: Any
    # What Accelerate asks of a DataLoader. Of one that it prepared, it also sets the first.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    remainder = -1  # it must not cut the last minibatches: those that are repeated lie anywhere
    _ticket: Ticket | None = None  # of the latest iteration by the workers that are there
    _n_resumed = 0  # when they were started
    _settings: Sequence[Any] = ()
    _ranks_of_workers: tuple[int, int] | None = None
    n_begun = 0  # iterations, where workers persist

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        # A DataLoader takes none for such a dataset.
        object.__setattr__(self, "sampler", _EpochSampler(dataset))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, num_workers={self.num_workers})"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self.num_workers:
            return Iteration(functools.partial(self._announced, super().__iter__()))
        # Begun with the first minibatch, so that trainers may set the epoch until then.
        return Iteration(self._begin)

    def _begin(self) -> Generator[Any, None, None]:
        """Begin an epoch of the workers, and return what they deliver."""
        wait_for_dropped()  # their workers take memory and processors
        with interrupts_held():
            counted = self._begin_for_workers()
            with counted.starting():
                minibatches: Any = super().__iter__()
        if self.persistent_workers:
            minibatches = _InTurn(self, minibatches)
        return self._announced(_complete(counted, minibatches, is_kept=self.persistent_workers))

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last minibatch of an epoch was delivered; Accelerate reads this."""
        return bool(self.dataset.is_at_end)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch; see `CellDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def __next__(self) -> Any:
        msg = (
            "a loader is no iterator; write `iterator = iter(loader)` once, and then "
            "`next(iterator)`"
        )
        raise ParameterError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop; see `CellDataset.state_dict`.

        Raises
        ------
        StateError
            Workers deliver minibatches in any order (``in_order=False``).
        """
        if self.num_workers > 1 and not getattr(self, "in_order", True):
            msg = (
                "workers deliver minibatches in any order, so their number does not identify "
                "them; leave `in_order=False` out"
            )
            raise StateError(msg)
        state: dict[str, Any] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; see `CellDataset.load_state_dict`.

        The number of workers may differ from that of the saved run.
        """
        self.dataset.load_state_dict(state)

    def _get_iterator(self) -> Any:
        if not (
            self.num_workers and _workers.can_lend() and isinstance(self.collate_fn, _SentWhole)
        ):
            return super()._get_iterator()
        receiving, sending = _workers.connected()
        arrivals = _workers.Arrivals(receiving)
        own = self.worker_init_fn
        self.worker_init_fn = _workers.Departures(
            sending,
            arrivals.key,
            are_rows_placed=self.collate_fn.is_own,
            then=own,
        )
        try:
            iterator = super()._get_iterator()
        finally:
            self.worker_init_fn = own
        vars(iterator)["arrivals"] = arrivals  # they go with it
        # Garbage collection of a cycle would close the queues first, so that nothing could tell the
        # workers to end, and then wait 5 s for each to notice. What is reachable stays open.
        weakref.finalize(iterator, len, vars(iterator)["_index_queues"]).atexit = False
        return iterator

    def _announced(self, minibatches: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield minibatches, and notify Accelerate of each if it prepared this loader."""
        if "_is_accelerate_prepared" in vars(self):
            return accumulating(self, minibatches)
        return _passed_on(minibatches)

    def _begin_for_workers(self) -> Counted:
        ranks = self.dataset.rank, self.dataset.world_size
        n_resumed, settings = self.dataset.n_resumed, self.dataset.settings
        are_same = len(settings) == len(self._settings) and all(map(is_, settings, self._settings))
        # Workers that persist may have an old copy, or may have died in the epoch before.
        kept: Any = self._iterator
        have_died = kept is not None and any(each.exitcode is not None for each in kept._workers)  # noqa: SLF001
        if n_resumed != self._n_resumed or not are_same or have_died:
            self._n_resumed, self._settings = n_resumed, settings
            if kept is not None:
                with suppress(AssertionError):  # a fork of the process that started them
                    kept._shutdown_workers()  # noqa: SLF001 - an error may refer to it for long
            self._iterator = None
        if self._iterator is None:
            self._ticket, self._ranks_of_workers = None, ranks
        elif ranks != self._ranks_of_workers:
            rank, world_size = self._ranks_of_workers or ranks
            msg = (
                f"persistent worker processes were started by rank {rank} of {world_size}, which "
                f"is now rank {ranks[0]} of {ranks[1]}; make a new loader"
            )
            raise ParameterError(msg)
        counted: Counted
        self._ticket, counted = self.dataset.begin_for_workers(self._ticket, self.num_workers)
        return counted


class _ToBeCalled:
    """A method that makes a loader, and says so if it is iterated over instead of called."""

    def __init__(self, function: Callable[..., Any], instance: Any = None) -> None:
        self._function, self._instance = function, instance
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._function if instance is None else type(self)(self._function, instance)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(self._instance, *arguments, **options)

    def __iter__(self) -> Iterator[Any]:
        msg = "`loader` is a method; write `for minibatch in dataset.loader():`"
        raise ParameterError(msg)


def to_be_called(method: _F) -> _F:
    """Return a method that says so if it is iterated over instead of called."""
    return cast(_F, _ToBeCalled(method))


def _passed_on(minibatches: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield minibatches without keeping a reference to the last."""
    yield from minibatches


class _InTurn:
    """Iterates over what workers deliver that persist, for the latest iteration over their loader.

    They begin the next epoch with it, so that an earlier one would get minibatches of that.
    """

    def __init__(self, loader: MinibatchLoader, minibatches: Iterator[Any]) -> None:
        loader.n_begun += 1
        self._loader, self._minibatches, self._number = loader, minibatches, loader.n_begun

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._number != self._loader.n_begun:
            msg = (
                "another iteration over this loader has begun, and its workers, which persist, "
                "deliver only that; leave `persistent_workers` out, or use another loader for it"
            )
            raise DeliveryError(msg)
        return next(self._minibatches)


def _complete(counted: Counted, minibatches: Any, *, is_kept: bool) -> Generator[Any, None, None]:
    """Yield minibatches without keeping a reference to the last; check that none is missing.

    Workers that are not kept for the next epoch end with it, also after an error: torch would end
    them when the traceback, which refers to its iterator, is gone, and try so in forked processes.
    """
    remedy = "a worker lost some, and reported the reason on stderr; fix it, or use num_workers=0"
    try:
        yield from counted.counting(minibatches, remedy=remedy)
    except CellfeedError as error:
        # Its original one-line message; torch has put the traceback before it.
        last = str(error).rstrip().rpartition("\n")[2]
        raise type(error)(last.partition(f"{type(error).__name__}: ")[2] or last) from error
    except KeyboardInterrupt:
        if not is_kept:
            for each in minibatches._workers:  # noqa: SLF001 - no public way
                each.terminate()  # instead of waiting until each has read its fetch
        raise
    finally:
        with interrupts_held():  # Ctrl-C is lost in `__del__`, which ends the workers
            if not is_kept:
                minibatches._shutdown_workers()  # noqa: SLF001 - no public way
            del minibatches


def loader_over(
    dataset: Any,
    num_workers: int,
    options: dict[str, Any],
    *,
    n_queued: int,
    minibatch_bytes: int,
    as_torch: bool,
    can_be_forked: bool,
) -> MinibatchLoader:
    """Return a DataLoader over the minibatches of a dataset.

    Parameters
    ----------
    dataset
        The dataset.
    num_workers, options
        Number of worker processes, and other parameters of `torch.utils.data.DataLoader`.
    n_queued
        How many minibatches each worker queues, if there is memory for them.
    minibatch_bytes
        Mean size of a minibatch; 0 if unknown.
    as_torch
        Whether NumPy arrays are made tensors.
    can_be_forked
        Whether workers that are forked can read what this process has open.

    Raises
    ------
    ParameterError
        ``num_workers`` is negative or not an integer, or an option belongs to the dataset.
    """
    require_torch("`loader`")
    if require_integer("num_workers", num_workers) < 0:
        msg = f"`num_workers >= 0` must hold, but got num_workers={num_workers}"
        raise ParameterError(msg)
    for name in options:
        if name in _NOT_TAKEN:
            msg = f"`{name}` of `loader` {_NOT_TAKEN[name]}"
            raise ParameterError(msg)
    if not as_torch:
        options.setdefault("collate_fn", _as_it_is)
    if num_workers:
        limit = min(max(2, _DESCRIPTORS // num_workers), n_that_fit(minibatch_bytes, num_workers))
        options.setdefault("prefetch_factor", min(n_queued, limit))
        options["collate_fn"] = _SentWhole(options.get("collate_fn") or default_convert)
        if not can_be_forked:
            options.setdefault("multiprocessing_context", context_without_threads())
    return MinibatchLoader(dataset, batch_size=None, num_workers=num_workers, **options)


def n_that_fit(minibatch_bytes: int, n_workers: int) -> int:
    """Return how many minibatches each worker may queue in shared memory.

    Parameters
    ----------
    minibatch_bytes
        Size of a minibatch.
    n_workers
        Worker processes of this process; other ranks on this machine need as much.
    """
    free = usable_memory_bytes() if _workers.can_lend() else _free_shared_memory()
    fit = _SHARE * free / local_world_size() / max(1, minibatch_bytes) - _OF_THE_CONSUMER
    return max(1, int(fit / n_workers))


def _free_shared_memory() -> int:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:  # not on this system
        return sys.maxsize


def context_without_threads() -> BaseContext:
    """Return a multiprocessing context for workers that must not inherit this process's threads.

    They are forked from a server that has imported what they need, once for all of them, and has
    started no threads. On macOS, system code that torch loads cannot be forked safely.
    """
    context = multiprocessing.get_context("forkserver")
    imported = "cellfeed" if sys.platform == "darwin" else "cellfeed._dataset"
    context.set_forkserver_preload(["__main__", imported])
    return context


def _as_it_is(minibatch: Any) -> Any:
    """Return a minibatch unchanged: a ``collate_fn`` that keeps NumPy arrays."""
    return minibatch


def check_other_loader(dataset: Any, minibatch_bytes: int) -> None:
    """Warn, in the first worker of a DataLoader that is not ours, of what it cannot do.

    Parameters
    ----------
    dataset
        The dataset, which begins an epoch.
    minibatch_bytes
        Mean size of a minibatch; 0 if unknown.

    Warns
    -----
    UserWarning
        ``/dev/shm`` is too small for the minibatches that wait in it, ranks are not compared, or
        settings do not follow the run.
    """
    worker = get_worker_info()
    if worker is None or worker.id or _workers.departures() is not None or not _workers.can_lend():
        return
    remedy, free = "iterate over `dataset.loader(num_workers=...)`", _free_shared_memory()
    needed = _N_OF_OTHER_LOADERS * worker.num_workers * minibatch_bytes
    if needed > free:
        warnings.warn(
            f"{_SHARED_MEMORY} has {free / 1e6:,.0f} MB left, but the workers of this DataLoader "
            f"keep about {needed / 1e6:,.0f} MB of minibatches in it and hang where it is full; "
            f"{remedy}, which needs none of it",
            UserWarning,
            stacklevel=2,
        )
    if dataset.world_size > 1:
        warnings.warn(
            "ranks are not compared where another DataLoader than cellfeed's starts the workers: "
            f"if one rank takes more minibatches than others, cells are missing; {remedy}",
            UserWarning,
            stacklevel=2,
        )
    if getattr(dataset, "adaptive", False):
        warnings.warn(
            "`adaptive` has no effect where another DataLoader than cellfeed's starts the workers; "
            f"{remedy}",
            UserWarning,
            stacklevel=2,
        )


def errors_that_travel(minibatches: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Yield minibatches in a worker, and make its errors picklable."""
    with _only_errors_that_travel():
        yield from minibatches


@contextmanager
def _only_errors_that_travel() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        try:
            ForkingPickler.dumps(type(error))
        except Exception:  # noqa: BLE001 - whatever keeps it from being pickled
            msg = f"{type(error).__name__} in a worker, of a class that cannot be pickled: {error}"
            raise DeliveryError(msg) from error
        raise


@dataclass(frozen=True, slots=True)
class _SentWhole:
    """A ``collate_fn`` that pickles its result, so that errors of pickling are raised.

    The queue of a worker pickles in a background thread, which only prints an error and continues
    with the next minibatch. The result of ``collate`` is therefore pickled earlier; unpickling
    restores it.
    """

    collate: Callable[[Any], Any]

    @property
    def is_own(self) -> bool:
        """Whether no function of the user gets a minibatch, which it might keep."""
        return self.collate in (default_convert, _as_it_is)

    def __call__(self, minibatch: Any) -> Any:
        worker = get_worker_info()
        if worker is None:
            return self.collate(minibatch)
        lending = _workers.departures()
        with _only_errors_that_travel():
            collated = self.collate(minibatch)
            with cast(Any, worker.dataset).counters.wall_time(Counter.SENDING):
                return _sent(collated, lending)


def _sent(minibatch: Any, lending: _workers.Departures | None) -> Any:
    """Return what a worker sends: a message, or a pickle if no memory can be lent."""
    try:
        message = None if lending is None else _workers.message_of(minibatch, lending)
        return message or _workers.Message(pickle.loads, bytes(ForkingPickler.dumps(minibatch)))
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        if named := re.search(r"</([^/>]+)>", str(error)):  # torch leaves the file there
            (_SHARED_MEMORY / named[1]).unlink(missing_ok=True)
    size = shutil.disk_usage(_SHARED_MEMORY).total
    warnings.warn(
        f"{_SHARED_MEMORY}, of {size / 1e6:,.0f} MB, is full, so workers send minibatches "
        "through a pipe, which is slower; enlarge it (docker run --shm-size=2g), keep "
        "fewer minibatches, or use fewer workers, a smaller `prefetch_factor` or "
        "num_workers=0",
        stacklevel=2,
    )
    return _workers.Message(pickle.loads, pickle.dumps(minibatch))
