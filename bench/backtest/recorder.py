"""Measure what a recording still lacks."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from bench.backtest.files import RecordingFiles, Row, Sitting

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._measurement import Measurement, measure_with
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest
from cellfeed_tuner._time_budget import Progress, silent

__all__ = ["Recorder", "Request"]

# A run of a configuration that takes longer is stopped.
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Request:
    """What all measurements have in common.

    Parameters
    ----------
    label, batch_size, cache, seed
        What is measured; see `record`.
    least_rounds
        Fewest rounds for a throughput.
    """

    label: str
    batch_size: int
    cache: CacheState
    seed: int
    least_rounds: int

    def of(self, configuration: Configuration, number: int) -> TimingRequest:
        """Return the request to time, for the measurement with that number."""
        return TimingRequest(
            configuration=configuration,
            batch_size=self.batch_size,
            labels=(self.label,),
            cache=self.cache,
            seed=self.seed,
            least_rounds=self.least_rounds,
            number=number,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """Measures what is missing, and stores it.

    Parameters
    ----------
    process
        Where configurations run.
    files
        What is recorded already, and where to store the rest.
    entropies
        Label entropy in bits for each (block size, fetch factor).
    request
        What all measurements have in common.
    on_progress
        Called with the progress of each run.
    clock
        A clock, in seconds.
    """

    process: MeasuringProcess
    files: RecordingFiles
    entropies: Mapping[tuple[int, int], float]
    request: Request
    on_progress: Progress = silent
    clock: Callable[[], float] = time.monotonic

    def measure(self, grid: Sequence[Configuration], n_runs: int) -> None:
        """Measure the grid this many times, except what was measured already."""
        sitting = Sitting(
            began=datetime.now(UTC).isoformat(timespec="seconds"), load=os.getloadavg()[0]
        )
        self.files.sittings.append(sitting)
        start = self.clock()
        try:
            for run, configuration in self._missing(grid, n_runs):
                self._measure(run, configuration, grid)
                sitting.n_measured += 1
                sitting.seconds = self.clock() - start
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
        """Return why there is no throughput, or None."""
        if found.failure:
            return f"failed: {found.failure}"
        if found.delivery_fault:
            return f"wrong loader: {found.delivery_fault}"
        if len(found.round_seconds) < self.request.least_rounds:
            return f"not enough samples in {_LIMIT_SECONDS:.0f} s"
        return ""
