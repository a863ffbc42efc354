"""The search: entropy first, which needs no I/O, then time for what could be chosen."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from cellfeed import CellDataset, Collection, ParameterError
from cellfeed.machine import usable_memory_bytes
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._defaults import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_BUDGET_SECONDS,
    DEFAULT_ENTROPY_FLOOR,
    DEFAULT_FETCH_FACTORS,
)
from cellfeed_tuner._explain._explained import Explained, explain_throughput
from cellfeed_tuner._explain._storage_advice import StorageLayout
from cellfeed_tuner._grid import default_workers
from cellfeed_tuner._history._earlier_run import Asked
from cellfeed_tuner._history._notes import Notes
from cellfeed_tuner._history._recall import Recollection
from cellfeed_tuner._interruption import AutotuneInterrupted, interrupts_held_back
from cellfeed_tuner._machine._busy import Busy
from cellfeed_tuner._machine._description import describe_machine
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._checks import check_cache, check_labels, check_size
from cellfeed_tuner._measuring._labels import names_of
from cellfeed_tuner._measuring._measure import Measurement, prepare_cache
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._measuring._timing import MakeDataset
from cellfeed_tuner._mixing import Label, Mixing
from cellfeed_tuner._planning._cost_model import Geometry
from cellfeed_tuner._planning._recommend import Choice, choose, nearest
from cellfeed_tuner._planning._space import Space
from cellfeed_tuner._progress import Progress, RaceWatcher, silent, unwatched
from cellfeed_tuner._results._autotune_result import AutotuneResult, Ranges
from cellfeed_tuner._results._configuration_result import ConfigurationResult
from cellfeed_tuner._results._dataset import describe_dataset
from cellfeed_tuner._results._recommended import Constraints, Recommended, Waiting
from cellfeed_tuner._searching._measurements import Measurements
from cellfeed_tuner._searching._requirements import Requirements
from cellfeed_tuner._searching._search import Search
from cellfeed_tuner._searching._time_budget import TimeBudget

if TYPE_CHECKING:  # it loads Optuna
    from cellfeed_tuner._planning._proposals import Proposals

__all__ = ["autotune"]

# Shares of the budget: for finding the bottleneck, and at least for throughput.
_EXPLAIN_SHARE, _LEAST_THROUGHPUT_SHARE = 0.1, 0.25


def autotune(
    collection: Collection,
    *,
    label: str | Sequence[str],
    given: str | None = None,
    batch_size: int = 64,
    block_sizes: Sequence[int] = DEFAULT_BLOCK_SIZES,
    fetch_factors: Sequence[int] = DEFAULT_FETCH_FACTORS,
    workers: Sequence[int] | None = None,
    budget: float = DEFAULT_BUDGET_SECONDS,
    entropy_floor: float = DEFAULT_ENTROPY_FLOOR,
    memory: int | None = None,
    need: float | None = None,
    step_seconds: float | None = None,
    cache: CacheState = "cold",
    seed: int = 0,
    fresh: bool = False,
    indices: ArrayLike | str | None = None,
    make_dataset: MakeDataset = CellDataset,
    on_progress: Progress = silent,
    on_race: RaceWatcher = unwatched,
) -> AutotuneResult:
    """Measure a grid of configurations, or proposals from ranges, and recommend one.

    Entropy is computed for the whole grid from the labels alone; a configuration is as mixed as
    the label that it mixes least, against random sampling. Then throughput is measured:
    of a few configurations, from which a cost model ranks the others; of those that promise
    more; then of the few that may be the best, in turns, until it is clear which is, or the
    budget is spent. What these turns do not tell apart is said to be undecided.

    Where there are more than 2,000 configurations, as in ranges, a coarse grid of them comes
    first, and an Optuna study proposes more, by what the cost model expects of them. What is
    known to miss a constraint is not timed there either.

    Rows of all minibatches are compared with the plan, and their labels with the collection's; some
    cells are read once more through h5py or zarr, and compared value by value. Where anything is
    not as it should be, nothing is recommended, and `AutotuneResult.loader_fault` says what.

    What is found is kept in the user's cache folder. A later run on the same machine, data and
    versions measures a few of these configurations again; if they still relate to each other as
    they did, it looks at little else. All figures are its own.

    Parameters
    ----------
    collection
        What is read, opened with the labels as ``obs``.
    label
        The obs column that minibatches should be mixed by, or several. The first is what tables
        and pictures show.
    given
        Another obs column: how well the first label is mixed within each of its values (the
        plate within the cell line) is computed too.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid. Workers are 0 and the powers of two up to the usable cores if None. A `range`
        stands for all integers in it.
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
    cache
        "cold" measures what a collection larger than memory gives, "warm" one that is cached.
    seed
        Seed of plans and of the order of measurements.
    fresh
        Whether to ignore what earlier runs found; this one is kept all the same.
    indices
        The rows that training will visit, such as those of a training set, or a query that they
        fulfil (see `cellfeed.Collection.where`); all rows if None. Labels, throughput and the
        size of an epoch are then those of these rows.
    make_dataset
        Makes the data set that is measured, called as `CellDataset` is, in another process: a
        subclass, or a function of a module, but none that is defined in a notebook; such as
        ``functools.partial(CellDataset, transform=[Log1p()])``, whose values are not compared with
        those of the files. What others than `CellDataset` give is not kept for later runs.
    on_progress
        Called with how far the work has come.
    on_race
        Handed, before throughput is measured, what says how the race stands.

    Raises
    ------
    ColumnError
        The collection was opened without one of these columns, or it has fewer than two values, or
        nearly as many as there are cells; or a query names none.
    ParameterError
        A size is below what it may be, there is no label, ``given`` is one, the collection is
        too small to time anything, "warm" was asked of files that do not fit in memory, or
        ``indices`` are no rows, or a query that selects none.
    FormatError
        A file is damaged.
    MeasuringError
        The process in which configurations are timed has died.
    AutotuneInterrupted
        Ctrl-C came after something was measured, and ``result`` of this `KeyboardInterrupt` is
        what was found by then. Later runs do not rely on it.
    """
    started = time.perf_counter()
    date = datetime.now(UTC).astimezone()
    selected = Selected.of(collection, indices)
    labels, within = _labels(selected, label, given)
    names = [each.name for each in labels]
    space = Space.of(block_sizes, fetch_factors, default_workers() if workers is None else workers)
    grid = space.coarse_grid() if space.is_large else space.grid()
    constraints = _constraints(entropy_floor, memory, need, step_seconds, batch_size, budget)
    check_size(collection if selected.indices is None else selected, grid, batch_size)
    check_cache(collection, cache)
    on_progress("machine", 0, 1)
    machine = describe_machine(collection.files)
    with MeasuringProcess(selected) as process:  # its imports go on beside the next lines
        mixing = Mixing(
            labels, within, batch_size=batch_size, seed=seed, entropy_floor=entropy_floor
        )
        mixing.replay(grid, on_progress)
        order = mixing.storage_order(space.block_sizes[-1])
        found_cache = prepare_cache(collection.files, cache)
        asked = _asked(space, names, batch_size, found_cache, budget, entropy_floor)
        notes = Notes.of(selected, names[0], machine, asked, date)
        is_usual = make_dataset is CellDataset
        recollection = notes.recollection() if is_usual and not fresh else Recollection.ignored()
        grid = list(dict.fromkeys([*grid, *recollection.trials_in(space)]))
        on_progress("start", 0, 1)
        process.start()
        proposals = _proposals(space, grid, seed) if space.is_large else None
        search = Search(
            measurements=Measurements(
                process=process,
                labels=names,
                given=given,
                batch_size=batch_size,
                cache=cache,
                seed=seed,
                budget=TimeBudget(
                    max(
                        _LEAST_THROUGHPUT_SHARE * budget,
                        (1 - _EXPLAIN_SHARE) * budget - _since(started),
                    )
                ),
                on_progress=on_progress,
                make_dataset=make_dataset,
            ),
            requirements=Requirements(
                n_cells=len(selected),
                row_bytes=collection.mean_row_bytes(),
                batch_size=batch_size,
                constraints=constraints,
                entropies=mixing,
            ),
            geometry=_geometry(selected),
            on_race=on_race,
            recollection=recollection,
            proposals=proposals,
        )

        def explain(recommended: Recommended) -> Explained:
            on_progress("explain", 0, 1)
            return explain_throughput(
                process,
                recommended.configuration,
                _layout(selected, batch_size, already_shuffled=order.already_shuffled),
                cells_per_second=recommended.cells_per_second.value,
                step_seconds=step_seconds,
                block_sizes=space.block_sizes,
                cache=cache if found_cache == cache else "warm",  # nothing is known of the disk
                seconds=_EXPLAIN_SHARE * budget,
                most_seconds=max(_EXPLAIN_SHARE * budget, budget - _since(started)),
                seed=seed,
            )

        found = _found(
            search,
            grid,
            collection,
            explain=explain,
            notes=notes if is_usual else None,
        )
    faults, recommended = search.measurements.faults, found.recommended
    result = AutotuneResult(
        machine=machine,
        dataset=describe_dataset(
            selected, {each.name: each.counted for each in labels}, batch_size
        ),
        constraints=constraints,
        cache=found_cache,
        configurations=tuple(
            mixing.judged(
                each,
                faults.get(each.configuration),
                search.measurements.entropy_within(each.configuration),
            )
            for each in found.results
        ),
        recommended=recommended,
        nearest=None if recommended or faults else nearest(found.results, constraints),
        loader_fault=next((f"{each}: {fault}" for each, fault in faults.items()), None),
        n_cells_compared=found.n_cells_compared,
        seconds=_since(started),
        busy=Busy.of(search.measurements.others),
        replicate_spread=search.measurements.replicate_spread,
        date=date,
        storage_order=order,
        earlier=search.earlier,
        entropy_over_epoch=mixing.over_epoch(recommended.configuration) if recommended else {},
        bottleneck=found.explained.bottleneck,
        storage_advice=found.explained.storage_advice,
        ranges=None if proposals is None else _ranges(space, proposals),
        interrupted=found.interrupted,
    )
    if found.interrupted:
        raise AutotuneInterrupted(result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a search and all that follows have found, or have until Ctrl-C came."""

    results: list[ConfigurationResult]
    recommended: Recommended | None
    explained: Explained
    n_cells_compared: int
    interrupted: bool


