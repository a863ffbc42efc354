"""Measuring a whole grid, in several interleaved runs."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import Collection, ParameterError
from cellfeed.machine import usable_memory_bytes
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._dataset import describe_dataset
from cellfeed_tuner._entropy._grid_entropies import replayed_entropies
from cellfeed_tuner._entropy._label_counts import LabelCounts, count_labels
from cellfeed_tuner._grid import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_FETCH_FACTORS,
    default_workers,
    grid_of,
    obstacle,
)
from cellfeed_tuner._history._fingerprint import (
    data_fingerprint,
    machine_fingerprint,
    versions_fingerprint,
)
from cellfeed_tuner._machine._description import describe_machine
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._checks import check_cache, check_labels, check_size
from cellfeed_tuner._measuring._labels import label_codes
from cellfeed_tuner._measuring._measure import Measurement, measure_with, prepare_cache
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest
from cellfeed_tuner._progress import Progress, silent
from cellfeed_tuner._recording._codec import codecs
from cellfeed_tuner._recording._files import SCHEMA, RecordingFiles, Row, Sitting

__all__ = ["Recording", "record"]

# What a throughput rests on at least, over all runs together.
_LEAST_ROUNDS = 8
_MOST_ROUNDS = 64
_SLICE_SECONDS = 0.5
# One run of one configuration that takes longer is stopped.
_LIMIT_SECONDS = 120.0
# Epochs that one measurement may go through, at most.
_EPOCHS_APART = 1000
# What must be the same where a recording is taken up again.
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
    """What a recording has come to.

    Parameters
    ----------
    path
        The CSV file; a JSON file of that name lies beside it.
    n_configurations
        Size of the grid.
    n_runs
        How often each of them was measured that can be.
    left_out
        Configurations that cannot be measured, and why.
    seconds
        What measuring took, earlier calls included.
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
    cache: CacheState = "cold",
    seed: int = 0,
    note: str = "",
    on_progress: Progress = silent,
) -> Recording:
    """Measure every configuration of a grid, to play searches on it; see `replay`.

    The grid is measured as often as there are runs, each time in another random order, so that
    what changes meanwhile meets all configurations alike. A row is written as soon as it is
    measured: the same call takes up what was interrupted, and one with more runs adds to what
    there is.

    Parameters
    ----------
    collection
        What is read, opened with ``obs=[label]``.
    label
        The obs column that minibatches should be mixed by.
    output
        The CSV file to write, one row for each run of each configuration: ``run``,
        ``block_size``, ``fetch_factor``, ``num_workers``, ``cells_per_second``,
        ``entropy_bits`` (expected from the plan over the labels), ``n_rounds``,
        ``round_spread`` (standard deviation of the rounds' time, relative) and
        ``peak_memory_bytes``. A JSON file of that name beside it says on what it was measured.
    runs
        How often to measure the grid.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid. Workers are 0 and the powers of two up to the usable cores if None.
    memory
        Most bytes for the buffers; what is available now if None.
    cache
        "cold" drops the files' pages again and again, "warm" reads all files first.
    seed
        Seed of plans and of the orders.
    note
        What else there is to say of the circumstances, such as what the machine is busy with.
    on_progress
        Told how far each run has come.

    Raises
    ------
    ColumnError
        The collection was opened without the label, or it has fewer than two values.
    ParameterError
        A size is below what it may be, the collection is too small to time anything, "warm" was
        asked of files that do not fit in memory, or something else lies at ``output``.
    FormatError
        A file is damaged, or what lies at ``output`` is.
    MeasuringError
        The process in which configurations are timed has died.
    """
    if runs < 1:
        msg = f"`runs >= 1` must hold, but got runs={runs}"
        raise ParameterError(msg)
    codes = label_codes(collection, label)
    counted = count_labels(codes)
    check_labels(counted, label, collection)
    grid = grid_of(block_sizes, fetch_factors, default_workers() if workers is None else workers)
    check_size(collection, grid, batch_size)
    check_cache(collection, cache)
    memory = usable_memory_bytes() if memory is None else memory
    on_progress("machine", 0, 1)
    with MeasuringProcess(collection) as process:
        facts = {
            "schema": SCHEMA,
            "note": note,
            "label": label,
            "batch_size": batch_size,
            "block_sizes": sorted({each.block_size for each in grid}),
            "fetch_factors": sorted({each.fetch_factor for each in grid}),
            "workers": sorted({each.num_workers for each in grid}),
            "cache": prepare_cache(collection, cache),
            "seed": seed,
            **_surroundings(collection, codes, counted, label, batch_size),
        }
        files = RecordingFiles.open(Path(output), facts, _SAME)
        for each in grid:
            reason = obstacle(
                each,
                n_cells=len(collection),
                batch_size=batch_size,
                row_bytes=collection.mean_row_bytes(),
                memory_bytes=memory,
            )
            if reason is not None:
                files.left_out[each] = ": ".join(reason)
        entropies = {
            (each.block_size, each.fetch_factor): each.bits.value
            for each in replayed_entropies(codes, grid, batch_size, seed, on_progress)
        }
        on_progress("start", 0, 1)
        process.start()
        recorder = _Recorder(
            process=process,
            files=files,
            entropies=entropies,
            request=_Request(label, batch_size, cache, seed, ceil(_LEAST_ROUNDS / runs)),
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


def _surroundings(
    collection: Collection,
    codes: NDArray[np.integer],
    counted: LabelCounts,
    label: str,
    batch_size: int,
) -> dict[str, Any]:
    """Return on what is measured, without paths."""
    machine = describe_machine(collection.files)
    dataset = asdict(describe_dataset(collection, label, counted, batch_size))
    paths = dataset.pop("paths")
    return {
        "random_entropy_bits": theory.random_entropy_bits(
            counted.counts, batch_size, n_missing=counted.n_missing
        ),
        "dataset": dataset | {"n_files": len(paths), "codecs": codecs(collection.paths)},
        "machine": machine.to_json(),
        "fingerprints": {
            "data": data_fingerprint(collection, codes).digest,
            "machine": machine_fingerprint(machine).digest,
            "versions": versions_fingerprint().digest,
        },
    }


@dataclass(frozen=True, slots=True)
class _Request:
    """What all measurements have in common."""

    label: str
    batch_size: int
    cache: CacheState
    seed: int
    least_rounds: int

    def of(self, configuration: Configuration, number: int) -> TimingRequest:
        """Return what to time, for the measurement of that number."""
        return TimingRequest(
            configuration=configuration,
            batch_size=self.batch_size,
            label=self.label,
            cache=self.cache,
            seconds=_SLICE_SECONDS,
            least_rounds=self.least_rounds,
            most_rounds=_MOST_ROUNDS,
            seed=self.seed,
            # Other rows each time, as over the epochs of a training.
            first_epoch=_EPOCHS_APART * number,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorder:
    """Measures what is missing, and keeps it."""

    process: MeasuringProcess
    files: RecordingFiles
    entropies: dict[tuple[int, int], float]
    request: _Request
    on_progress: Progress

    def measure(self, grid: Sequence[Configuration], n_runs: int) -> None:
        """Measure the grid as often as that, except for what was measured already."""
        sitting = Sitting(
            began=datetime.now(UTC).isoformat(timespec="seconds"), load=os.getloadavg()[0]
        )
        self.files.sittings.append(sitting)
        start = time.monotonic()
        try:
            for run, configuration in self._missing(grid, n_runs):
                self._measure(run, configuration, grid)
                sitting.n_measured += 1
                sitting.seconds = time.monotonic() - start
        finally:
            self.files.save()

    def _missing(
        self, grid: Sequence[Configuration], n_runs: int
    ) -> Iterator[tuple[int, Configuration]]:
        for run in range(n_runs):
            order = np.random.default_rng((self.request.seed, run)).permutation(len(grid))
            for number, place in enumerate(order):
                self.on_progress(f"Run {run + 1} of {n_runs}", number, len(grid))
                each = grid[place]
                if each not in self.files.left_out and (run, each) not in self.files.done:
                    yield run, each

    def _measure(
        self, run: int, configuration: Configuration, grid: Sequence[Configuration]
    ) -> None:
        number = run * len(grid) + grid.index(configuration)
        found = measure_with(
            self.process,
            self.request.of(configuration, number),
            limit_seconds=_LIMIT_SECONDS,
        )
        problem = self._problem(found)
        if problem:
            self.files.left_out[configuration] = problem
            return
        seconds = np.array(found.round_seconds)
        self.files.add(
            Row(
                run=run,
                configuration=configuration,
                cells_per_second=float(found.cells_per_round / seconds.mean()),
                entropy_bits=self.entropies[configuration.block_size, configuration.fetch_factor],
                n_rounds=seconds.size,
                round_spread=float(seconds.std(ddof=1) / seconds.mean()) if seconds.size > 1 else 0,
                peak_memory_bytes=found.peak_memory_bytes,
            )
        )

    def _problem(self, found: Measurement) -> str:
        """Return why there is no throughput, or nothing."""
        if found.failure:
            return f"failed: {found.failure}"
        if found.delivery_fault:
            return f"wrong loader: {found.delivery_fault}"
        if len(found.round_seconds) < self.request.least_rounds:
            return f"not enough samples in {_LIMIT_SECONDS:.0f} s"
        return ""
