"""Throughput over block size and fetch factor, of cells in any storage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from cellfeed import BlockShuffling, CellDataset, CellfeedError, SamplingStrategy, Streaming
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._loader import SINGLE_MINIBATCHES, LoaderRequest
from cellfeed_tuner._measuring._measure import limit_seconds, measure_with, prepare_cache
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess

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
    """Measure block shuffling and streaming over cells in any storage, beside PyTorch's loader.

    All settings are measured once, in random order, before the first has its next run, which
    visits rows in another order.

    Parameters
    ----------
    cells
        What `cellfeed.CellDataset` takes; pickled as its files, such as a `cellfeed.Collection`.
    files
        What holds them.
    beside
        The same cells as an object that takes arrays of row numbers in brackets, for PyTorch's
        loader; ``cells`` if None.
    block_sizes, fetch_factors
        The grid. Streaming is measured for each fetch factor. `torch.utils.data.DataLoader` takes
        one minibatch after the other, of rows at random and in the order of storage.
    runs
        How often all is measured.
    batch_size, cache, seconds
        As in `measure_loader`.
    seed
        Fixes the order of settings, and of the rows in each run.

    Returns
    -------
    Columns ``loader``, ``strategy``, ``block_size``, ``fetch_factor`` (missing where there is
    none), over runs the median ``cells_per_second``, the smallest ``low`` and the largest
    ``high`` (missing where a run had too few fetches in 20 times ``seconds``, and a minute), and
    ``cache``: "unknown" where the page cache could not be had in the state that was asked for.

    Raises
    ------
    ParameterError
        There are fewer cells than a fetch has.
    CellfeedError
        Reading failed.
    """
    order = np.random.default_rng(seed)
    measured = []
    with MeasuringProcess(None) as process:
        process.start()
        for run in range(runs):
            loaders = list(
                _loaders(cells, beside, block_sizes, fetch_factors, batch_size, seed + run)
            )
            for number in order.permutation(len(loaders)).tolist():
                row, configuration, open_loader = loaders[number]
                request = LoaderRequest(
                    open_loader=open_loader,
                    files=tuple(files),
                    configuration=configuration,
                    batch_size=batch_size,
                    cache=cache,
                    seconds=seconds,
                )
                found_cache = prepare_cache(files, cache)
                found = measure_with(process, request, limit_seconds=limit_seconds(seconds))
                if found.failure:
                    msg = f"{row}: {found.failure}"
                    raise CellfeedError(msg)
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


def _loaders(
    cells: Any,
    beside: Any,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    batch_size: int,
    seed: int,
) -> Iterator[tuple[dict[str, Any], Configuration, Callable[[], Any]]]:
    """Yield how each loader is called, what is timed as one fetch of it, and what opens it."""

    def row(loader: str, strategy: str, *sizes: int | None) -> dict[str, Any]:
        return dict(zip(_SETTINGS, (loader, strategy, *sizes), strict=True))

    def open_dataset(strategy: SamplingStrategy, factor: int) -> Callable[[], Any]:
        return partial(CellDataset, cells, strategy, batch_size, factor, drop_last=True, seed=seed)

    for factor in fetch_factors:
        fetch = Configuration(block_size=1, fetch_factor=factor)
        yield row("cellfeed", "Streaming", None, factor), fetch, open_dataset(Streaming(), factor)
        for block in block_sizes:
            configuration = Configuration(block_size=block, fetch_factor=factor)
            shuffled = open_dataset(BlockShuffling(block), factor)
            yield row("cellfeed", "BlockShuffling", block, factor), configuration, shuffled
    indexed = cells if beside is None else beside
    for name, shuffle_seed in (("random", seed), ("stream", None)):
        minibatches = _Minibatches(len(cells), batch_size, shuffle_seed)
        open_loader = partial(DataLoader, indexed, batch_size=None, sampler=minibatches)
        yield row("DataLoader", name, None, None), SINGLE_MINIBATCHES, open_loader


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
