"""The `tune_dataloader` function."""

import math
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from cellfeed import ParameterError
from cellfeed.machine import usable_cpu_count, usable_memory_bytes
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._constants import DEFAULT_BUDGET_SECONDS, PROFILE_SECONDS
from cellfeed_tuner._dataloaders._remade import remade
from cellfeed_tuner._dataloaders._timer import Labels, LoaderTimer, random_states_kept
from cellfeed_tuner._interval import is_unknown, times
from cellfeed_tuner._machine import ProcessorTime, processor_time_between, thread_times
from cellfeed_tuner._measuring._timing import Round, Step, TimingRequest
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._reports._progress import LiveDisplay
from cellfeed_tuner._request import Request, check_numbers
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult
from cellfeed_tuner._results import Constraints, Dataset, LabelCensus
from cellfeed_tuner._run import Run
from cellfeed_tuner._searching._space import Space
from cellfeed_tuner._subject import LoaderPlans, Tunable
from cellfeed_tuner._time_budget import TimeBudget, silent

# Numbers of minibatches that a worker reads ahead. Chosen: PyTorch's default, and one that evens
# out minibatches of different duration.
DEFAULT_PREFETCH_FACTORS = (2, 8)
# Most workers by default, and how many for each core: reading may wait, for a disk or a network,
# rather than compute.
MOST_WORKERS, WORKERS_PER_CORE = 32, 2
# Most seconds of the first look, and the share of the budget that it may take.
LOOK_SECONDS, LOOK_SHARE = 5.0, 0.2
# How long workers take to start, about, and how many times as long an epoch must be for that not
# to matter. Measured: forking takes 0.1 s; else, each worker imports PyTorch.
START_SECONDS, SLOW_START_SECONDS, LONG_EPOCH = 0.2, 5.0, 20
# Least duration of a round. Chosen: long compared with taking its time.
ROUND_SECONDS = 0.005
# Cells of an epoch, so that none is too short to be timed.
_ANY_NUMBER = 1 << 60


class TunedDataLoader(NamedTuple):
    """A DataLoader with the recommended settings, and what was measured.

    Parameters
    ----------
    loader
        Of the same class, dataset, sampler and so on as the one that was passed.
    result
        As of `autotune`; ``result.dataset.unit`` says what throughput counts.
    """

    loader: DataLoader[Any]
    result: AutotuneResult

    @property
    def arguments(self) -> dict[str, Setting]:
        """The recommended arguments of `torch.utils.data.DataLoader`."""
        chosen = self.result.recommended
        return dict(chosen.configuration) if chosen else {}

    @property
    def training_arguments(self) -> dict[str, Setting]:
        """The recommended arguments of ``transformers.TrainingArguments``."""
        names = {name: f"dataloader_{name}" for name in self.arguments}
        names["batch_size"] = "per_device_train_batch_size"
        return {names[name]: each for name, each in self.arguments.items()}