def _found(
    search: Search,
    grid: Sequence[Configuration],
    collection: Collection,
    *,
    explain: Callable[[Recommended], Explained],
    notes: Notes | None,
) -> _Found:
    """Search, compare what came out with the files, explain the choice, and keep it all."""
    measurements, constraints = search.measurements, search.requirements.constraints

    def results() -> list[ConfigurationResult]:
        # Of ranges, only what was measured is shown.
        is_listed = search.proposals is None or not search.timed
        return search.results(grid if is_listed else search.timed)

    recommended, explained, n_cells_compared = None, Explained(), 0
    interrupted = False
    try:
        search.run(grid)
        search.survey()
        choice = choose(results(), constraints, search.turns)
        recommended = choice and _recommended(
            choice, search.with_step(choice), constraints, measurements
        )
        n_cells_compared = measurements.compare_with_files(collection)
        if recommended is not None and not measurements.faults:
            explained = explain(recommended)
        with interrupts_held_back():
            if notes is not None and not measurements.faults:
                notes.keep(measurements.by_replicate(), recommended, is_short=search.is_short)
    except KeyboardInterrupt:
        if not len(measurements):
            raise
        interrupted = True
    if interrupted and recommended is None:
        choice = choose(results(), constraints, search.turns)
        recommended = choice and _recommended(choice, None, constraints, measurements)
    return _Found(
        results=results(),
        recommended=None if measurements.faults else recommended,
        explained=explained,
        n_cells_compared=n_cells_compared,
        interrupted=interrupted,
    )


