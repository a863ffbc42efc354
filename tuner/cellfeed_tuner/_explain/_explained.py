"""Timing the stages of the chosen configuration, and what follows from that."""

from collections.abc import Sequence
from dataclasses import dataclass

from cellfeed import Collection
from cellfeed.machine import threads_per_process, usable_cores
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._explain._bottleneck import Bottleneck, bottleneck, with_training_step
from cellfeed_tuner._explain._stage_model import StageModel
from cellfeed_tuner._explain._stage_times import (
    StageRequest,
    StageRound,
    Transferred,
)
from cellfeed_tuner._explain._storage_advice import StorageAdvice, StorageLayout, storage_advice
from cellfeed_tuner._explain._store_sample import StoreSample
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._selected import Selected

__all__ = ["Explained", "explain_throughput"]

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 64
# A round takes so much longer than a fetch does when stages go on side by side.
_ROUND_OVER_FETCH = 2.5
_LEAST_LIMIT_SECONDS = 5.0
# Other rows than the search has read.
_FIRST_EPOCH = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Where the time of a cell goes, and what storage would change.

    Parameters
    ----------
    bottleneck
        Where it goes; None if there was no time to find out.
    storage_advice
        What other layouts may give, the best first.
    """

    bottleneck: Bottleneck | None = None
    storage_advice: tuple[StorageAdvice, ...] = ()


def explain_throughput(
    process: MeasuringProcess[Collection] | MeasuringProcess[Selected],
    configuration: Configuration,
    layout: StorageLayout,
    *,
    cells_per_second: float,
    step_seconds: float | None,
    block_sizes: Sequence[int],
    cache: CacheState,
    seconds: float,
    most_seconds: float,
    seed: int,
) -> Explained:
    """Time the stages of a configuration for a few seconds, and say what follows.

    Parameters
    ----------
    process
        Where they run.
    configuration, layout
        The settings, and the files.
    cells_per_second
        What was measured of all stages together.
    step_seconds
        How long training computes on a minibatch; None if that is not known.
    block_sizes
        Block sizes that a shuffled copy may be read with.
    cache
        State of the page cache that this was measured in.
    seconds, most_seconds
        Time to spend, and what a few rounds may take at most; if that does not suffice, nothing
        is timed.
    seed
        Fixes which rows are read.
    """
    fetch_seconds = layout.batch_size * configuration.fetch_factor / cells_per_second
    if most_seconds < (1 + _LEAST_ROUNDS) * _ROUND_OVER_FETCH * fetch_seconds:
        return Explained()
    outcome = process.run(
        StageRequest(
            configuration=configuration,
            batch_size=layout.batch_size,
            cache=cache,
            seconds=min(seconds, most_seconds),
            least_rounds=_LEAST_ROUNDS,
            most_rounds=_MOST_ROUNDS,
            seed=seed,
            first_epoch=_FIRST_EPOCH,
        ),
        limit_seconds=max(_LEAST_LIMIT_SECONDS, 2 * most_seconds),
    )
    transfers = [each.seconds for each in outcome.events if isinstance(each, Transferred)]
    found = bottleneck(
        [each for each in outcome.events if isinstance(each, StageRound)],
        model=StageModel(
            cores=usable_cores(),
            n_workers=configuration.num_workers,
            n_threads=threads_per_process(configuration.fetches_per_round),
        ),
        cells_per_second=cells_per_second,
        transfer_seconds=transfers[0] if transfers else (),
        seed=seed,
    )
    samples = [each for each in outcome.events if isinstance(each, StoreSample)]
    if found is None or not samples or (configuration.num_workers and not transfers):
        return Explained()
    advice = storage_advice(found, configuration, layout, samples[0], block_sizes)
    if step_seconds is not None:
        found = with_training_step(found, step_seconds / layout.batch_size)
    return Explained(bottleneck=found, storage_advice=advice)