def tune_dataloader(
    loader: DataLoader[Any],
    step: Step | None = None,
    label: str | int | Labels | None = None,
    budget: float = DEFAULT_BUDGET_SECONDS,
    *,
    workers: Sequence[int] | None = None,
    prefetch_factors: Sequence[int] = DEFAULT_PREFETCH_FACTORS,
    batch_sizes: Sequence[int] = (),
    start_methods: Sequence[str] = (),
    memory: int | None = None,
    seed: int = 0,
    verbose: bool = True,
) -> TunedDataLoader:
    """Measure a DataLoader with other numbers of workers, and return it with the best settings.

    The DataLoader is made again with other ``num_workers``, ``prefetch_factor``, where epochs are
    short ``persistent_workers``, and with a GPU ``pin_memory``. Its dataset, sampler, generator,
    ``collate_fn`` and all else stay. It is measured in this process, so that a notebook's objects
    and a GPU can be used; without workers, a shallow copy of the dataset is read, so that files
    which it opens on first use are not inherited by workers. The states of Python's, NumPy's and
    PyTorch's generators, and of the DataLoader's own, are restored (not those of GPUs). Workers of
    one measurement have ended before the next.

    Throughput includes the start of workers in each epoch, if the epoch has a known length. The
    fastest settings are compared in turns; of equally fast ones, those that take the least memory
    and the fewest workers are recommended. The number of workers that the DataLoader has is always
    among those measured.

    Rows are read as they come: files that are in the page cache stay there.

    Parameters
    ----------
    loader
        A `torch.utils.data.DataLoader`, map-style or iterable. Of a subclass, attributes are
        copied; its constructor is not called again.
    step
        A training step, called with each minibatch of every measurement: it trains what it trains.
        What counts is then the throughput of both together, and `Recommended.waiting` is the share
        of time in which training waited. A step that uses a GPU need not synchronize.
    label
        A key, position or attribute of a minibatch, or a function of it, that gives a label for
        each row. The entropy of these labels is reported as measured; it decides nothing.
    budget
        Seconds to spend in total.
    workers
        Numbers of workers to measure; if None, 0, 1 and the powers of two up to twice the usable
        cores, or up to as many as would keep these busy where rows wait, but at most 32.
    prefetch_factors
        Minibatches that each worker reads ahead.
    batch_sizes
        Batch sizes to choose from, by rows per second; only the one that it has if empty.
    start_methods
        Ways to start workers: "fork", "spawn", "forkserver". If empty, the DataLoader's own or the
        system's; where that would have to pickle what cannot be pickled, "fork".
    memory
        Bytes that workers, and this process in addition to what it has, may take; what is
        available now if None.
    seed
        Seed of the order of measurements.
    verbose
        Whether to write progress to stderr and a report to stdout.

    Returns
    -------
    A named tuple of the DataLoader to use and the result.

    Raises
    ------
    ParameterError
        The DataLoader cannot be made again, delivers nothing, or fails with all settings; ``step``
        or ``label`` fail; or an argument is out of range.
    AutotuneInterrupted
        Ctrl-C, after something was measured. ``result`` of this `KeyboardInterrupt` is what was
        found by then.
    """
    time_budget, name = TimeBudget(budget), _name_of(label)
    with _quiet():
        remade(loader)  # or it is refused, before any time is spent
    check_numbers(seed, budget=budget, memory=memory)
    _check(loader, workers, batch_sizes, prefetch_factors)
    n_bytes = usable_memory_bytes() if memory is None else int(memory)
    timer = LoaderTimer(
        loader, step=step, labels_of=_labels_of(label), label=name, memory_bytes=n_bytes
    )
    with _quiet(), random_states_kept(loader), LiveDisplay() as display:
        progress = display.show if verbose else silent
        progress("start", 0, 1)
        seconds, busy = _look(timer, min(LOOK_SECONDS, LOOK_SHARE * budget), workers, seed)
        numbers = _numbers_of_workers(workers, loader.num_workers, busy)
        methods = _usable_methods(timer, loader, start_methods, max(numbers), seed)
        grid = _grid(
            loader, timer, seconds, numbers,
            prefetch_factors=prefetch_factors, batch_sizes=batch_sizes, methods=methods,
        )  # fmt: skip
        request = _request(loader, timer, grid, seconds, budget=budget, seed=seed)
        run = Run(request=request, process=timer, budget=time_budget, on_progress=progress)
        run.prepare()
        run.start()
        run.search()
        result = _completed(run.result(None), timer, loader, label=name, memory_bytes=n_bytes)
    if verbose:
        _print(result)
    if run.interrupted:
        raise AutotuneInterrupted(result)
    if result.recommended is None:
        failed = [each.note for each in result.configurations if each.note]
        msg = f"{type(loader).__name__} failed with all settings: {(failed or ['no time'])[0]}"
        raise ParameterError(msg)
    with _quiet():
        return TunedDataLoader(remade(loader, **result.recommended.configuration), result)


def _check(
    loader: DataLoader[Any],
    workers: Sequence[int] | None,
    batch_sizes: Sequence[int],
    prefetch_factors: Sequence[int],
) -> None:
    if workers is not None and (not workers or min(workers) < 0):
        msg = f"`workers` must be numbers of at least 0, but got {list(workers)}"
        raise ParameterError(msg)
    if batch_sizes and not loader.batch_size:
        msg = "`batch_sizes` need a DataLoader with a `batch_size`; this one has none"
        raise ParameterError(msg)
    if not prefetch_factors or min(*prefetch_factors, *batch_sizes, 1) < 1:
        msg = (
            "`prefetch_factors` and `batch_sizes` must be at least 1, but got "
            f"{list(prefetch_factors)} and {list(batch_sizes)}"
        )
        raise ParameterError(msg)


def _name_of(label: str | int | Labels | None) -> str:
    if label is None:
        return ""
    return getattr(label, "__name__", type(label).__name__) if callable(label) else str(label)


def _labels_of(label: str | int | Labels | None) -> Labels | None:
    if label is None or callable(label):
        return label

    def found(minibatch: Any) -> Any:
        try:
            return minibatch[label]
        except (KeyError, TypeError, IndexError, AttributeError):
            if isinstance(label, str) and hasattr(minibatch, label):
                return getattr(minibatch, label)
            raise

    return found


# What to measure.


