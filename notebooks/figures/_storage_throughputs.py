"""Throughput over block size and fetch factor, for cells in any storage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    CellfeedError,
    ParameterError,
    SamplingStrategy,
    Streaming,
)
from cellfeed_tuner import Configuration, Tunable
from cellfeed_tuner._measuring._measurement import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    limit_seconds,
    measure_with,
)
from cellfeed_tuner._measuring._page_cache import CacheState, prepare_cache
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest

__all__ = ["storage_throughputs"]

_SETTINGS = ["loader", "strategy", "block_size", "fetch_factor"]


def storage_throughputs(
    cells: Any,
    *,
    files: Sequence[Path],
    beside: Any = None,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    batch_size: int = 64,
    runs: int = 3,
    cache: CacheState = "cold",
    seconds: float = 1.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Measure block shuffling and streaming over cells in any storage, and PyTorch's loader.

    All settings are measured once, in random order, before the next run begins, which visits rows
    in another order.

    Parameters
    ----------
    cells
        What `cellfeed.CellDataset` takes; pickled by its files, such as a `cellfeed.Collection`.
    files
        The files that hold them.
    beside
        The same cells as an object that takes arrays of row numbers in brackets, for PyTorch's
        loader; ``cells`` if None.
    block_sizes, fetch_factors
        The grid. Streaming is measured for each fetch factor. `torch.utils.data.DataLoader` takes
        one minibatch after the other, of random rows and in storage order.
    runs
        How often to measure everything.
    batch_size, cache, seconds
        As in `cellfeed_tuner.measure`.
    seed
        Determines the order of settings, and of the rows in each run.

    Returns
    -------
    Columns ``loader``, ``strategy``, ``block_size``, ``fetch_factor`` (missing where there is
    none), over runs the median ``cells_per_second``, the smallest ``low`` and the largest
    ``high`` (missing if a run had too few fetches in 20 times ``seconds``, and a minute), and
    ``cache``: "unknown" if the page cache could not be brought into the requested state.

    Raises
    ------
    ParameterError
        There are fewer cells than a fetch has.
    CellfeedError
        Reading failed.
    """
    order = np.random.default_rng(seed)
    storage = _Storage(cells, beside, files=files, batch_size=batch_size)
    measured = []
    with MeasuringProcess(storage) as process:
        process.start()
        for run in range(runs):
            settings = list(_settings(block_sizes, fetch_factors, seed + run))
            for number in order.permutation(len(settings)).tolist():
                configuration = settings[number]
                request = TimingRequest(
                    configuration=configuration,
                    batch_size=batch_size,
                    labels=(),
                    cache=cache,
                    seed=seed,
                    least_rounds=LEAST_ROUNDS,
                    most_rounds=MOST_ROUNDS,
                    seconds=seconds,
                )
                found_cache = prepare_cache(files, cache)
                found = measure_with(process, request, limit_seconds=limit_seconds(seconds))
                row = _row(configuration)
                if found.failure:
                    msg = f"{row}: {found.failure}"
                    raise (ParameterError if found.is_infeasible else CellfeedError)(msg)
                speed = found.cells_per_second
                value = None if speed is None else speed.value
                measured.append({**row, "cells_per_second": value, "cache": found_cache})
    table = pd.DataFrame(measured).astype({"cells_per_second": float})
    by_setting = table.groupby(_SETTINGS, dropna=False)
    speeds = by_setting["cells_per_second"].agg(cells_per_second="median", low="min", high="max")
    speeds["cache"] = by_setting["cache"].agg(_common)
    return speeds.reset_index()


def _common(states: "pd.Series[str]") -> str:
    return str(states.iloc[0]) if len(set(states)) == 1 else "unknown"


def _settings(
    block_sizes: Sequence[int], fetch_factors: Sequence[int], seed: int
) -> Iterator[Configuration]:
    """Yield the settings of each loader."""
    for factor in fetch_factors:
        yield Configuration(fetch_factor=factor, strategy="Streaming", seed=seed)
        for block in block_sizes:
            yield Configuration(
                block_size=block, fetch_factor=factor, strategy="BlockShuffling", seed=seed
            )
    for strategy in ("random", "stream"):
        yield Configuration(strategy=strategy, seed=seed)


def _row(settings: Configuration) -> dict[str, Any]:
    """Return the settings of a table, None where there is none."""
    strategy = settings["strategy"]
    is_ours = strategy in {"Streaming", "BlockShuffling"}
    values = (
        "cellfeed" if is_ours else "DataLoader",
        strategy,
        settings.block_size if strategy == "BlockShuffling" else None,
        settings.fetch_factor if is_ours else None,
    )
    return dict(zip(_SETTINGS, values, strict=True))


class _Storage(Tunable):
    """Cells in any storage, read by cellfeed or by PyTorch's loader."""

    def __init__(self, cells: Any, beside: Any, *, files: Sequence[Path], batch_size: int) -> None:
        self.files, self.batch_size = files, batch_size
        self._cells, self._beside = cells, cells if beside is None else beside

    def open(self, configuration: Configuration) -> Any:
        """Return the loader."""
        strategy, seed = configuration["strategy"], cast("int", configuration["seed"])
        if strategy in {"random", "stream"}:
            shuffle_seed = seed if strategy == "random" else None
            rows = _Minibatches(len(self._cells), self.batch_size, shuffle_seed)
            return DataLoader(self._beside, batch_size=None, sampler=rows)
        how: SamplingStrategy = BlockShuffling(configuration.block_size)
        if strategy == "Streaming":
            how = Streaming()
        return CellDataset(
            self._cells, how, self.batch_size, configuration.fetch_factor, drop_last=True, seed=seed
        )


@dataclass(frozen=True, slots=True)
class _Minibatches:
    """Row numbers of whole minibatches: at random, or in order if there is no seed."""

    n_rows: int
    batch_size: int
    seed: int | None

    def __len__(self) -> int:
        return self.n_rows // self.batch_size

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        rows = np.arange(self.n_rows)
        if self.seed is not None:
            np.random.default_rng(self.seed).shuffle(rows)
        for number in range(len(self)):
            yield rows[number * self.batch_size : (number + 1) * self.batch_size]
