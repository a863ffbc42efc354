"""The `autotune` function: a request, its phases, a result."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from cellfeed import CellDataset, Collection, ParameterError, SamplingStrategy
from cellfeed_tuner._constants import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_BUDGET_SECONDS,
    DEFAULT_ENTROPY_FLOOR,
    DEFAULT_FETCH_FACTORS,
)
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import MakeDataset, Step
from cellfeed_tuner._request import Request, collection_request, loader_request
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult
from cellfeed_tuner._run import Run
from cellfeed_tuner._subject import Tunable
from cellfeed_tuner._time_budget import Progress, TimeBudget, silent
from cellfeed_tuner._together import on_rank_zero

if TYPE_CHECKING:  # it loads Optuna
    import optuna


def autotune(
    subject: Collection | Tunable,
    *,
    label: str | Sequence[str] = (),
    batch_size: int = 64,
    block_sizes: Sequence[int] = DEFAULT_BLOCK_SIZES,
    fetch_factors: Sequence[int] = DEFAULT_FETCH_FACTORS,
    workers: Sequence[int] | None = None,
    num_threads: Sequence[int] = (),
    align: Sequence[Literal["chunks"] | None] = (),
    dense: bool = False,
    budget: float = DEFAULT_BUDGET_SECONDS,
    entropy_floor: float = DEFAULT_ENTROPY_FLOOR,
    memory: int | None = None,
    need: float | None = None,
    step_seconds: float | None = None,
    step: Step | None = None,
    cache: CacheState | None = None,
    seed: int = 0,
    study: "str | optuna.Study | None" = None,
    indices: ArrayLike | str | None = None,
    strategy: SamplingStrategy | None = None,
    make_dataset: MakeDataset = CellDataset,
    ranks: int | Sequence[int] | None = None,
    on_progress: Progress = silent,
) -> AutotuneResult:
    """Measure configurations of a loader, and recommend one for this machine.

    Entropy comes first. It is computed for the whole grid from the labels alone; a configuration
    counts as mixed as its least mixed label, relative to random sampling. Then throughput is
    measured in two steps. Profile: each pair of block size and fetch factor that mixes well enough
    and fits in memory is timed once without workers, as far as half of the budget allows, and the
    best of them with each number of workers. Compare: the fastest and those that may surpass it are
    timed in turns, until one leads or the budget is spent; a draw is reported as undecided. What
    was not timed is predicted from its neighbours.

    A space of more than 2,000 configurations, as ranges give, is searched from a coarse grid, and
    then around the fastest.

    The search is an Optuna study: a configuration is a trial, each turn a step of it, and
    Wilcoxon's test drops what is clearly slower. When it is over, it is kept as a journal in the
    user's cache folder, which Optuna's plots and dashboard open.

    The rows of every minibatch are compared with the plan, and their labels with the collection's.
    Some cells are read again through h5py or zarr and compared value by value. If anything differs,
    nothing is recommended, and `AutotuneResult.loader_fault` says what.

    Of files on servers, the number of fetches to read ahead (``prefetch``) is chosen too, by the
    same search among depths of 1 to 16: of those that are as fast as any, the one that takes the
    least memory.

    If several ranks call this, as under torchrun, rank 0 measures and all return its result. It
    measures one process for each rank of this machine, side by side: each reads its part of the
    epoch with its share of the cores, and waits for the slowest after each round. Figures are of
    all these processes together.

    For another loader (`Tunable`), entropy is computed if the loader has a plan. Otherwise it is
    measured with the throughput, from the labels that the loader delivers; a configuration that
    mixes too little then also rules out larger blocks and smaller fetches. Its cells are not
    compared with files, its results are not kept, and its bottleneck is not known.

    Parameters
    ----------
    subject
        A collection, opened with the labels as ``obs``, that cellfeed reads; or another loader,
        which has its own labels, batch size and settings.
    label
        The obs column to mix minibatches by, or several. Tables and plots show the first.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid; a `range` stands for all its integers. ``workers=None`` means 0 and the powers of
        two up to the usable cores, and 0 for files on servers, where concurrent requests hide
        latency.
    num_threads, align
        Further settings to choose from: threads of each reading process, and whether blocks end
        where chunks do, such as ``align=(None, "chunks")``; see `cellfeed.CellDataset` and
        `cellfeed.BlockShuffling`. If empty, the loader's defaults.
    dense
        Whether minibatches are made dense, as for most models; see `cellfeed.CellDataset`.
    budget
        Seconds to spend in total. At least half of it is for measuring: what comes before
        (entropy, compiling on first use) counts for the other half at most. A run ends with an
        answer at most 2 seconds, or 5 % of the budget, after it; see `Recommended.basis`.
    entropy_floor
        Least entropy, as a share of true random sampling's, 0 to 1.
    memory
        Bytes that the process and its workers may take; what is available now if None.
    need
        Throughput that suffices, in cells per second; the best mixed configuration that has it is
        chosen. The fastest one if None.
    step_seconds
        How long training computes on a minibatch, in place of ``need``. The best mixed
        configuration that keeps up is chosen, or the fastest if none does, and measured in such a
        loop.
    step
        A training step in place of ``step_seconds``. It is pickled to the measuring process and
        called there with each minibatch; make the model in the first call. Its duration is
        measured first.
    cache
        State of the page cache: "cold" (the default), as for a collection larger than memory, or
        "warm". Files on servers are always "remote", since their caches are not under control.
    seed
        Seed of the plans and of the order of measurements.
    study
        Where the search is written while it runs, as trials in seconds per cell: the URL of a
        storage of Optuna, which its dashboard shows; or a study, to be minimized, whose sampler
        then proposes what is timed next, and whose pruner drops configurations.
    indices
        Rows that training will visit, or a query that selects them (see
        `cellfeed.Collection.where`); all if None.
    strategy
        How training will visit cells, such as ``ClassBalancedSampling("cell_type")``; shuffled
        blocks if None. ``block_sizes`` replace its own block size: of a strategy of sets, those
        that divide a set; of one without blocks, none. Entropy is relative to random sampling with
        the strategy's label frequencies or, of sets, to minibatches of random sets.
    make_dataset
        Makes the dataset, in place of `CellDataset`, in another process: a subclass or a function
        that a module defines, such as ``functools.partial(CellDataset, transform=[Log1p()])``.
        Transformed values are not compared with the files, and the results are not kept.
    ranks
        How many ranks of this machine to choose for; this process then measures by itself. If
        None, those of torchrun's environment variables, and all ranks have to call this with the
        same arguments; 1 if the variables are not set. Several numbers, such as ``range(1, 9)``,
        ask how many ranks are fed, each with a training step of ``step_seconds`` or as long as
        ``step``: the fastest configuration for the fewest is chosen, one and two ranks are measured
        with it, and `AutotuneResult.scaling` has the utilization of each number.
    on_progress
        Called with a stage, how much of it is done, of how much, and what is being done: the
        configuration that is timed, and the fastest so far.

    Raises
    ------
    ColumnError
        A label was not opened, has fewer than two values, or nearly as many values as cells; or a
        query names a column that does not exist.
    ParameterError
        A value is out of range, arguments contradict each other, the collection is too small to
        time any configuration, the cache state cannot be had, no row is selected, the strategy
        does not fit the collection, ``step`` fails, or a `Tunable` cannot be imported by the
        measuring process or delivers other minibatches than it declares.
    FormatError
        A file is damaged.
    RemoteError
        A server does not deliver.
    MeasuringError
        The measuring process died, or a rank did not call this or has ended.
    AutotuneInterrupted
        Ctrl-C, after something was measured. ``result`` of this `KeyboardInterrupt` is what was
        found by then; later runs do not use it.
    """
    settings = locals()
    del settings["subject"]
    return tuned(subject, **settings | {"budget": TimeBudget(budget)})


@on_rank_zero
def tuned(
    subject: Collection | Tunable,
    *,
    budget: TimeBudget,
    process: MeasuringProcess | None = None,
    request: Request | None = None,
    **options: Any,
) -> AutotuneResult:
    """Do what `autotune` does, within a budget and in a process that may have begun before.

    ``request`` is what was made of the same arguments, if they were checked before.
    """
    settings = {name: each.default for name, each in _PARAMETERS.items()} | options
    if request is None:
        request = request_of(subject, options | {"budget": budget.seconds})
    with MeasuringProcess() if process is None else nullcontext(process) as measuring:
        measuring.subject = request.subject  # its imports go on meanwhile
        run = Run(
            request=request,
            process=measuring,
            budget=budget,
            on_progress=settings["on_progress"],
            make_dataset=settings["make_dataset"],
        )
        run.prepare()
        run.start()
        run.search()
    result = run.result(settings["strategy"])
    if run.interrupted:
        raise AutotuneInterrupted(result)
    return result


def request_of(subject: Collection | Tunable, options: Mapping[str, Any]) -> Request:
    """Return the request that arguments of `autotune` make, or raise what it raises.

    A name that is no argument of `autotune` is a `TypeError`.
    """
    defaults = {name: each.default for name, each in _PARAMETERS.items()}
    if unknown := options.keys() - defaults.keys():
        msg = f"autotune() got an unexpected keyword argument {min(unknown)!r}"
        raise TypeError(msg)
    settings = {**defaults, **options}
    common = {n: each for n, each in settings.items() if n not in {*_OF_COLLECTION, *_OF_RUN}}
    if not isinstance(subject, Tunable):
        return collection_request(subject, **{n: settings[n] for n in _OF_COLLECTION}, **common)
    for name in (*_OF_COLLECTION, "make_dataset"):
        if settings[name] is not defaults[name]:
            msg = f"`{name}` is for collections; {subject.name} has its own"
            raise ParameterError(msg)
    return loader_request(subject, **common)


_PARAMETERS = inspect.signature(autotune).parameters
_OF_COLLECTION = (
    "label", "indices", "strategy", "batch_size", "block_sizes", "fetch_factors",
    "workers", "num_threads", "align", "dense",
)  # fmt: skip
_OF_RUN = ("subject", "on_progress", "make_dataset")
