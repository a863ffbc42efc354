"""Searches on machines of which the truth is known: what measuring answers, and when."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.backtest.replay import entropy_of

from cellfeed_tuner import Configuration, Constraints, EntropyBits
from cellfeed_tuner._choose import Requirements
from cellfeed_tuner._measuring._process import Outcome
from cellfeed_tuner._measuring._timing import CountedRounds, Findings, Round, Started, TimingRequest
from cellfeed_tuner._searching._cost_model import Geometry, Space
from cellfeed_tuner._searching._replicates import Measurements
from cellfeed_tuner._searching._search import Search
from cellfeed_tuner._time_budget import TimeBudget

__all__ = [
    "BATCH_SIZE",
    "CountedRounds",
    "Findings",
    "Outcome",
    "Search",
    "Space",
    "TimingRequest",
    "entropy_of",
    "failed",
    "measurements_by",
    "n_uncounted",
    "search_on",
    "tahoe_like",
    "timed",
]

BATCH_SIZE = 64


def timed(
    seconds: Iterable[float],
    *,
    n_new: int = 0,
    waiting: float = 0.0,
    memory: int = 100,
    findings: Sequence[Findings] = (),
) -> Outcome:
    """The answer to a request whose rounds took so long; the first ``n_new`` do not count."""
    rounds = [
        Round(float(each), number >= n_new, waiting, None) for number, each in enumerate(seconds)
    ]
    events = (Started(0.0, 0.0, 0), *rounds, *findings)
    return Outcome(events=events, peak_memory_bytes=memory, failure=None)


def failed(said: str) -> Outcome:
    return Outcome(events=(), peak_memory_bytes=0, failure=said)


def n_uncounted(configuration: Configuration, n_cells: int) -> int:
    """The first rounds of each replicate that do not count."""
    n_rounds = n_cells // BATCH_SIZE // configuration.minibatches_per_round
    return CountedRounds.n_new(n_rounds, has_workers=configuration.num_workers > 0)


def measurements_by(
    process: Any,
    *,
    labels: Sequence[str] = ("plate",),
    cache: Any = "cold",
    seed: int = 0,
    budget: float = 60.0,
) -> Measurements:
    return Measurements(
        process=process,
        labels=labels,
        batch_size=BATCH_SIZE,
        cache=cache,
        seed=seed,
        budget=TimeBudget(budget, process.clock),
    )


def search_on(
    process: Any,
    entropies: Mapping[Any, Mapping[str, EntropyBits]],
    *,
    floor: float = 0.95,
    need: float | None = None,
    step_seconds: float | None = None,
    memory: int = 10**9,
    n_cells: int = 10**6,
    row_bytes: float = 100.0,
    geometry: Geometry | None = None,
    **options: Any,
) -> Search:
    """A search by a process, with a budget by its clock.

    Further options are those of `measurements_by` and `Search`.
    """
    of_search = {name: options.pop(name) for name in _OF_SEARCH & options.keys()}
    return Search(
        measurements=measurements_by(process, **options),
        requirements=Requirements(
            n_cells=n_cells,
            row_bytes=row_bytes,
            batch_size=BATCH_SIZE,
            constraints=Constraints(
                entropy_floor=floor,
                memory_bytes=memory,
                need_cells_per_second=(step_seconds and BATCH_SIZE / step_seconds) or need,
                step_seconds=step_seconds,
            ),
            entropies=entropies,
        ),
        geometry=geometry or Geometry(),
        **of_search,
    )


_OF_SEARCH = {"known", "model", "sampler", "space"}


def tahoe_like(n_cells: int, rows_per_chunk: float = 8.0) -> Geometry:
    """Of 14 files."""
    return Geometry(n_cells=n_cells, rows_per_chunk=rows_per_chunk, n_files=14)
