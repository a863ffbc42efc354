"""The search: entropy first, which needs no I/O, then time for what could be chosen."""

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from cellfeed import CellDataset, Collection, ParameterError, SamplingStrategy
from cellfeed_tuner._constants import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_BUDGET_SECONDS,
    DEFAULT_ENTROPY_FLOOR,
    DEFAULT_FETCH_FACTORS,
    DEFAULT_SAMPLER,
)
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._timing import MakeDataset, Step
from cellfeed_tuner._progress import Progress, silent
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._request import collection_request, loader_request
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult
from cellfeed_tuner._run import Run
from cellfeed_tuner._subject._tunable import Tunable
from cellfeed_tuner._together._tuned_once import tuned_once

if TYPE_CHECKING:  # it loads Optuna
    from optuna.samplers import BaseSampler

__all__ = ["autotune"]


@tuned_once
def autotune(
    subject: Collection | Tunable,
    *,
    label: str | Sequence[str] = (),
    given: str | None = None,
    batch_size: int = 64,
    block_sizes: Sequence[int] = DEFAULT_BLOCK_SIZES,
    fetch_factors: Sequence[int] = DEFAULT_FETCH_FACTORS,
    workers: Sequence[int] | None = None,
    num_threads: Sequence[int] = (),
    align: Sequence[Literal["chunks"] | None] = (),
    budget: float = DEFAULT_BUDGET_SECONDS,
    entropy_floor: float = DEFAULT_ENTROPY_FLOOR,
    memory: int | None = None,
    need: float | None = None,
    step_seconds: float | None = None,
    step: Step | None = None,
    cache: CacheState | None = None,
    seed: int = 0,
    sampler: "str | BaseSampler" = DEFAULT_SAMPLER,
    fresh: bool = False,
    indices: ArrayLike | str | None = None,
    strategy: SamplingStrategy | None = None,
    make_dataset: MakeDataset = CellDataset,
    ranks: int | None = None,
    on_progress: Progress = silent,
) -> AutotuneResult:
    """Measure a grid of configurations, or proposals from ranges, and recommend one.

    Entropy is computed for the whole grid from the labels alone; a configuration is as mixed as
    the label that it mixes least, against random sampling. Then throughput is measured: of a few
    configurations of which a cost model expects most; then of two at a time, what is likeliest to
    be the best and what may surpass it by most, in turns, until it is clear which is, or the
    budget is spent. What these turns do not tell apart is said to be undecided.

    Where there are more than 2,000 configurations, as in ranges, a coarse grid of them comes
    first, and then what lies around the likeliest. What is known to miss a constraint is not timed.

    Each search is an Optuna study: a configuration is a trial, each look at it an intermediate
    value, and what drops out of the race is pruned. Later runs, and Optuna's plots and dashboard,
    find it in a journal in the user's cache folder.

    Rows of all minibatches are compared with the plan, and their labels with the collection's; some
    cells are read once more through h5py or zarr, and compared value by value. Where anything is
    not as it should be, nothing is recommended, and `AutotuneResult.loader_fault` says what.

    Of files on servers, how many fetches are read ahead (``prefetch``) is chosen too: with the
    configuration that was, depths of 1 to 16 are measured in turns. Fewer are chosen where more
    cannot be told to be faster. Where the time of a cell goes is not looked at there.

    What is found is kept in the user's cache folder. A later run on the same machine, data and
    versions measures a few of these configurations again; if they still relate to each other as
    they did, it looks at little else. All figures are its own.

    Of several ranks that call it, such as those that torchrun starts, the first measures, and all
    return its result. As many processes as there are ranks on this machine read side by side then,
    each its part of the epoch, with its share of the cores; in step, so that all wait for the
    slowest. Figures are of these together. Ranks of other machines wait for the result.

    Of another loader, a `Tunable`, entropy is computed where the loader has a plan, and else
    measured with the throughput, from the labels of what it delivers: what mixes too little, and
    what has no smaller blocks and no larger fetches than that, is then left out. What it delivers
    is not compared with any files, no earlier result is looked at and none kept, and where its time
    goes is not known.

    Parameters
    ----------
    subject
        What is read by cellfeed, opened with the labels as ``obs``; or another loader, which has
        labels, a batch size and settings of its own.
    label
        The obs column that minibatches should be mixed by, or several. The first is what tables
        and pictures show.
    given
        Another obs column: how well the first label is mixed within each of its values (the
        plate within the cell line) is computed too.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid. Workers are 0 and the powers of two up to the usable cores if None, and 0 alone
        of files on servers, where requests side by side hide latency. A `range` stands for all
        integers in it.
    num_threads, align
        Further settings to choose: threads of each process that reads, and whether blocks end
        where chunks do, such as ``align=(None, "chunks")``; see `cellfeed.CellDataset` and
        `cellfeed.BlockShuffling`. Left as they are where nothing is given.
    budget
        Seconds to spend, all in all; at least a quarter of them on throughput, however long the
        rest takes.
    entropy_floor
        Least entropy, as a share of true random sampling's, 0 to 1.
    memory
        Most bytes for the process and its workers; what is available now if None.
    need
        Cells per second that suffice; None for as many as possible.
    step_seconds
        How long training computes on a minibatch, instead of a need: the best mixed configuration
        that keeps up is chosen, the fastest if none does, and measured with such a loop.
    step
        A training step in place of ``step_seconds``: called with each minibatch in the measuring
        process, to which it is pickled, so that a model is best made when it is called first. How
        long it takes is measured before anything else, and the choice is measured with it.
    cache
        "cold", if None, measures what a collection larger than memory gives, "warm" one that is
        cached. Of files on servers it is "remote" and nothing else: their caches are not under
        control.
    seed
        Seed of plans and of the order of measurements.
    sampler
        What proposes configurations: "cost-model", which knows what reading costs; "tpe", "gp" or
        "random", Optuna's of these names; or any sampler of Optuna's. All propose nothing but what
        meets the constraints, and are told seconds per cell.
    fresh
        Whether to ignore what earlier runs found; this one is kept all the same.
    indices
        The rows that training will visit, such as those of a training set, or a query that they
        fulfil (see `cellfeed.Collection.where`); all rows if None. Labels, throughput and the
        size of an epoch are then those of these rows.
    strategy
        How training will visit cells, such as ``ClassBalancedSampling("cell_type")``; in shuffled
        blocks if None. Its own block size is not looked at: ``block_sizes`` are searched, of a
        strategy of sets those that divide a set, and of one without blocks none. Entropy is then
        held against random sampling of labels as often as the strategy draws them, or, of sets,
        against minibatches of random sets.
    make_dataset
        Makes the data set that is measured, called as `CellDataset` is, in another process: a
        subclass, or a function of a module, but none that is defined in a notebook; such as
        ``functools.partial(CellDataset, transform=[Log1p()])``, whose values are not compared with
        those of the files. What others than `CellDataset` give is not kept for later runs.
    ranks
        How many ranks of this machine the choice is for, which are measured by this process alone.
        If None, those that ``WORLD_SIZE`` and the other variables of torchrun say, all of which
        have to call this alike; one where these are not set.
    on_progress
        Called with how far the work has come.

    Raises
    ------
    ColumnError
        The collection was opened without one of these columns, or it has fewer than two values, or
        nearly as many as there are cells; or a query names none.
    ParameterError
        A size is below what it may be, there is no label, ``given`` is one, the collection is
        too small to time anything, "warm" was asked of files that do not fit in memory, a state
        of caches of files on servers, or
        ``indices`` are no rows, or a query that selects none; the strategy does not fit the
        collection or the batch size, has rows of its own beside ``indices``, or is one of sets
        that no block size divides; ``step`` fails; or another loader is given with what it has by
        itself, cannot be imported by the measuring process, or delivers other minibatches than it
        says.
    FormatError
        A file is damaged.
    RemoteError
        A server does not give what is asked for.
    MeasuringError
        The process in which configurations are timed has died; or a rank did not call this, or
        has ended.
    AutotuneInterrupted
        Ctrl-C came after something was measured, and ``result`` of this `KeyboardInterrupt` is
        what was found by then. Later runs do not rely on it.
    """
    started = time.perf_counter()
    of_collection: dict[str, Any] = {
        "label": label,
        "given": given,
        "indices": indices,
        "strategy": strategy,
        "batch_size": batch_size,
        "block_sizes": block_sizes,
        "fetch_factors": fetch_factors,
        "workers": workers,
        "num_threads": num_threads,
        "align": align,
    }
    common: dict[str, Any] = {
        "budget": budget,
        "entropy_floor": entropy_floor,
        "memory": memory,
        "need": need,
        "step_seconds": step_seconds,
        "step": step,
        "cache": cache,
        "seed": seed,
        "sampler": sampler,
        "fresh": fresh,
        "make_dataset": make_dataset,
        "ranks": Ranks.of(ranks),
    }
    if isinstance(subject, Tunable):
        _require_usual(subject, of_collection | {"make_dataset": make_dataset})
        request = loader_request(subject, **common)
    else:
        request = collection_request(subject, **of_collection, **common)
    with MeasuringProcess[Any](request.subject) as process:  # its imports go on meanwhile
        run = Run(request=request, process=process, started=started, on_progress=on_progress)
        run.prepare()
        run.start()
        run.search()
    result = run.result(strategy)
    if run.interrupted:
        raise AutotuneInterrupted(result)
    return result


def _require_usual(tunable: Tunable, of_collection: Mapping[str, Any]) -> None:
    """Refuse what is said of a loader that has it by itself."""
    defaults = inspect.signature(autotune).parameters
    given = [name for name, value in of_collection.items() if value is not defaults[name].default]
    if given:
        msg = f"`{given[0]}` is for collections; {tunable.name} has its own"
        raise ParameterError(msg)