def _numbers_of_workers(asked: Sequence[int] | None, own: int, busy: float) -> list[int]:
    """Return numbers of workers, ascending, with the DataLoader's own.

    One process runs, or waits for a processor, in the share ``busy`` of the time; where that is
    little, rows wait for a disk or a network.
    """
    if asked is not None:
        return sorted({*asked, own})
    per_core = max(WORKERS_PER_CORE, 1 / max(busy, 1 / MOST_WORKERS))
    most = min(MOST_WORKERS, math.ceil(per_core * usable_cpu_count()))
    return sorted({0, own, *(1 << power for power in range(most.bit_length()))})


def _look(
    timer: LoaderTimer, limit_seconds: float, numbers: Sequence[int] | None, seed: int
) -> tuple[float, float]:
    """Return about how long a minibatch takes without workers, in seconds, and a share of the time.

    It is that in which threads ran, or waited for a processor. They are 0 and 1 if this fails.
    """
    before, began = thread_times(), time.monotonic()
    found = timer.run(
        _timing(timer, Configuration(), seconds=PROFILE_SECONDS, seed=seed),
        limit_seconds=limit_seconds,
    )
    elapsed = time.monotonic() - began
    used = processor_time_between(before, thread_times()) or ProcessorTime(elapsed, 0.0)
    busy = (used.running + used.waiting) / elapsed
    if found.failure and numbers is not None and not any(numbers):
        raise ParameterError(f"the DataLoader fails: {' '.join(found.failure.split())}")
    seconds = [each.seconds for each in found.events if isinstance(each, Round)]
    return (seconds[-1], busy) if seconds else (0.0, 1.0)


def _timing(
    timer: LoaderTimer, configuration: Configuration, *, seconds: float, seed: int
) -> TimingRequest:
    return TimingRequest(
        configuration=configuration,
        batch_size=timer.epoch.batch_size,
        labels=(),
        cache="warm",
        seed=seed,
        least_rounds=1,
        seconds=seconds,
    )


def _usable_methods(
    timer: LoaderTimer, loader: DataLoader[Any], asked: Sequence[str], most_workers: int, seed: int
) -> list[str | None]:
    """Return start methods of workers that work; None for the DataLoader's own.

    Those that pickle are tried with one worker.
    """
    if not most_workers:
        return [None]
    context, there = loader.multiprocessing_context, multiprocessing.get_all_start_methods()
    unknown = [each for each in asked if each not in there]
    if unknown:
        msg = f"`start_methods` must be some of {there}, but got {unknown[0]!r}"
        raise ParameterError(msg)
    method = context.get_start_method() if context else multiprocessing.get_start_method()
    for each in asked or [method]:
        if each == "fork":
            continue
        settings = Configuration(num_workers=1, multiprocessing_context=each)
        found = timer.run(
            _timing(timer, settings, seconds=0.0, seed=seed), limit_seconds=4 * LOOK_SECONDS
        )
        if not found.failure:
            continue
        if not asked and context is None and "fork" in there:
            return ["fork"]
        msg = (
            f"workers cannot be started by {each!r} ({' '.join(found.failure.split())}); define "
            "the dataset, and the functions that it is used with, in a module"
        )
        remedy = ", or have workers forked (multiprocessing_context='fork')"
        raise ParameterError(f"{msg}{remedy if 'fork' in there else ''}")
    return list(asked) or [None]


def _grid(
    loader: DataLoader[Any],
    timer: LoaderTimer,
    seconds: float,
    numbers: Sequence[int],
    *,
    prefetch_factors: Sequence[int],
    batch_sizes: Sequence[int],
    methods: Sequence[str | None],
) -> list[Configuration]:
    """Return the configurations to choose from, the usual ones first."""
    n = timer.epoch.n_minibatches
    forks = (methods[0] or multiprocessing.get_start_method()) == "fork"
    start = START_SECONDS if forks else SLOW_START_SECONDS
    is_short = n is not None and n * seconds < LONG_EPOCH * start * max(numbers)
    always: dict[str, Sequence[Any]] = {}
    if batch_sizes:
        always["batch_size"] = sorted({*batch_sizes, timer.epoch.batch_size})
    if torch.cuda.is_available():
        always["pin_memory"] = [loader.pin_memory, not loader.pin_memory]
    own = [loader.prefetch_factor] if loader.prefetch_factor else []
    of_workers = always | {"prefetch_factor": list(dict.fromkeys([*own, *prefetch_factors]))}
    if is_short or loader.persistent_workers:
        of_workers["persistent_workers"] = [True]
    if any(methods):
        of_workers["multiprocessing_context"] = methods
    found = [
        *(_configurations(always, [0]) if 0 in numbers else []),
        *_configurations(of_workers, [each for each in numbers if each]),
    ]
    if is_short and loader.num_workers and not loader.persistent_workers:
        own_number = [loader.num_workers]
        found += _configurations(
            {n: each[:1] for n, each in of_workers.items()} | {"persistent_workers": [False]},
            own_number,
        )
    return found


