"""The DataLoader of a dataset: workers read every n-th fetch, and it takes them in order."""

import functools
import itertools
import multiprocessing
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar, cast

from cellfeed._errors import CellfeedError, DeliveryError, ParameterError
from cellfeed._torch import DataLoader, default_convert, torch
from cellfeed.bytes._buffers import can_lend
from cellfeed.dataset import _workers
from cellfeed.dataset._run import Beginning, Iteration, wait_for_dropped
from cellfeed.decode import Counter
from cellfeed.interrupts import interrupts_held

_F = TypeVar("_F", bound=Callable[..., Any])

# Bytes of minibatches that a worker sends at once: few, since memory that is new to the system
# takes longer than a message.
_MESSAGE_BYTES = 16 * 2**20


class _Sampler:
    """Sampler of the loader, on which trainers call ``set_epoch``."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """See `CellDataset.set_epoch`."""
        self._dataset.set_epoch(epoch)


class MinibatchLoader(DataLoader[Any]):
    """A DataLoader that begins each epoch in this process and delivers it in its plan's order.

    ``accelerator.prepare`` returns it unchanged; ``accelerator.save_state`` and ``load_state`` save
    and restore it.
    """

    dataset: Any
    # What Accelerate asks of a DataLoader. Of one that it prepared, it also sets the first.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    remainder = -1  # it must not cut the last minibatches: those that are repeated lie anywhere

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        # A DataLoader takes none for such a dataset.
        object.__setattr__(self, "sampler", _Sampler(dataset))
        self._options = options
        self._kept: _Workers | None = None  # those that persist

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, num_workers={self.num_workers})"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Begun with the first minibatch, so that trainers may set the epoch until then.
        begin: Callable[[], Any] = self._begin if self.num_workers else super().__iter__
        return Iteration(functools.partial(self._announced, begin))

    def _announced(self, begin: Callable[[], Iterator[Any]]) -> Generator[Any, None, None]:
        """Yield minibatches, for Accelerate as those of its active loader if it prepared this."""
        if "_is_accelerate_prepared" not in vars(self):
            yield from begin()
            return
        active = _active_in_accelerate(self)
        active.begin()
        try:
            yield from begin()
        finally:
            active.end()

    def _begin(self) -> Generator[Any, None, None]:
        """Begin an epoch, and return what workers deliver."""
        wait_for_dropped()  # their workers take memory and processors
        with self.dataset.begun() as (beginning, epoch), interrupts_held():
            workers = self._kept
            if workers is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the number of workers, as torch has said
                    workers = _Workers(self.dataset, self._options, self.num_workers)
            if self.persistent_workers:
                self._kept = workers
            delivered = workers.delivered(beginning)
            minibatches: Generator[Any, None, None] = epoch.counting(delivered)
        return minibatches

    @property
    def n_sent_ahead(self) -> int:
        """How many minibatches workers send at most before the training loop asks for them."""
        of_fetch = getattr(self.dataset, "fetch_factor", 1)
        of_message = min(of_fetch, _n_of_message(self.dataset))
        return self.num_workers * (self.prefetch_factor or 0) * of_message

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last minibatch of an epoch was delivered; Accelerate reads this."""
        return bool(self.dataset.is_at_end)

    def peek(self, n: int = 1) -> list[Any]:
        """Return the first minibatches of the coming epoch; see `CellDataset.peek`."""
        minibatches: list[Any] = self.dataset.peek(n)
        return [self.collate_fn(each) for each in minibatches]

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
        """Return the position of the training loop; see `CellDataset.state_dict`."""
        state: dict[str, Any] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, with any number of workers; see `CellDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)


def _active_in_accelerate(loader: MinibatchLoader) -> Any:
    """Return what Accelerate takes for its active DataLoader while one iterates over a loader.

    It is another for each iteration, as Accelerate would remove all of one loader with the first.
    At the end of it, Accelerate synchronises accumulated gradients.
    """
    from accelerate.data_loader import DataLoaderStateMixin  # noqa: PLC0415 - only where it is used
    from accelerate.state import GradientState  # noqa: PLC0415

    class Active(DataLoaderStateMixin):  # type: ignore[misc]
        gradient_state = GradientState()

        def reset(self) -> None:
            """Keep what the loader says."""

    Active.end_of_dataloader = property(lambda _: loader.end_of_dataloader, lambda *_: None)
    return Active()


class _Workers:
    """Worker processes, each of which reads every n-th fetch and sends its minibatches in order.

    Each is the only one of a DataLoader, so that minibatches are taken from the worker that has the
    next fetch, and memory is that of few messages, however large a fetch is.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any], num_workers: int) -> None:
        self._dataset = dataset
        self._leave = list[_workers.Event]()
        method = options.get("multiprocessing_context")
        if not isinstance(method, BaseContext):
            method = multiprocessing.get_context(method or multiprocessing.get_start_method())
        collate = options["collate_fn"]
        arrivals = self._arrivals = _workers.Arrivals(num_workers) if can_lend() else None
        n = _n_of_message(dataset)
        self._requests = [_Requests(dataset, k, num_workers, n) for k in range(num_workers)]
        own = {
            "batch_size": None,
            "num_workers": 1,
            "collate_fn": as_it_is,
            "multiprocessing_context": _without_locks(method),
        }
        self._generator = options.get("generator")
        self._generators = [torch.Generator() for _ in range(num_workers)]
        self._loaders = list[DataLoader[Any]]()
        for k, requests in enumerate(self._requests):
            self._leave.append(_workers.Event(method))
            start = _workers.WorkerStart(
                leave=self._leave[k],
                file=None if arrivals is None else arrivals.files[k],
                key=0 if arrivals is None else arrivals.key,
                are_rows_placed=collate in (default_convert, as_it_is),
                then=options.get("worker_init_fn"),
                worker=k,
                num_workers=num_workers,
            )
            of_worker = {"sampler": requests, "worker_init_fn": start}
            of_worker["generator"] = self._generators[k]
            sent: Any = _Sent(dataset, collate, num_workers)
            self._loaders.append(DataLoader(sent, **{**options, **own, **of_worker}))
        self._n_begun = 0
        self._is_kept = bool(options.get("persistent_workers"))
        if self._is_kept:
            # Garbage collection of a cycle closes the queues first: torch could not tell workers to
            # end, and would wait 5 s for each.
            weakref.finalize(self, _end, self._leave).atexit = False

    def delivered(self, beginning: Beginning) -> Generator[Any, None, None]:
        """Deliver what is left of an epoch, in order.

        Raises
        ------
        DeliveryError
            Workers persist, and have begun another iteration since.
        """
        self._n_begun += 1
        # One number per epoch, also for workers that persist, as torch draws without workers: so
        # dropout and other noise of the training loop do not depend on workers.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator))
        for k, generator in enumerate(self._generators):
            generator.manual_seed(seed + k)
        number, arriving = self._n_begun, list[Iterator[Any]]()
        for requests, loader in zip(self._requests, self._loaders, strict=True):
            requests.beginning = beginning
            arriving.append(iter(loader))
        return self._in_order(number, beginning, arriving)

    def _in_order(
        self, number: int, beginning: Beginning, arriving: list[Iterator[Any]]
    ) -> Generator[Any, None, None]:
        waiting = dict[int, list[Any]]()  # minibatches of each fetch, the next one last
        try:
            for fetch in self._dataset._sources(beginning):  # noqa: SLF001 - ours
                self._require_latest(number)
                while not waiting.get(fetch):
                    message = next(arriving[fetch % len(arriving)], None)
                    if message is None:
                        return  # which is too early, as the consumer says
                    found, minibatches = message
                    waiting[found] = [*minibatches[::-1], *waiting.pop(found, ())]
                    minibatches.clear()
                delivered = [waiting[fetch].pop()]
                if not waiting[fetch]:
                    del waiting[fetch]
                yield delivered.pop()
        except CellfeedError as error:
            # Its original one-line message; torch has put the traceback before it.
            last = str(error).rstrip().rpartition("\n")[2]
            told = type(error)(last.partition(f"{type(error).__name__}: ")[2] or last)
            # Frames of torch would keep its workers for as long as somebody keeps the error.
            raise told from error.with_traceback(None)
        except KeyboardInterrupt:
            if not self._is_kept:
                _end(self._leave)  # instead of waiting until each has read its fetch
            raise
        except Exception as error:  # noqa: BLE001 - of torch, or of a worker
            raise error.with_traceback(None) from None
        finally:
            waiting.clear()
            with interrupts_held():  # Ctrl-C is lost in destructors
                arriving.clear()
                if not self._is_kept:
                    self._loaders.clear()
                    self._leave.clear()
                    self._arrivals = None

    def _require_latest(self, number: int) -> None:
        if number != self._n_begun:
            msg = (
                "another iteration over this loader has begun, and its workers, which persist, "
                "deliver only that; leave `persistent_workers` out, or use another loader for it"
            )
            raise DeliveryError(msg)


class _Requests:
    """A sampler whose items say what a worker sends: the next minibatches of its fetches, in order.

    Parameters
    ----------
    dataset
        The dataset.
    worker, num_workers
        Number of the worker, and the number of workers; each reads every n-th fetch.
    of_message
        Number of minibatches that are sent at once.
    """

    def __init__(self, dataset: Any, worker: int, num_workers: int, of_message: int) -> None:
        self._dataset, self._worker, self._num_workers = dataset, worker, num_workers
        self._of_message = of_message
        self.beginning: Beginning | None = None

    def __iter__(self) -> "Iterator[_Request]":
        beginning = cast(Beginning, self.beginning)
        sizes = self._dataset._sizes(beginning)  # noqa: SLF001 - ours
        mine = itertools.islice(enumerate(sizes), self._worker, None, self._num_workers)
        for fetch, n in mine:
            for start in range(0, n, self._of_message):
                yield _Request(beginning, fetch, start, min(self._of_message, n - start))


class _Request(NamedTuple):
    """What a worker is asked for: some minibatches of a fetch of what is left of an epoch."""

    beginning: Beginning
    fetch: int
    start: int
    n: int


class _Sent:
    """What a worker sends: it knows what it is asked for, no more.

    What it will be asked for next is read ahead; anything else can be asked for at any time.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], num_workers: int) -> None:
        self._dataset, self._collate, self._num_workers = dataset, collate, num_workers
        self._next: tuple[Beginning, int] | None = None
        self._reading: Iterator[Any] = iter(())

    def __getitem__(self, request: _Request) -> Any:
        beginning, fetch, start, n = request
        with _only_errors_that_travel():
            # A fetch is asked for from its start on, to its end.
            if start == 0 and self._next != (beginning, fetch):
                if isinstance(self._reading, Generator):
                    self._reading.close()
                flat = self._dataset._of_worker(beginning, fetch, self._num_workers)  # noqa: SLF001
                self._reading = flat
            self._next = beginning, fetch + self._num_workers
            minibatches = [*map(self._collate, itertools.islice(self._reading, n))]
            with self._dataset.counters.wall_time(Counter.SENDING):
                return _workers.sent((fetch, minibatches))


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


def _n_of_message(dataset: Any) -> int:
    """Return how many minibatches a message has at most."""
    return max(1, _MESSAGE_BYTES // max(1, int(dataset.minibatch_bytes)))


def _end(leave: list[_workers.Event]) -> None:
    for each in leave:
        each.set()


def _without_locks(context: BaseContext) -> BaseContext:
    """Return a context whose events have no lock."""

    class WithoutLocks(type(context)):  # type: ignore[misc]
        def Event(self) -> Any:  # noqa: N802 - its name
            return _workers.Event(context)

    changed: BaseContext = WithoutLocks()
    return changed


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


def context_without_threads() -> BaseContext:
    """Return a multiprocessing context for workers that must not inherit this process's threads.

    They are forked from a server that has imported what they need, once for all of them, and has
    started no threads. On macOS, system code that torch loads cannot be forked safely.
    """
    context = multiprocessing.get_context("forkserver")
    imported = "cellfeed" if sys.platform == "darwin" else "cellfeed.dataset"
    context.set_forkserver_preload(["__main__", imported])
    return context


def as_it_is(minibatch: Any) -> Any:
    """Return a minibatch unchanged: a ``collate_fn`` that keeps NumPy arrays."""
    return minibatch