def _since(started: float) -> float:
    return time.perf_counter() - started


def _geometry(selected: Selected) -> Geometry:
    return Geometry(
        n_cells=len(selected),
        rows_per_chunk=selected.rows_per_chunk,
        n_files=len(selected.collection.locations),
    )


def _layout(selected: Selected, batch_size: int, *, already_shuffled: bool) -> StorageLayout:
    return StorageLayout(
        n_cells=len(selected),
        rows_per_chunk=selected.rows_per_chunk,
        batch_size=batch_size,
        already_shuffled=already_shuffled,
    )


def _labels(
    selected: Selected, label: str | Sequence[str], given: str | None
) -> tuple[list[Label], Label | None]:
    names = names_of(label)
    if not names:
        msg = "`label` must name at least one obs column, but got none"
        raise ParameterError(msg)
    if given in names:
        msg = f"`given` must be an obs column beside the labels, but got {given!r}, which is one"
        raise ParameterError(msg)
    labels = [Label.of(selected, name) for name in names]
    within = None if given is None else Label.of(selected, given)
    for each in [*labels, within]:
        if each is not None:
            check_labels(each.counted, each.name, selected.collection)
    return labels, within


def _asked(
    space: Space,
    labels: Sequence[str],
    batch_size: int,
    cache: str,
    budget: float,
    entropy_floor: float,
) -> Asked:
    return Asked(
        label=labels[0],
        further_labels=tuple(labels[1:]),
        batch_size=batch_size,
        cache=cache,
        budget=budget,
        entropy_floor=entropy_floor,
        block_sizes=space.block_sizes,
        fetch_factors=space.fetch_factors,
        workers=space.workers,
    )


