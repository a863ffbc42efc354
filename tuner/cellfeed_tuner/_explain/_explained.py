"""Where the time of the chosen configuration goes, and what follows from that."""

from collections.abc import Sequence
from dataclasses import dataclass

from cellfeed import Collection
from cellfeed.machine import usable_cores
from cellfeed_tuner._constants import LEAST_LIMIT_SECONDS
from cellfeed_tuner._explain._bottleneck import (
    Bottleneck,
    StageModel,
    bottleneck,
    with_training_step,
)
from cellfeed_tuner._explain._storage_advice import StorageAdvice, StorageLayout, storage_advice
from cellfeed_tuner._explain._store_sample import StoreRequest, StoreSample
from cellfeed_tuner._measuring._measure import Measurement
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._selected import Selected

__all__ = ["Explained", "explain_throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Where the time of a cell goes, and what storage would change."""

    bottleneck: Bottleneck | None = None
    storage_advice: tuple[StorageAdvice, ...] = ()


def explain_throughput(
    process: MeasuringProcess[Collection] | MeasuringProcess[Selected],
    measured: Measurement,
    layout: StorageLayout,
    *,
    cells_per_second: float,
    step_seconds: float | None,
    block_sizes: Sequence[int],
    seconds: float,
    seed: int,
) -> Explained:
    """Say where the time of a configuration went, and what follows.

    Of other files, nothing is said if there are no ``block_sizes`` that a shuffled copy may be
    read with, or no ``seconds`` are left for encoding some cells as it would have them.
    """
    configuration = measured.configuration
    found = bottleneck(
        measured.round_statistics,
        model=StageModel(
            cores=usable_cores(),
            n_workers=configuration.num_workers,
            n_threads=measured.n_threads,
            n_function_threads=measured.n_function_threads,
        ),
        cells_per_round=measured.cells_per_round,
        cells_per_second=cells_per_second,
        seed=seed,
    )
    if found is None:
        return Explained()
    advice = tuple[StorageAdvice, ...]()
    if block_sizes and seconds > 0:
        request = StoreRequest(configuration=configuration, batch_size=layout.batch_size, seed=seed)
        outcome = process.run(request, limit_seconds=max(LEAST_LIMIT_SECONDS, seconds))
        for sample in outcome.events:
            if isinstance(sample, StoreSample):
                advice = storage_advice(found, configuration, layout, sample, block_sizes)
    if step_seconds is not None:
        found = with_training_step(found, step_seconds / layout.batch_size)
    return Explained(bottleneck=found, storage_advice=advice)
