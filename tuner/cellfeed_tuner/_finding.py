"""A search and what follows: the choice, the comparison with the files, and the explanation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._explain._explained import Explained, explain_throughput
from cellfeed_tuner._history._notes import Notes
from cellfeed_tuner._interruption import interrupts_held_back
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._measure import Measurement
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._planning._recommend import Choice
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._request import CollectionRequest, Request
from cellfeed_tuner._results._configuration_result import ConfigurationResult
from cellfeed_tuner._results._recommended import Constraints, PrefetchResult, Recommended, Waiting
from cellfeed_tuner._searching._measurements import Measurements
from cellfeed_tuner._searching._prefetch import PrefetchSearch, depths_to_measure
from cellfeed_tuner._searching._search import Search

__all__ = ["Explaining", "Found", "find", "since"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search and all that follows have found, or have until Ctrl-C came."""

    results: list[ConfigurationResult]
    recommended: Recommended | None
    explained: Explained
    n_cells_compared: int
    interrupted: bool
    prefetch_results: tuple[PrefetchResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explaining:
    """Finds where the time of a choice goes.

    Parameters
    ----------
    process, request
        Where stages run, and what was asked.
    already_shuffled
        Whether cells lie in random order.
    cache
        State of the page cache that the choice was measured in.
    seconds
        Time to spend.
    ends
        When the budget ends, by `time.perf_counter`.
    on_progress
        Called when it begins.
    """

    process: MeasuringProcess[Any]
    request: Request
    already_shuffled: bool
    cache: CacheState
    seconds: float
    ends: float
    on_progress: Progress

    def explain(self, recommended: Recommended, measured: Measurement) -> Explained:
        """Return where the time goes, and, for shuffled blocks, what other storage may give."""
        request = self.request
        # What other loaders, and several ranks, do meanwhile is not counted.
        if not isinstance(request, CollectionRequest) or request.ranks.n_local > 1:
            return Explained()
        self.on_progress("explain", 0, 1)
        # How other strategies would read another layout is not known, nor how servers would.
        is_known = request.selected.strategy is None and self.cache != "remote"
        return explain_throughput(
            self.process,
            measured,
            request.layout(already_shuffled=self.already_shuffled),
            cells_per_second=recommended.cells_per_second.value,
            step_seconds=request.constraints.step_seconds,
            block_sizes=request.space.block_sizes if is_known else (),
            seconds=max(self.seconds, self.ends - time.perf_counter()),
            seed=request.seed,
        )


def find(
    search: Search,
    grid: Sequence[Configuration],
    explaining: Explaining,
    notes: Notes | None,
) -> Found:
    """Search, compare what came out with the files, explain the choice, and keep it all."""
    request = explaining.request
    collection = request.selected.collection if isinstance(request, CollectionRequest) else None
    measurements, constraints = search.measurements, search.requirements.constraints

    def results() -> list[ConfigurationResult]:
        # Of ranges, and where nothing else is known, only what was measured is shown.
        is_known = search.space is None and search.requirements.is_planned
        is_listed = is_known or not search.timed
        return search.results(grid if is_listed else search.timed)

    recommended, explained, n_cells_compared = None, Explained(), 0
    prefetch_results = tuple[PrefetchResult, ...]()
    interrupted = False
    try:
        search.run(grid)
        search.survey()
        choice = search.choose(results())
        recommended = choice and _recommended(
            choice, search.with_step(choice), constraints, measurements
        )
        if recommended is not None and request.cache == "remote":
            recommended, ahead = _read_ahead(recommended, search, explaining)
            prefetch_results = ahead.results()
        if collection is not None:
            n_cells_compared = measurements.compare_with_files(collection)
        if recommended is not None and not measurements.faults:
            explained = explaining.explain(
                recommended, measurements.fair(recommended.configuration)
            )
        with interrupts_held_back():
            if notes is not None and not measurements.faults:
                notes.keep(search.study(), recommended, is_short=search.is_short)
    except KeyboardInterrupt:
        if not len(measurements):
            raise
        interrupted = True
    if interrupted and recommended is None:
        choice = search.choose(results())
        recommended = choice and _recommended(choice, None, constraints, measurements)
    return Found(
        results=results(),
        recommended=None if measurements.faults else recommended,
        explained=explained,
        n_cells_compared=n_cells_compared,
        interrupted=interrupted,
        prefetch_results=prefetch_results,
    )


def _read_ahead(
    recommended: Recommended, search: Search, explaining: Explaining
) -> tuple[Recommended, PrefetchSearch]:
    """Return the choice with how many fetches to read ahead, and what that rests on."""
    configuration, request = recommended.configuration, explaining.request
    assert isinstance(request, CollectionRequest)  # noqa: S101 - no other reads from servers
    fetch_size = request.batch_size * configuration.fetch_factor
    memory_bytes = request.constraints.memory_bytes
    ahead = PrefetchSearch(
        measurements=search.measurements,
        configuration=configuration,
        memory_bytes=memory_bytes,
        ends=explaining.ends,
    )
    depths = depths_to_measure(
        n_fetches=request.selected.n_drawn
        // request.ranks.n_total
        // fetch_size
        // configuration.fetches_per_round,
        fetch_bytes=request.ranks.n_local
        * fetch_size
        * request.selected.collection.stored_row_bytes(),
        memory_bytes=memory_bytes,
    )
    # Who makes data sets with a depth of their own has chosen it.
    if "prefetch" not in getattr(search.measurements.make_dataset, "keywords", {}):
        ahead.run(depths)
    best = ahead.best()
    if best is None:
        return recommended, ahead
    memory = max(recommended.peak_memory_bytes, ahead.memory_of(best))
    return replace(recommended, prefetch=best, peak_memory_bytes=memory), ahead


def since(started: float) -> float:
    """Return the seconds since a moment of `time.perf_counter`."""
    return time.perf_counter() - started


def _recommended(
    choice: Choice,
    stepped: Measurement | None,
    asked: Constraints,
    measurements: Measurements,
) -> Recommended:
    reason = choice.reason
    if choice.result.status != "measured":
        reason += (
            f" This rests on {choice.result.n_rounds} whole fetches per worker, which are few."
        )
    return Recommended(
        configuration=choice.result.configuration,
        cells_per_second=choice.speed,
        measured_in_turns=measurements.is_from_turns(choice.result.configuration),
        peak_memory_bytes=choice.result.peak_memory_bytes or 0,
        reason=reason,
        waiting=_waiting(choice.speed.value, stepped, asked),
        rivals=choice.rivals,
    )


def _waiting(
    cells_per_second: float, stepped: Measurement | None, asked: Constraints
) -> Waiting | None:
    if asked.step_seconds is None or asked.need_cells_per_second is None:
        return None
    return Waiting(
        share=stepped.waiting_share if stepped else None,
        n_rounds=len(stepped.round_seconds) if stepped else 0,
        expected_share=max(0.0, 1 - cells_per_second / asked.need_cells_per_second),
    )