def _configurations(
    settings: dict[str, Sequence[Any]], numbers: Sequence[int]
) -> list[Configuration]:
    found = [dict(zip(settings, each, strict=True)) for each in product(*settings.values())]
    return [Configuration(num_workers=n, **each) for each in found for n in numbers]


class _Subject(Tunable):
    """A DataLoader, as a subject without labels; it is timed by a `LoaderTimer`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def open(self, configuration: Configuration) -> DataLoader[Any]:
        """Return the DataLoader with these settings."""
        return remade(self._loader, **configuration)

    @property
    def name(self) -> str:
        """The name in reports."""
        return type(self._loader).__name__


def _request(
    loader: DataLoader[Any],
    timer: LoaderTimer,
    grid: Sequence[Configuration],
    seconds: float,
    *,
    budget: float,
    seed: int,
) -> Request:
    subject, epoch = _Subject(loader), timer.epoch
    most_workers = max(each.num_workers for each in grid)
    per_round = math.ceil(ROUND_SECONDS / seconds) if seconds else 1
    if epoch.n_minibatches:
        per_round = min(per_round, max(1, epoch.n_minibatches // max(1, most_workers)))
    return Request(
        grid=grid,
        subject=subject,
        dataset=Dataset(
            loader=subject.name,
            paths=(),
            n_cells=epoch.n_rows or 0,
            labels={},
            batch_size=epoch.batch_size,
            unit=epoch.unit,
        ),
        labels=(),
        plans=LoaderPlans(subject),
        space=Space.of(),
        # The timer knows the limit: workers take memory, and buffers hardly any.
        constraints=Constraints(
            entropy_floor=0.0, memory_bytes=_ANY_NUMBER, need_cells_per_second=None
        ),
        files=(),
        n_cells=_ANY_NUMBER,
        cache="warm",
        batch_size=epoch.batch_size * per_round,
        budget=budget,
        seed=seed,
        study=None,
        step=None,
        ranks=Ranks(),
    )


# What was found.


def _completed(
    result: AutotuneResult,
    timer: LoaderTimer,
    loader: DataLoader[Any],
    *,
    label: str,
    memory_bytes: int,
) -> AutotuneResult:
    """Return a result with what the timer knows."""
    if counts := list(timer.n_by_label.values()):
        bits = theory.entropy_bits(counts)
        census = LabelCensus(n_labels=len(counts), n_missing=0, label_entropy_bits=bits)
        result = replace(result, dataset=replace(result.dataset, labels={label: census}))
    constraints, chosen = replace(result.constraints, memory_bytes=memory_bytes), result.recommended
    if chosen is not None:
        waiting = timer.waiting(chosen.configuration)
        if waiting is not None:
            step_seconds = timer.step_seconds(chosen.configuration) or 0.0
            constraints = replace(constraints, step_seconds=float(f"{step_seconds:.3g}"))
        reason = " ".join(filter(None, [chosen.reason, _gain(result, loader)]))
        chosen = replace(chosen, waiting=waiting, reason=reason)
    return replace(result, constraints=constraints, recommended=chosen)


def _gain(result: AutotuneResult, loader: DataLoader[Any]) -> str:
    """Return how the DataLoader as it was compares with the recommended settings, in words."""
    own = [
        each
        for each in result.configurations
        if each is not result.chosen
        and all(getattr(loader, n) == value for n, value in each.configuration.items())
    ]
    ratio = own[0].relative if own else None
    if ratio is None or is_unknown(ratio):
        return ""
    has = "had" if own[0].cells_per_second else "is predicted to have"
    return f"As it was ({own[0].configuration}), it {has} {times(ratio)} this throughput."


def _print(result: AutotuneResult) -> None:
    from cellfeed_tuner._reports._text import print_report  # noqa: PLC0415 - loads Jinja and Rich

    print_report(result, Path())


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out warnings about numbers of workers that are tried, and about what all workers do."""
    with warnings.catch_warnings():
        for message in (
            "This DataLoader will create",
            "'pin_memory' argument is set",
            "Length of IterableDataset",
            "This process .* is multi-threaded, use of fork",
            "You are trying to `self.log",  # of a step of Lightning, on a copy of its model
        ):
            warnings.filterwarnings("ignore", message=message)
        yield
