"""Timing the stages of a fetch one after the other, in a process of its own.

Round after round, each on a fetch of its own, the same rows are planned, read as bytes from disk
and from the page cache, decompressed, placed and made into minibatches. What a stage takes
longer than the one before it is what it adds.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from cellfeed import Collection, EpochPlan, Minibatch
from cellfeed.machine import threads_per_process
from cellfeed.stages import FetchStages
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._explain._store_sample import sample_store
from cellfeed_tuner._machine._page_cache import CacheState, drop_clean_pages
from cellfeed_tuner._measuring._selected import Selected

__all__ = ["StageRequest", "StageRound", "Transferred"]

# Minibatches that each worker hands over before any is timed; lots that are timed, and how many
# are in each.
_FIRST_TRANSFERRED, _N_LOTS, _LOT = 16, 8, 16


_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRound:
    """Seconds from the beginning of one fetch to the end of a stage, done alone.

    Parameters
    ----------
    n_cells
        Cells of the fetch.
    planned
        Planning, with nothing read.
    cold_bytes, cached_bytes
        Reading the bytes of its chunks from disk, and again from the page cache. None where the
        format's own library reads; ``cold_bytes`` also where cached files are measured.
    decompressed
        Reading them from the page cache, and decompressing them; None like these.
    cold_read
        Where the library reads, from disk: reading, decompressing and placing; else None.
    read
        Reading from the page cache, decompressing and placing.
    to_minibatches
        Making minibatches of what was read.
    stored_bytes, decoded_bytes, useful_bytes
        Bytes of its chunks as they are stored and once they are decompressed, and bytes of those
        that are used; 0 where the library reads.
    """

    n_cells: int
    planned: float
    cold_bytes: float | None
    cached_bytes: float | None
    decompressed: float | None
    cold_read: float | None
    read: float
    to_minibatches: float
    stored_bytes: int
    decoded_bytes: int
    useful_bytes: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """How fast workers that have nothing to read hand minibatches over.

    Parameters
    ----------
    seconds
        Time for each cell, over all workers together, of each lot that was timed.
    """

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """Which stages to time, and for how long.

    Parameters
    ----------
    configuration, batch_size
        The settings.
    cache
        "cold" times the disk too, "warm" leaves it out.
    seconds
        Stop after this time, once there are ``least_rounds``.
    least_rounds, most_rounds
        Rounds, after one that does not count.
    seed, first_epoch
        Fix which rows are read.
    """

    configuration: Configuration
    batch_size: int
    cache: CacheState
    seconds: float
    least_rounds: int
    most_rounds: int
    seed: int
    first_epoch: int

    def run(self, subject: Collection | Selected, report: Callable[[object], None]) -> None:
        """Report each `StageRound`, a `StoreSample`, and `Transferred` if there are workers."""
        deadline = time.perf_counter() + self.seconds
        selected = Selected.of(subject)
        collection = selected.collection
        minibatches = list[Minibatch]()
        num_threads = threads_per_process(self.configuration.fetches_per_round)
        with FetchStages(collection, self.batch_size, num_threads=num_threads) as stages:
            for number, (plan, fetch) in enumerate(self._fetches(selected)):
                minibatches.clear()  # so that their memory is used again
                timed = _timed(stages, collection, plan, fetch, self.cache, minibatches)
                if number > 0:
                    report(timed)
                late = time.perf_counter() > deadline and number >= self.least_rounds
                if late or number == self.most_rounds:
                    break
        report(sample_store(minibatches, collection.n_vars))
        if self.configuration.num_workers:
            report(_transferred(minibatches[0], self.configuration))

    def _fetches(self, selected: Selected) -> Iterator[tuple[EpochPlan, int]]:
        """Yield whole fetches of one epoch after the other."""
        epoch = self.first_epoch
        while True:
            plan = EpochPlan(
                strategy=selected.blocks(self.configuration.block_size),
                n_rows=len(selected.collection),
                batch_size=self.batch_size,
                fetch_factor=self.configuration.fetch_factor,
                seed=self.seed,
                epoch=epoch,
            )
            for number in range(plan.n_whole_fetches):
                yield plan, number
            epoch += 1


def _timed(
    stages: FetchStages,
    collection: Collection,
    plan: EpochPlan,
    number: int,
    cache: CacheState,
    minibatches: list[Minibatch],
) -> StageRound:
    seconds_planned, planned = _seconds_of(lambda: stages.plan(plan.fetch(number)))
    volume = stages.volume(planned)
    cold_bytes = cached_bytes = decompressed = cold_read = None
    if cache == "cold":
        drop_clean_pages(collection.files)

    def read_bytes() -> int:
        return stages.read_bytes(stages.readahead(planned))

    stored = 0
    if volume is not None:
        first, stored = _seconds_of(read_bytes)
        cold_bytes = first if cache == "cold" else None
        cached_bytes, _ = _seconds_of(read_bytes)
        decompressed, _ = _seconds_of(lambda: stages.decompress(planned))
    else:
        first, _ = _seconds_of(lambda: stages.read(planned))
        cold_read = first if cache == "cold" else None
    read, groups = _seconds_of(lambda: stages.read(planned))
    to_minibatches, made = _seconds_of(lambda: stages.to_minibatches(groups))
    minibatches += made
    return StageRound(
        n_cells=plan.fetch_size,
        planned=seconds_planned,
        cold_bytes=cold_bytes,
        cached_bytes=cached_bytes,
        decompressed=decompressed,
        cold_read=cold_read,
        read=read,
        to_minibatches=to_minibatches,
        stored_bytes=stored,
        decoded_bytes=volume.decoded_bytes if volume else 0,
        useful_bytes=volume.useful_bytes if volume else 0,
    )


def _seconds_of(stage: Callable[[], _Made]) -> tuple[float, _Made]:
    start = time.perf_counter()
    made = stage()
    return time.perf_counter() - start, made


class _Repeated(IterableDataset[Minibatch]):
    """One minibatch over and over, for which nothing is read."""

    def __init__(self, minibatch: Minibatch, n_times: int) -> None:
        super().__init__()
        self._minibatch = minibatch
        self._n_times = n_times

    def __iter__(self) -> Iterator[Minibatch]:
        return (self._minibatch for _ in range(self._n_times))


def _transferred(minibatch: Minibatch, configuration: Configuration) -> Transferred:
    """Time the way from workers to this process, after the threads that read are gone."""
    n_workers = configuration.num_workers
    loader = DataLoader(
        _Repeated(minibatch, _FIRST_TRANSFERRED + _N_LOTS * _LOT),
        batch_size=None,
        num_workers=n_workers,
    )
    ends = list[float]()
    for number, _ in enumerate(loader, 1 - n_workers * _FIRST_TRANSFERRED):
        if number >= 0 and number % (n_workers * _LOT) == 0:
            ends.append(time.perf_counter())
    cells = len(minibatch) * n_workers * _LOT
    return Transferred(tuple(np.diff(ends) / cells))
