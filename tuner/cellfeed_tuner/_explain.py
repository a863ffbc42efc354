"""Where the time per cell goes in the recommended configuration, and what storage would give."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numcodecs import blosc
from numpy.typing import NDArray

from cellfeed import (
    BlockShuffling,
    CellDataset,
    CellfeedError,
    Collection,
    Minibatch,
    ReadOptions,
    SamplingStrategy,
)
from cellfeed.machine import usable_cores, usable_memory_bytes
from cellfeed_tuner._bottleneck import Bottleneck, StageModel, bottleneck, with_training_step
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measuring._measurement import Measurement
from cellfeed_tuner._measuring._process import Measures, Request
from cellfeed_tuner._storage_advice import StorageAdvice, StoreSample, storage_advice
from cellfeed_tuner._subject import Selected

_MOST_BYTES = 16 << 20
_REPEATS = 3


def explain_throughput(
    process: Measures,
    measured: Measurement,
    *,
    batch_size: int,
    cells_per_second: float,
    paths: Sequence[str] = (),
    waiting: Estimate | None = None,
    step_seconds: float | None,
    n_cells: int,
    block_sizes: Sequence[int] | None,
    seconds: float,
    seed: int,
) -> tuple[Bottleneck | None, tuple[StorageAdvice, ...]]:
    """Return where the time of a configuration goes, and storage advice.

    A shuffled copy would be read with the largest of ``block_sizes`` that fits into a fetch; none
    is advised without any. There is no advice if ``block_sizes`` is None, or if a sample of cells
    is not loaded and encoded within ``seconds``.
    """
    configuration = measured.configuration
    found = bottleneck(
        measured.round_statistics,
        model=StageModel(
            cores=usable_cores(),
            num_workers=configuration.num_workers,
            num_threads=measured.num_threads,
            num_function_threads=measured.num_function_threads,
        ),
        cells_per_round=measured.cells_per_round,
        cells_per_second=cells_per_second,
    )
    if found is None:
        return None, ()
    advice = tuple[StorageAdvice, ...]()
    if block_sizes is not None and seconds > 0:
        request = StoreRequest(configuration=configuration, batch_size=batch_size, seed=seed)
        cells_per_fetch = batch_size * configuration.fetch_factor
        fitting = [size for size in block_sizes if size <= cells_per_fetch]
        block_size = max(fitting, default=1) if block_sizes else None
        outcome = process.run(request, limit_seconds=seconds)
        for sample in outcome.events:
            if isinstance(sample, StoreSample):
                advice = storage_advice(
                    found, sample, configuration, block_size, n_cells=n_cells, paths=paths
                )
    if step_seconds is not None:
        share = None if waiting is None else waiting.value
        found = with_training_step(found, step_seconds / batch_size, share)
    return found, advice


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest(Request):
    """A request to encode a sample of cells."""

    configuration: Configuration
    batch_size: int
    seed: int

    def run(self, subject: Collection | Selected, report: Callable[[object], None]) -> None:
        """Report the `StoreSample` of one fetch."""
        selected, configuration = Selected.of(subject), self.configuration
        others: dict[str, Any] = configuration.others
        blocks = selected.blocks(configuration.block_size, others.pop("align", None))
        options = ReadOptions(num_threads=others.pop("num_threads", None))

        def dataset_of(collection: Collection, strategy: SamplingStrategy) -> CellDataset:
            return CellDataset(
                collection,
                strategy,
                self.batch_size,
                configuration.fetch_factor,
                seed=self.seed,
                read_options=options,
                **others,
            )

        collection = selected.collection
        dataset = dataset_of(collection, blocks)
        minibatches = list(islice(dataset, configuration.fetch_factor))
        sample = sample_store(minibatches, collection.n_vars)
        rows = np.unique(np.concatenate([each.rows.numpy() for each in minibatches]))
        # Without memory that is left, or that processes can share, there is no advice to load.
        with suppress(CellfeedError):
            if not collection.loaded_bytes:
                loaded = collection.load(rows)
                again = BlockShuffling(configuration.block_size, indices=rows)
                pair = [dataset_of(each, again) for each in (collection, loaded)]
                # In turns, as other programs may be busy. The first takes new memory.
                seconds = [[_epoch_seconds(each) for each in pair] for _ in range(1 + _REPEATS)]
                from_files, from_memory = np.min(seconds[1:], axis=0) / rows.size
                sample = replace(
                    sample,
                    read_seconds=float(from_files),
                    loaded_seconds=float(from_memory),
                    loaded_bytes=loaded.loaded_bytes / rows.size,
                    available_bytes=usable_memory_bytes(),
                )
        report(sample)


def _epoch_seconds(dataset: CellDataset) -> float:
    start = time.perf_counter()
    for _minibatch in dataset:
        pass
    return time.perf_counter() - start


def sample_store(minibatches: Sequence[Minibatch], n_vars: int) -> StoreSample:
    """Encode and decode some minibatches as a shuffled copy does: Blosc, LZ4, byte shuffle."""
    blosc.use_threads = False  # the loader has its own threads
    codec = blosc.Blosc(cname="lz4", clevel=3, shuffle=blosc.SHUFFLE)
    pieces, n_cells = list[NDArray[Any]](), 0
    for minibatch in minibatches:
        if sum(piece.nbytes for piece in pieces) > _MOST_BYTES:
            break
        pieces += _arrays(minibatch, n_vars)
        n_cells += len(minibatch)
    start = time.perf_counter()
    encoded = [codec.encode(piece) for piece in pieces]
    encode, decode = time.perf_counter() - start, 0.0
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for each in encoded:
            codec.decode(each)
        decode = max(decode, time.perf_counter() - start)
    return StoreSample(
        encode_seconds=encode / n_cells,
        decode_seconds=decode / n_cells,
        stored_bytes=sum(map(len, encoded)) / n_cells,
    )


def _arrays(minibatch: Minibatch, n_vars: int) -> list[NDArray[Any]]:
    matrix = minibatch.X
    if matrix.layout != torch.sparse_csr:
        return [matrix.numpy()]
    columns = matrix.col_indices().numpy().astype(np.min_scalar_type(max(n_vars - 1, 0)))
    return [columns, np.ascontiguousarray(matrix.values().numpy())]