def _proposals(space: Space, grid: Sequence[Configuration], seed: int) -> "Proposals":
    # Not above, since who imports this need not wait for Optuna, which only this needs.
    from cellfeed_tuner._planning._proposals import Proposals  # noqa: PLC0415

    return Proposals(space, known=grid, seed=seed)


def _ranges(space: Space, proposals: "Proposals") -> Ranges:
    ends = [(sizes[0], sizes[-1]) for sizes in space.domains.values()]
    return Ranges(
        block_sizes=ends[0],
        fetch_factors=ends[1],
        workers=ends[2],
        n_configurations=space.size,
        n_considered=proposals.n_considered,
    )


def _constraints(
    entropy_floor: float,
    memory: int | None,
    need: float | None,
    step_seconds: float | None,
    batch_size: int,
    budget: float,
) -> Constraints:
    if not 0 <= entropy_floor <= 1:
        msg = f"`0 <= entropy_floor <= 1` must hold, but got entropy_floor={entropy_floor}"
        raise ParameterError(msg)
    if need is not None and step_seconds is not None:
        msg = f"give need={need} or step_seconds={step_seconds}, not both"
        raise ParameterError(msg)
    positive = {"memory": memory, "need": need, "step_seconds": step_seconds, "budget": budget}
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            msg = f"`0 < {name} < infinity` must hold, but got {name}={value}"
            raise ParameterError(msg)
    return Constraints(
        entropy_floor=entropy_floor,
        memory_bytes=usable_memory_bytes() if memory is None else memory,
        need_cells_per_second=need if step_seconds is None else batch_size / step_seconds,
        step_seconds=step_seconds,
    )


def _recommended(
    choice: Choice,
    stepped: Measurement | None,
    asked: Constraints,
    measurements: Measurements,
) -> Recommended:
    reason = choice.reason
    if choice.result.status != "measured":
        reason += (
            f" This rests on {choice.result.n_rounds} whole fetches per worker, which are few."
        )
    return Recommended(
        configuration=choice.result.configuration,
        cells_per_second=choice.speed,
        measured_in_turns=measurements.is_from_turns(choice.result.configuration),
        peak_memory_bytes=choice.result.peak_memory_bytes or 0,
        reason=reason,
        waiting=_waiting(choice.speed.value, stepped, asked),
        rivals=choice.rivals,
    )


def _waiting(
    cells_per_second: float, stepped: Measurement | None, asked: Constraints
) -> Waiting | None:
    if asked.step_seconds is None or asked.need_cells_per_second is None:
        return None
    return Waiting(
        share=stepped.waiting_share if stepped else None,
        n_rounds=len(stepped.round_seconds) if stepped else 0,
        expected_share=max(0.0, 1 - cells_per_second / asked.need_cells_per_second),
    )
