"""Measuring the throughput of one configuration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cellfeed import CellDataset, Collection, ParameterError, SamplingStrategy
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    FEWEST_ROUNDS,
    LEAST_LIMIT_SECONDS,
    LEAST_ROUNDS,
    LIMIT_TIMES,
    MOST_ROUNDS,
    STRAY_PAGES,
)
from cellfeed_tuner._machine._page_cache import (
    CacheState,
    drop_pages,
    load_pages,
    resident_fraction,
)
from cellfeed_tuner._measuring._checks import cache_state, cells_needed
from cellfeed_tuner._measuring._comparison import compare_with_files
from cellfeed_tuner._measuring._measurement import Measurement, measured, pooled
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess, Runs
from cellfeed_tuner._measuring._timing import MakeDataset, TimingRequest
from cellfeed_tuner._subject._labels import label_codes, names_of
from cellfeed_tuner._subject._tunable import Tunable

__all__ = [
    "FEWEST_ROUNDS", "LEAST_ROUNDS", "MOST_ROUNDS", "Measurement", "limit_seconds", "measure",
    "measure_with", "pooled", "prepare_cache",
]  # fmt: skip


def measure(
    subject: Collection | Tunable,
    configuration: Configuration,
    *,
    strategy: SamplingStrategy | None = None,
    batch_size: int = 64,
    label: str | Sequence[str] = (),
    cache: CacheState | None = None,
    seconds: float = 5.0,
    seed: int = 0,
    make_dataset: MakeDataset = CellDataset,
) -> Measurement:
    """Measure the throughput of one configuration in a process of its own.

    Only whole fetches count. Start-up of the workers and the time to the first minibatch are
    reported separately. If the subject is a collection, some of the delivered cells are read again
    through h5py or zarr, and compared.

    Parameters
    ----------
    subject
        A collection, which cellfeed reads; or any other loader, which has its own labels and batch
        size.
    configuration
        The settings.
    strategy
        How cells are visited, such as `cellfeed.Streaming`; the configuration's block size is then
        ignored. In shuffled blocks of that size if None.
    batch_size
        Cells of a minibatch.
    label
        One obs column of the collection, or several, whose minibatch entropy is measured.
    cache
        "cold" drops the files' pages from the page cache before each epoch and after use; "warm"
        reads all files first; None for "cold", or "remote" for files on servers.
    seconds
        Time to spend, or longer if the least number of rounds takes longer. Measuring is stopped
        after 20 times as long, and at least a minute.
    seed
        Determines which rows are read.
    make_dataset
        Makes the dataset to measure, as in `autotune`.

    Raises
    ------
    ColumnError
        The collection was opened without a label.
    ParameterError
        The collection or the loader has too few cells for whole fetches; or the measuring process
        cannot import the loader; or the loader's minibatches contradict its attributes.
    FormatError
        A file is damaged.
    """
    if isinstance(subject, Tunable):
        subject.check()
        files, batch_size, labels = subject.paths, subject.batch_size, tuple(subject.labels)
        cache = cache or ("cold" if files else "warm")
    else:
        needed, files, labels = (
            cells_needed(configuration, batch_size),
            subject.files,
            names_of(label),
        )
        if needed > len(subject):
            msg = f"{configuration}: timing needs {needed:,} cells, but there are {len(subject):,}"
            raise ParameterError(msg)
        for each in labels:
            label_codes(subject, each)
        cache = cache_state(subject, cache)
    request = TimingRequest(
        configuration=configuration,
        batch_size=batch_size,
        labels=labels,
        cache=cache,
        seed=seed,
        least_rounds=LEAST_ROUNDS,
        most_rounds=MOST_ROUNDS,
        seconds=seconds,
        strategy=strategy,
        make_dataset=make_dataset,
    )
    found_cache = prepare_cache(files, cache)
    with MeasuringProcess[Any](subject) as process:
        process.start()
        found = measure_with(process, request, limit_seconds=limit_seconds(seconds))
    if found.is_infeasible:
        raise ParameterError(found.failure)
    fault = found.delivery_fault
    if not isinstance(subject, Tunable):
        faults = compare_with_files(subject, {configuration: found.sampled}).faults
        fault = fault or faults.get(configuration, "")
    return replace(found, cache=found_cache, delivery_fault=fault)


def limit_seconds(seconds: float) -> float:
    """Return after how long a measurement of so many seconds is stopped."""
    return max(LIMIT_TIMES * seconds, LEAST_LIMIT_SECONDS)


def prepare_cache(files: Sequence[Path], cache: CacheState) -> CacheState | Literal["unknown"]:
    """Bring the files' pages into a cache state, and return it.

    "unknown" if pages stayed, or the kernel does not report them.
    """
    if cache == "remote":
        return cache
    (drop_pages if cache == "cold" else load_pages)(files)
    resident = resident_fraction(files)
    if resident is None:
        return "unknown"
    as_wanted = resident <= STRAY_PAGES if cache == "cold" else resident >= 1 - STRAY_PAGES
    return cache if as_wanted else "unknown"


def measure_with(
    process: Runs[TimingRequest], request: TimingRequest, *, limit_seconds: float
) -> Measurement:
    """Measure in a process that is already running; see `measure`."""
    return measured(request, process.run(request, limit_seconds=limit_seconds))
