"""Throughput over block size and fetch factor, of cells in any storage."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from cellfeed import BlockShuffling, CellDataset, ParameterError, SamplingStrategy, Streaming
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._loader import SINGLE_MINIBATCHES, LoaderRequest
from cellfeed_tuner._measuring._measure import LIMIT_TIMES, measure_with, prepare_cache
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess

__all__ = ["storage_throughputs"]

_SETTINGS = ["loader", "strategy", "block_size", "fetch_factor"]


def storage_throughputs(
    cells: Any,
    *,
    files: Sequence[Path],
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    batch_size: int = 64,
    runs: int = 3,
    cache: CacheState = "cold",
    seconds: float = 1.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Measure block shuffling and streaming over cells in any storage, beside PyTorch's loader.

    All settings are measured once, in random order, before the first has its next run.

    Parameters
    ----------
    cells
        What `cellfeed.CellDataset` takes; pickled as its files, such as `cellfeed.HuggingFaceCells`
        and `cellfeed.MemoryMappedCells` are.
    files
        What holds them.
    block_sizes, fetch_factors
        The grid. Streaming is measured for each fetch factor. `torch.utils.data.DataLoader` takes
        one minibatch after the other, of rows at random and in the order of storage.
    runs
        How often all is measured.
    batch_size, cache, seconds
        As in `measure_loader`.
    seed
        Fixes the order of settings and of rows.

    Returns
    -------
    Columns ``loader``, ``strategy``, ``block_size``, ``fetch_factor`` (missing where there is
    none) and, over runs, the median ``cells_per_second``, the smallest ``low`` and the largest
    ``high``.

    Raises
    ------
    ParameterError
        A setting cannot be measured: there are fewer cells than a fetch has, or reading failed.
    """
    settings = list(_settings(cells, block_sizes, fetch_factors, batch_size, seed))
    order = np.random.default_rng(seed)
    measured = []
    with MeasuringProcess(None) as process:
        process.start()
        for _ in range(runs):
            for number in order.permutation(len(settings)).tolist():
                row, configuration, open_loader = settings[number]
                request = LoaderRequest(
                    open_loader=open_loader,
                    files=tuple(files),
                    configuration=configuration,
                    batch_size=batch_size,
                    cache=cache,
                    seconds=seconds,
                )
                prepare_cache(files, cache)
                found = measure_with(process, request, limit_seconds=LIMIT_TIMES * seconds)
                if found.cells_per_second is None:
                    msg = f"{row}: nothing was measured; {found.failure or found.status}"
                    raise ParameterError(msg)
                measured.append({**row, "cells_per_second": found.cells_per_second.value})
    speeds = pd.DataFrame(measured).groupby(_SETTINGS, dropna=False)["cells_per_second"]
    return speeds.agg(cells_per_second="median", low="min", high="max").reset_index()


def _settings(
    cells: Any,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    batch_size: int,
    seed: int,
) -> Iterator[tuple[dict[str, Any], Configuration, Callable[[], Any]]]:
    """Yield how each setting is called, what is timed as one fetch, and what opens its loader."""

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
    for name, sampler in (("random", RandomSampler(cells)), ("stream", SequentialSampler(cells))):
        minibatches = BatchSampler(sampler, batch_size, drop_last=True)
        open_loader = partial(DataLoader, cells, batch_size=None, sampler=minibatches)
        yield row("DataLoader", name, None, None), SINGLE_MINIBATCHES, open_loader
