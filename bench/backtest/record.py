"""Measure a whole grid, in several interleaved runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

from bench.backtest.files import SCHEMA, RecordingFiles
from bench.backtest.recorder import Recorder, Request

from cellfeed import Collection, ParameterError
from cellfeed.machine import usable_memory_bytes
from cellfeed_tuner._choose import obstacle
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_ENTROPY_FLOOR,
    DEFAULT_FETCH_FACTORS,
)
from cellfeed_tuner._machine import describe_machine
from cellfeed_tuner._measuring._page_cache import (
    CacheState,
    cache_state,
    check_cache,
    prepare_cache,
)
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._mixing import Mixing
from cellfeed_tuner._recall import data_fingerprint, machine_fingerprint, versions_fingerprint
from cellfeed_tuner._request import check_size, default_workers
from cellfeed_tuner._result import to_plain
from cellfeed_tuner._results import describe_dataset
from cellfeed_tuner._searching._cost_model import MOST_LISTED, Space
from cellfeed_tuner._subject import BlockPlans, Label, Selected
from cellfeed_tuner._time_budget import Progress, silent

__all__ = ["Recording", "record"]

# The least a throughput is computed from, over all runs together.
_LEAST_ROUNDS = 8
# Facts that must be equal to continue a recording.
_SAME = (
    "fingerprints",
    "label",
    "batch_size",
    "block_sizes",
    "fetch_factors",
    "workers",
    "cache",
    "seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording, as far as it got.

    Parameters
    ----------
    path
        The CSV file; a JSON file of the same name lies beside it.
    n_configurations
        Size of the grid.
    n_runs
        How often each configuration that can be measured was measured.
    left_out
        Configurations that cannot be measured, and why.
    seconds
        Time spent measuring, including earlier calls.
    """

    path: Path
    n_configurations: int
    n_runs: int
    left_out: dict[Configuration, str]
    seconds: float


def record(
    collection: Collection,
    *,
    label: str,
    output: Path | str,
    runs: int = 3,
    batch_size: int = 64,
    block_sizes: Sequence[int] = DEFAULT_BLOCK_SIZES,
    fetch_factors: Sequence[int] = DEFAULT_FETCH_FACTORS,
    workers: Sequence[int] | None = None,
    memory: int | None = None,
    cache: CacheState | None = None,
    seed: int = 0,
    note: str = "",
    on_progress: Progress = silent,
) -> Recording:
    """Measure every configuration of a grid, to replay searches on it; see `replay`.

    The grid is measured once per run, each time in another random order, so that changes of the
    machine's load affect all configurations alike. Each row is written as soon as it is measured:
    the same call continues an interrupted recording, and a call with more runs adds to it.

    Parameters
    ----------
    collection
        The collection, opened with ``obs=[label]``.
    label
        The obs column that minibatches should mix.
    output
        The CSV file to write, one row per run of a configuration: ``run``,
        ``block_size``, ``fetch_factor``, ``num_workers``, ``cells_per_second``,
        ``entropy_bits`` (expected, from the plan over the labels), ``n_rounds``,
        ``round_spread`` (standard deviation of the rounds' times, relative) and
        ``peak_memory_bytes``. A JSON file of the same name describes the circumstances.
    runs
        How often to measure the grid.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid. If None, workers are 0 and the powers of two up to the usable cores, or only 0
        for files on servers. A `range` stands for all integers in it.
    memory
        Most bytes for the buffers; if None, what is available now.
    cache
        "cold" drops the files' pages before each measurement, "warm" reads all files first; None
        is "cold", or "remote" for files on servers.
    seed
        Seed of the plans and of the orders.
    note
        A remark on the circumstances, such as what else the machine is doing.
    on_progress
        Called with the progress of each run.

    Raises
    ------
    ColumnError
        The collection was opened without the label, or it has fewer than two values.
    ParameterError
        A size is too small, there are more than 2,000 configurations, the collection is too small
        to time anything, "warm" was requested for files that do not fit in memory, or a different
        recording exists at ``output``.
    FormatError
        A file is damaged, or the recording at ``output`` is.
    MeasuringError
        The process that times configurations died.
    """
    if runs < 1:
        msg = f"`runs >= 1` must hold, but got runs={runs}"
        raise ParameterError(msg)
    column = Selected.of(collection).label(label)
    space = Space.of(
        block_sizes, fetch_factors, default_workers(collection) if workers is None else workers
    )
    grid = _listed(space)
    check_size("the collection", len(collection), grid, batch_size)
    cache = cache_state(collection, cache)
    check_cache(collection, cache)
    on_progress("machine", 0, 1)
    facts = _facts(collection, column, batch_size) | {
        "note": note,
        "block_sizes": list(space.block_sizes),
        "fetch_factors": list(space.fetch_factors),
        "workers": list(space.workers),
        "cache": prepare_cache(collection.files, cache),
        "seed": seed,
    }
    files = RecordingFiles.open(Path(output), facts, _SAME)
    files.left_out |= _impossible(grid, collection, batch_size, memory)
    with MeasuringProcess(collection) as process:  # imports continue alongside the next lines
        plans = BlockPlans(len(collection), batch_size=batch_size, seed=seed)
        mixing = Mixing([column], None, plans, entropy_floor=DEFAULT_ENTROPY_FLOOR)
        mixing.replay(grid, on_progress)
        on_progress("start", 0, 1)
        process.start()
        recorder = Recorder(
            process=process,
            files=files,
            entropies={
                sizes: mixing[sizes][label].expected.value
                for sizes in product(space.block_sizes, space.fetch_factors)
            },
            request=Request(label, batch_size, cache, seed, ceil(_LEAST_ROUNDS / runs)),
            on_progress=on_progress,
        )
        recorder.measure(grid, runs)
    return Recording(
        path=files.path,
        n_configurations=len(grid),
        n_runs=runs,
        left_out=dict(files.left_out),
        seconds=files.seconds,
    )


