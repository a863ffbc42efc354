"""The search: entropy first, which needs no I/O, then time for what could be chosen."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cellfeed import Collection, ColumnError, ParameterError
from cellfeed.machine import usable_cpu_count, usable_memory_bytes
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._label_counts import LabelCounts, count_labels
from cellfeed_tuner._entropy._label_entropy import LabelEntropy, label_entropy
from cellfeed_tuner._entropy._storage_order import storage_order
from cellfeed_tuner._history._earlier_run import Asked
from cellfeed_tuner._history._notes import Notes
from cellfeed_tuner._history._recall import Recollection
from cellfeed_tuner._machine._description import describe_machine
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._labels import label_codes
from cellfeed_tuner._measuring._measure import Measurement, cells_needed, prepare_cache
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._planning._cost_model import Geometry
from cellfeed_tuner._planning._recommend import Choice, choose, nearest
from cellfeed_tuner._progress import Progress, RaceWatcher, silent, unwatched
from cellfeed_tuner._result import (
    AutotuneResult,
    ConfigurationResult,
    Constraints,
    Dataset,
    EntropyBits,
    Recommended,
)
from cellfeed_tuner._search import Search
from cellfeed_tuner._verdicts._judge import Judge
from cellfeed_tuner._verdicts._verdict import convicted

__all__ = ["DEFAULT_BLOCK_SIZES", "DEFAULT_BUDGET_SECONDS", "DEFAULT_FETCH_FACTORS", "autotune"]

DEFAULT_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)
DEFAULT_BUDGET_SECONDS = 60.0
_MOST_WORKERS = 16
_ENTROPY_ROWS = 262_144
_WARM_SHARE_OF_MEMORY = 0.8
_LEAST_LABELS = 2


def autotune(
    collection: Collection,
    *,
    label: str,
    batch_size: int = 64,
    block_sizes: Sequence[int] = DEFAULT_BLOCK_SIZES,
    fetch_factors: Sequence[int] = DEFAULT_FETCH_FACTORS,
    workers: Sequence[int] | None = None,
    budget: float = DEFAULT_BUDGET_SECONDS,
    entropy_floor: float = 0.95,
    memory: int | None = None,
    need: float | None = None,
    cache: CacheState = "cold",
    seed: int = 0,
    fresh: bool = False,
    on_progress: Progress = silent,
    on_race: RaceWatcher = unwatched,
) -> AutotuneResult:
    """Measure a grid of configurations, and recommend one.

    Entropy is computed for the whole grid from the labels alone. Then throughput is measured:
    of a few configurations, from which a cost model ranks the others; of those that may be the
    best, again and again until that is clear; of the rest of the grid as far as time allows;
    last, afresh, of the choice.

    What is found is kept in the user's cache folder. A later run on the same machine, data and
    versions measures a few of these configurations again; if they still relate to each other as
    they did, it looks at little else. All figures are its own.

    Parameters
    ----------
    collection
        What is read, opened with ``obs=[label]``.
    label
        The obs column that minibatches should be mixed by.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid. Workers are 0 and the powers of two up to the usable cores if None.
    budget
        Seconds to spend on measuring.
    entropy_floor
        Least entropy, as a share of true random sampling's, 0 to 1.
    memory
        Most bytes for the process and its workers; what is available now if None.
    need
        Cells per second that suffice; None for as many as possible.
    cache
        "cold" measures what a collection larger than memory gives, "warm" one that is cached.
    seed
        Seed of plans and of the order of measurements.
    fresh
        Whether to ignore what earlier runs found; this one is kept all the same.
    on_progress
        Told how far the work has come.
    on_race
        Handed, before throughput is measured, what says how the race stands.

    Raises
    ------
    ColumnError
        The collection was opened without the label, or it has fewer than two values.
    ParameterError
        A size is below what it may be, the collection is too small to time anything, or "warm"
        was asked of files that do not fit in memory.
    FormatError
        A file is damaged.
    MeasuringError
        The process in which configurations are timed has died.
    """
    started = time.perf_counter()
    codes = label_codes(collection, label)
    counted = count_labels(codes)
    _check_labels(counted, label, collection)
    grid = _grid(block_sizes, fetch_factors, _default_workers() if workers is None else workers)
    constraints = _constraints(entropy_floor, memory, need, budget)
    _check_size(collection, grid, batch_size)
    _check_cache(collection, cache)
    on_progress("machine", 0, 1)
    machine = describe_machine(collection.files)
    with MeasuringProcess(collection) as process:  # its imports go on beside the next lines
        replayed = _replayed(codes, grid, batch_size, seed, on_progress)
        entropies = _entropies(counted, replayed, batch_size)
        order = storage_order(
            codes,
            batch_size=batch_size,
            block_size=max(each.block_size for each in grid),
            n_rows=_ENTROPY_ROWS,
            seed=seed,
        )
        found_cache = prepare_cache(collection, cache)
        asked = _asked(grid, label, batch_size, found_cache, budget, entropy_floor)
        notes = Notes.of(collection, codes, machine, asked)
        on_progress("start", 0, 1)
        process.start()
        search = Search(
            process=process,
            n_cells=len(collection),
            row_bytes=collection.mean_row_bytes(),
            geometry=Geometry(
                n_cells=len(collection),
                rows_per_chunk=collection.rows_per_chunk,
                n_files=len(collection.paths),
            ),
            label=label,
            batch_size=batch_size,
            cache=cache,
            seed=seed,
            budget=budget,
            constraints=constraints,
            entropies=entropies,
            on_progress=on_progress,
            on_race=on_race,
            recollection=Recollection.ignored() if fresh else notes.recollection(),
        )
        search.run(grid)
        if not search.is_short:
            search.fill()
        results = search.results(grid)
        choice = choose(results, constraints)
        recommended = choice and _recommended(choice, search.confirm(choice), need)
    notes.keep(search.measured(), recommended, is_short=search.is_short)
    judge = Judge(codes, counted, replayed, batch_size)
    return AutotuneResult(
        machine=machine,
        dataset=_describe(collection, label, counted, batch_size),
        constraints=constraints,
        cache=found_cache,
        configurations=tuple(_judged(each, judge, search.faults) for each in results),
        recommended=recommended,
        nearest=None if choice else nearest(results, constraints),
        seconds=time.perf_counter() - started,
        storage_order=order,
        earlier=search.earlier,
    )


def _check_labels(counted: LabelCounts, label: str, collection: Collection) -> None:
    n_labels = counted.counts.size
    if n_labels < _LEAST_LABELS:
        msg = (
            f"obs column {label!r} has {n_labels} value(s) in {collection.paths[0]}"
            f"{' and the other files' if len(collection.paths) > 1 else ''}, so there is nothing "
            "to mix; choose a label with at least two, such as the plate or the cell type"
        )
        raise ColumnError(msg)


def _check_size(collection: Collection, grid: Sequence[Configuration], batch_size: int) -> None:
    needed = min(cells_needed(configuration, batch_size) for configuration in grid)
    if needed > len(collection):
        msg = (
            f"the collection has {len(collection):,} cells, but even the smallest configuration "
            f"needs {needed:,} to be timed; give smaller batch, fetch or worker numbers"
        )
        raise ParameterError(msg)


def _default_workers() -> tuple[int, ...]:
    most = min(_MOST_WORKERS, usable_cpu_count())
    return (0, *(1 << power for power in range(most.bit_length())))


def _grid(
    block_sizes: Sequence[int], fetch_factors: Sequence[int], workers: Sequence[int]
) -> list[Configuration]:
    grid = [
        Configuration(block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers)
        for block_size, fetch_factor, num_workers in product(
            sorted(set(block_sizes)), sorted(set(fetch_factors)), sorted(set(workers))
        )
    ]
    if not grid:
        msg = "block sizes, fetch factors and workers must each have at least one value"
        raise ParameterError(msg)
    return grid


def _asked(
    grid: Sequence[Configuration],
    label: str,
    batch_size: int,
    cache: str,
    budget: float,
    entropy_floor: float,
) -> Asked:
    return Asked(
        label=label,
        batch_size=batch_size,
        cache=cache,
        budget=budget,
        entropy_floor=entropy_floor,
        block_sizes=tuple(sorted({each.block_size for each in grid})),
        fetch_factors=tuple(sorted({each.fetch_factor for each in grid})),
        workers=tuple(sorted({each.num_workers for each in grid})),
    )


def _constraints(
    entropy_floor: float, memory: int | None, need: float | None, budget: float
) -> Constraints:
    if not 0 <= entropy_floor <= 1:
        msg = f"`0 <= entropy_floor <= 1` must hold, but got entropy_floor={entropy_floor}"
        raise ParameterError(msg)
    for name, value in (("memory", memory), ("need", need), ("budget", budget)):
        if value is not None and not 0 < value < math.inf:
            msg = f"`0 < {name} < infinity` must hold, but got {name}={value}"
            raise ParameterError(msg)
    return Constraints(
        entropy_floor=entropy_floor,
        memory_bytes=usable_memory_bytes() if memory is None else memory,
        need_cells_per_second=need,
    )


def _check_cache(collection: Collection, cache: CacheState) -> None:
    size, available = _bytes_on_disk(collection), usable_memory_bytes()
    if cache == "warm" and size > _WARM_SHARE_OF_MEMORY * available:
        msg = (
            f"cache='warm' needs the files in memory, but they have {size / 1e9:.1f} GB "
            f"and {available / 1e9:.1f} GB are available; measure with cache='cold'"
        )
        raise ParameterError(msg)


def _bytes_on_disk(collection: Collection) -> int:
    return sum(path.stat().st_size for path in collection.files)


def _replayed(
    codes: NDArray[np.integer],
    grid: Sequence[Configuration],
    batch_size: int,
    seed: int,
    on_progress: Progress,
) -> list[LabelEntropy]:
    """Replay each (block size, fetch factor), for which nothing is read."""
    block_sizes = sorted({each.block_size for each in grid})
    fetch_factors = sorted({each.fetch_factor for each in grid})
    n_cells = len(block_sizes) * len(fetch_factors)
    return label_entropy(
        codes,
        batch_size=batch_size,
        block_sizes=block_sizes,
        fetch_factors=fetch_factors,
        n_rows=_ENTROPY_ROWS,
        seed=seed,
        on_progress=lambda done: on_progress("entropy", done, n_cells),
    )


def _entropies(
    counted: LabelCounts, replayed: Sequence[LabelEntropy], batch_size: int
) -> dict[tuple[int, int], EntropyBits]:
    """Return the entropy of each (block size, fetch factor), with what theory says of it."""
    counts = counted.counts
    random = theory.random_entropy_bits(counts, batch_size, n_missing=counted.n_missing)
    return {
        (each.block_size, each.fetch_factor): EntropyBits(
            measured=None,
            expected=each.bits,
            homogeneous=theory.expected_entropy_bits(
                counts, batch_size, each.block_size, each.fetch_factor
            ),
            lower_bound=theory.lower_bound_bits(counts, batch_size, each.block_size),
            upper_bound=theory.upper_bound_bits(counts, batch_size),
            random=random,
        )
        for each in replayed
    }


def _judged(
    result: ConfigurationResult, judge: Judge, faults: Mapping[Configuration, str]
) -> ConfigurationResult:
    if result.configuration in faults:
        return replace(result, verdict=convicted(faults[result.configuration]))
    measured = result.entropy_bits.measured
    if result.status != "measured" or measured is None:
        return result
    # The first round counts here too.
    return replace(
        result, verdict=judge.verdict(result.configuration, measured, result.n_rounds + 1)
    )


def _recommended(choice: Choice, fresh: Measurement | None, need: float | None) -> Recommended:
    speed, memory, reason = choice.speed, choice.result.peak_memory_bytes or 0, choice.reason
    if fresh is not None and fresh.cells_per_second is not None:
        speed, memory = fresh.cells_per_second, max(memory, fresh.peak_memory_bytes)
        if need is not None and speed.low < need:
            reason += " Measured afresh, it may give less than that."
    return Recommended(
        configuration=choice.result.configuration,
        cells_per_second=speed,
        measured_afresh=fresh is not None,
        peak_memory_bytes=memory,
        reason=reason,
    )


def _describe(collection: Collection, label: str, counted: LabelCounts, batch_size: int) -> Dataset:
    return Dataset(
        paths=tuple(str(path) for path in collection.paths),
        n_cells=len(collection),
        n_vars=collection.n_vars,
        layout=collection.layout,
        dtype=str(collection.dtype),
        bytes_on_disk=_bytes_on_disk(collection),
        rows_per_chunk=collection.rows_per_chunk,
        label=label,
        n_labels=counted.counts.size,
        n_missing=counted.n_missing,
        label_entropy_bits=theory.entropy_bits(counted.counts),
        batch_size=batch_size,
    )