def _listed(space: Space) -> list[Configuration]:
    if space.is_large:
        msg = (
            f"every configuration is measured, {MOST_LISTED:,} at most, but these are "
            f"{space.size:,}; give fewer block sizes, fetch factors or workers"
        )
        raise ParameterError(msg)
    return space.grid()


def _impossible(
    grid: Sequence[Configuration], collection: Collection, batch_size: int, memory: int | None
) -> dict[Configuration, str]:
    """Return the configurations that cannot run at all, and why."""
    reasons = {
        each: obstacle(
            each,
            n_cells=len(collection),
            batch_size=batch_size,
            row_bytes=collection.mean_row_bytes(),
            memory_bytes=usable_memory_bytes() if memory is None else memory,
        )
        for each in grid
    }
    return {each: ": ".join(reason) for each, reason in reasons.items() if reason is not None}


def _facts(collection: Collection, label: Label, batch_size: int) -> dict[str, Any]:
    """Return what is measured and under which circumstances, without paths."""
    machine, versions = describe_machine(collection.files), versions_fingerprint()
    counted = {label.name: label.counted}
    dataset = asdict(describe_dataset(Selected.of(collection), counted, batch_size))
    paths = dataset.pop("paths")
    # It names paths; and all cells are visited, by cellfeed.
    del dataset["slow_reading"], dataset["selection"], dataset["loader"]
    return {
        "schema": SCHEMA,
        "label": label.name,
        "batch_size": batch_size,
        "random_entropy_bits": label.counted.random_entropy_bits(batch_size),
        "dataset": dataset | {"n_files": len(paths), "codecs": sorted({*collection.codecs})},
        "machine": to_plain(machine),
        "versions": dict(versions.facts),
        "fingerprints": {
            "data": data_fingerprint(collection, label.codes).digest,
            "machine": machine_fingerprint(machine).digest,
            "versions": versions.digest,
        },
    }
