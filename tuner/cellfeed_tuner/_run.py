"""One run of ``autotune``: preparation, search, choice, comparison with the files, explanation."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from cellfeed import CategoricalColumn, CellDataset, ParameterError, SamplingStrategy
from cellfeed.interrupts import interrupts_held
from cellfeed_tuner._bottleneck import Bottleneck
from cellfeed_tuner._choose import Choice, nearest
from cellfeed_tuner._explain import explain_throughput
from cellfeed_tuner._interval import Estimate, quotient, scaled
from cellfeed_tuner._machine import Busy, Machine, describe_machine
from cellfeed_tuner._measuring._delivery import compare_with_files
from cellfeed_tuner._measuring._measurement import Measurement, measure_with
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._measuring._process import Measures, MeasuringError
from cellfeed_tuner._measuring._timing import MakeDataset, TimingRequest, own_read_options
from cellfeed_tuner._mixing import Mixing
from cellfeed_tuner._ranks import Ranks, Scaling
from cellfeed_tuner._request import Request
from cellfeed_tuner._result import AutotuneResult, Ranges, to_plain
from cellfeed_tuner._results import (
    ConfigurationResult,
    PrefetchResult,
    Recommended,
    SearchedStrategy,
    StorageOrder,
    Waiting,
)
from cellfeed_tuner._scaling import SCALING_SHARE, ScalingSearch
from cellfeed_tuner._searching._replicates import Measurements
from cellfeed_tuner._searching._search import Search, Timings
from cellfeed_tuner._storage_advice import StorageAdvice
from cellfeed_tuner._subject import Selected
from cellfeed_tuner._time_budget import Progress, TimeBudget

if TYPE_CHECKING:  # they load Optuna
    from cellfeed_tuner._history import Key, RunSettings

# Seconds and rounds for timing a user's training step. Chosen: as long as two replicates.
STEP_SECONDS, STEP_LEAST_ROUNDS = 1.0, 4
# Shares of the budget: for finding the bottleneck, and for choosing the prefetch depth of a
# server.
EXPLAIN_SHARE, PREFETCH_SHARE = 0.1, 0.35
# Most seconds for reading delivered cells again from their files.
COMPARING_SECONDS = 2.0
# If less of the budget is left for measuring, it has the time for pictures too.
LEAST_SEARCH_SHARE = 0.25
# Most seconds for compiling, on first use. Chosen: five times what it takes.
MOST_COMPILING_SECONDS = 60.0
# Share of the budget after which entropies are computed over fewer rows.
REPLAY_SHARE = 0.25
# Most cells of which obs columns that were not opened are read. Chosen: text takes some 50 bytes.
MOST_CELLS_OF_OTHERS = 5_000_000

# Prefetch depths, in fetches, to measure for files on servers.
PREFETCHES = (1, 2, 4, 8, 16)
# Most bytes in flight from a server. Source: `cellfeed.CellDataset`.
MOST_BYTES_PREFETCHED = 256 << 20

# A step that does nothing still has a time.
_LEAST_STEP_SECONDS = 1e-6


@dataclass(slots=True, kw_only=True)
class Run:
    """A run of ``autotune``, phase by phase; after Ctrl-C, it keeps what was found by then.

    Whatever takes long, it ends with an answer in time: what comes after the choice, and then
    measuring itself, is cut short.
    """

    request: Request
    process: Measures
    budget: TimeBudget
    on_progress: Progress
    make_dataset: MakeDataset = CellDataset
    is_kept: bool = field(init=False)
    interrupted: bool = field(default=False, init=False)
    _date: datetime = field(init=False)
    _machine: Machine = field(init=False)
    _mixing: Mixing = field(init=False)
    _order: StorageOrder | None = field(init=False)
    _found_cache: CacheState | Literal["unknown"] = field(init=False)
    _key: "Key | None" = field(default=None, init=False)
    _settings: "RunSettings" = field(init=False)
    _search: Search = field(init=False)
    _recommended: Recommended | None = field(default=None, init=False)
    _bottleneck: Bottleneck | None = field(default=None, init=False)
    _storage_advice: tuple[StorageAdvice, ...] = field(default=(), init=False)
    _prefetch_results: tuple[PrefetchResult, ...] = field(default=(), init=False)
    _scaling: Scaling | None = field(default=None, init=False)
    _n_cells_compared: int = field(default=0, init=False)
    _cut_short: str = field(default="", init=False)
    _mixed_less: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Let the dataset be dense if that was requested."""
        self.is_kept = self.make_dataset is CellDataset
        if self.request.dataset.dense:
            self.make_dataset = partial(self.make_dataset, dense=True)

    def prepare(self) -> None:
        """Collect what is known without measuring: the machine, and entropies."""
        request, self._date = self.request, datetime.now(UTC).astimezone()
        self.on_progress("machine", 0, 1)
        self._machine = describe_machine(request.files)
        self._mixing = request.mixing()
        self._mixing.replay(
            request.grid, self.on_progress, is_late=lambda: self.budget.left_until(REPLAY_SHARE) < 0
        )
        self._order = self._mixing.storage_order(request.space.block_sizes[-1])
        self._found_cache = request.prepare_cache()
        if request.selected is not None and self.is_kept:
            self._know(request.selected)

    def _know(self, selected: Selected) -> None:
        """Note what the result belongs to."""
        from cellfeed_tuner import _fingerprints, _history  # noqa: PLC0415 - Optuna

        request = self.request
        self._key = _fingerprints.key_of(selected, request.labels[0].name, self._machine)
        self._settings = _history.RunSettings(
            labels=[each.name for each in request.labels],
            batch_size=request.batch_size,
            cache=self._found_cache,
            dense=request.dataset.dense,
            ranks=request.ranks,
        )
        _history.cache_folder()  # if there is none, fail before anything is measured

    def start(self) -> None:
        """Wait for the measuring process, and time the training step if there is one.

        However long the start takes, half of the budget is left.
        """
        self.on_progress("start", 0, 1)
        self.process.start()
        pace: tuple[Measurement, float] | None = None
        if self.request.selected is not None:  # what reads these files is compiled on first use
            self.on_progress("compile", 0, 1)
            few = replace(self._shortest(), seconds=0.0, ranks=Ranks())
            began = self.budget.duration
            # What fails here fails again where it is measured, and is reported there.
            found = measure_with(self.process, few, limit_seconds=MOST_COMPILING_SECONDS)
            pace = found, self.budget.duration - began
        self.budget.end_start()
        if self.request.step is not None:
            seconds = self._step_seconds()
            if seconds is None:
                self._cut_short = f"no training step had ended after {self.budget.duration:.0f} s"
            else:
                self.request = self.request.with_step(seconds)
        self._search = self._new_search()
        if pace is not None:
            self._search.measurements.learn_pace(*pace)

    def _shortest(self) -> TimingRequest:
        """Return a request to time the smallest fetches of the grid, in the fewest processes."""
        request = self.request
        smallest = min(
            request.grid, key=lambda each: (each.num_workers, each.minibatches_per_round)
        )
        return TimingRequest(
            configuration=smallest,
            batch_size=request.batch_size,
            labels=(),
            cache=request.cache,
            seed=request.seed,
            least_rounds=STEP_LEAST_ROUNDS,
            seconds=STEP_SECONDS,
            make_dataset=self.make_dataset,
            ranks=request.ranks,
        )

    def _left_to_search(self) -> float:
        after = PREFETCH_SHARE if self.request.cache == "remote" else EXPLAIN_SHARE
        after += self._scaling_share
        budget = self.budget
        left = budget.left_until(1 - after) - budget.writing_seconds
        is_enough = left >= LEAST_SEARCH_SHARE * budget.seconds
        return left if is_enough else budget.left_to_measure

    @property
    def _scaling_share(self) -> float:
        return SCALING_SHARE if self.request.rank_counts else 0.0

    def _new_search(self) -> Search:
        request = self.request
        search = Search(
            measurements=Measurements(
                process=self.process,
                labels=[each.name for each in request.labels],
                batch_size=request.batch_size,
                cache=request.cache,
                seed=request.seed,
                budget=TimeBudget(self._left_to_search(), self.budget.clock),
                on_progress=self.on_progress,
                make_dataset=self.make_dataset,
                step=request.step,
                ranks=request.ranks,
                by_clock=request.constraints.need_cells_per_second is not None,
            ),
            requirements=request.requirements(self._mixing),
            space=request.space if request.space.is_large else None,
            study=request.study,
        )
        search.begin(self.request.grid)
        return search

    def _step_seconds(self) -> float | None:
        """Return the median time of a training step, in seconds; None if none ended in time.

        The first round, which may make or compile a model, does not count. Fetches are the
        smallest of the grid.
        """
        shortest = replace(self._shortest(), step=self.request.step)
        found = measure_with(
            self.process,
            shortest,
            limit_seconds=max(STEP_SECONDS, self.budget.left_to_measure / 2),
        )
        if not found.round_seconds:
            if found.failure:
                raise ParameterError(f"no training step ended: {found.failure}")
            return None
        computing = np.subtract(found.round_seconds, found.round_waiting_seconds)
        seconds = float(np.median(computing)) / shortest.configuration.minibatches_per_round
        return max(_LEAST_STEP_SECONDS, seconds)

    def fingerprint(self) -> dict[str, Any]:
        """Return what timings of the request, which is of a collection, belong to."""
        request = self.request
        if self._key is None:
            self._know(cast("Selected", request.selected))
        key = cast("Key", self._key)
        return {
            "data": key.data.digest,
            "machine": key.machine.digest,
            "versions": key.versions.digest,
            **to_plain(self._settings),
            "seed": request.seed,
            "grid": [dict(each) for each in self.request.grid],
        }

    def profile(
        self, n_rounds: int, known: Timings, keep: Callable[[int, Measurement], None]
    ) -> None:
        """Time the whole grid in rounds, choose, and explain; see `Search.profile`."""
        self._search.profile(n_rounds, known, keep, self.on_progress)
        self._compare_with_plans()
        self._choose()
        self._compare_with_files()
        self._explain()
        self._look_at_other_columns()

    def search(self) -> None:
        """Search, choose, and explain."""
        try:
            self._measure()
            self._compare_with_plans()
            self._choose()
            self._choose_prefetch()
            self._ask_how_many()
            self._compare_with_files()
            self._explain()
            self._look_at_other_columns()
            self._keep()
        except KeyboardInterrupt:
            if not len(self._search.measurements):
                raise
            self.interrupted = True
            if self._recommended is None:
                self._choose()

    def _measure(self) -> None:
        try:
            self._search.measure()
            self._search.survey()
        except MeasuringError as error:
            if not len(self._search.measurements):
                raise
            self._cut_short = str(error)

    def _compare_with_plans(self) -> None:
        """Note which loaders other than cellfeed's own deliver something else than they plan."""
        if self.request.selected is not None:
            return
        measurements = self._search.measurements
        for each in self._search.results(self._search.timed):
            if fault := self._mixing.fault(each):
                measurements.faults.setdefault(each.configuration, fault)

    def result(self, strategy: SamplingStrategy | None) -> AutotuneResult:
        """Return what was found, with the strategy as the user passed it."""
        request, measured = self.request, self._search.measurements
        faults, results = measured.faults, self._results()
        recommended = None if faults else self._recommended
        constraints = request.constraints
        return AutotuneResult(
            machine=self._machine,
            dataset=request.dataset,
            constraints=constraints,
            cache=self._found_cache,
            configurations=tuple(
                self._mixing.judged(self._compared(each), faults.get(each.configuration))
                for each in results
            ),
            recommended=recommended,
            nearest=None if recommended or faults else nearest(results, constraints),
            seconds=self.budget.duration,
            date=self._date,
            storage_order=self._order,
            bottleneck=self._bottleneck,
            storage_advice=self._storage_advice,
            ranges=self._ranges() if request.space.is_large else None,
            busy=Busy.of(measured.others),
            interrupted=self.interrupted,
            cut_short=self._cut_short,
            loader_fault=next((f"{each}: {fault}" for each, fault in faults.items()), None),
            n_cells_compared=self._n_cells_compared,
            strategy=SearchedStrategy.of(strategy) if strategy else None,
            prefetch_results=self._prefetch_results,
            ranks=request.ranks,
            scaling=self._scaling,
            mixed_less=self._mixed_less,
            n_discarded=measured.n_discarded,
            n_unlisted=0 if request.space.is_large else len(self.request.grid) - len(results),
        )

    def _results(self) -> list[ConfigurationResult]:
        """Return the results of all configurations, or of measured ones if they are not listed."""
        search = self._search
        is_listed = search.space is None and search.requirements.is_planned
        return search.results(self.request.grid if is_listed or not search.timed else search.timed)

    def _compared(self, each: ConfigurationResult) -> ConfigurationResult:
        """Return a result with its throughput relative to the recommended one.

        Unless a throughput is needed, all are in the order of these: measured ones at the rate of
        the recommended one, since the machine may have been faster or slower at other times.
        """
        chosen = self._recommended
        if chosen is None or chosen.cells_per_second is None or self._search.measurements.faults:
            return each
        if each.configuration in chosen.compared:
            each = replace(each, status="compared")
        if each.configuration == chosen.configuration:
            return replace(
                each,
                relative=Estimate(1.0, 1.0, 1.0),
                cells_per_second=each.cells_per_second and chosen.cells_per_second,
            )
        if self.request.constraints.need_cells_per_second is not None and each.cells_per_second:
            return replace(each, relative=quotient(each.cells_per_second, chosen.cells_per_second))
        if not self._search.is_predictable(each.configuration):
            return each
        relative = self._search.ordering.ratio(each.configuration, chosen.configuration)
        speed = each.cells_per_second
        if speed is not None and relative is not None:
            speed = scaled(chosen.cells_per_second, relative)
        return replace(each, relative=relative, cells_per_second=speed)

    def _choose(self) -> None:
        choice = self._search.choose(self._results())
        if choice is None:
            return
        stepped = None if self.interrupted or self._cut_short else self._search.with_step(choice)
        measurements = self._search.measurements
        configuration, reason = choice.configuration, choice.reason
        if configuration in self._search.slowed:
            reason += f" It {self._search.slowed[configuration]}."
        self._recommended = Recommended(
            configuration=configuration,
            basis=choice.basis,
            cells_per_second=choice.speed,
            peak_memory_bytes=choice.result.peak_memory_bytes,
            reason=reason,
            waiting=self._waiting(choice, stepped),
            rivals=choice.rivals,
            chance_of_faster=choice.chance_of_faster,
            longest_seconds=measurements.longest_seconds(configuration),
            start_seconds=measurements.start_seconds(configuration),
        )

    def _waiting(self, choice: Choice, stepped: Measurement | None) -> Waiting | None:
        asked = self._search.requirements.constraints
        if asked.step_seconds is None or asked.need_cells_per_second is None:
            return None
        if choice.speed is None:
            return None
        return Waiting(
            share=stepped.waiting_share if stepped else None,
            n_rounds=len(stepped.round_seconds) if stepped else 0,
            expected_share=max(0.0, 1 - choice.speed.value / asked.need_cells_per_second),
        )

    def _choose_prefetch(self) -> None:
        """Choose how many fetches to prefetch from a server: a search among depths."""
        request, recommended = self.request, self._recommended
        if recommended is None or request.cache != "remote" or recommended.basis == "predicted":
            return
        configuration, left = recommended.configuration, self._left
        left -= self._scaling_share * self.budget.seconds
        fetch_size = request.batch_size * configuration.fetch_factor
        rows_per_cell = 1 if request.selected is None else request.selected.rows_per_cell
        rank_bytes = fetch_size * rows_per_cell * request.dataset.stored_bytes_per_cell
        depths = depths_to_measure(
            n_fetches=request.n_cells // fetch_size // configuration.fetches_per_round,
            fetch_bytes=request.ranks.n_local * rank_bytes,
            memory_bytes=request.constraints.memory_bytes,
        )
        # A `make_dataset` with a depth of its own has chosen it.
        has_own = own_read_options(self.make_dataset).prefetch is not None
        if left <= 0 or has_own or len(depths) == 1:
            return
        measurements = replace(
            self._search.measurements, budget=TimeBudget(left, self.budget.clock), by_clock=True
        )
        fastest = replace(request.constraints, need_cells_per_second=None, step_seconds=None)
        search = Search(
            measurements=measurements,
            requirements=replace(self._search.requirements, constraints=fastest),
        )
        search.run(configuration.changed(prefetch=depth) for depth in depths)
        results = search.results(search.timed)
        self._prefetch_results = tuple(
            PrefetchResult(
                prefetch=cast("int", each.configuration["prefetch"]),
                cells_per_second=each.cells_per_second,
                n_rounds=each.n_rounds,
                n_turns=measurements.n_turns(each.configuration),
                peak_memory_bytes=each.peak_memory_bytes or 0,
            )
            for each in results
        )
        choice = search.choose(results)
        if choice is not None and choice.basis == "compared":
            memory = max(each.peak_memory_bytes or 0 for each in (recommended, choice.result))
            best = cast("int", choice.configuration["prefetch"])
            self._recommended = replace(recommended, prefetch=best, peak_memory_bytes=memory)

    def _ask_how_many(self) -> None:
        """Find how many ranks are fed with the recommended configuration."""
        request, recommended = self.request, self._recommended
        step_seconds = request.rank_step_seconds
        if not request.rank_counts or recommended is None or step_seconds is None:
            return
        if self._cut_short or recommended.basis == "predicted":
            note = "there was no time to measure; a larger --budget measures it"
            self._scaling = Scaling(step_seconds=step_seconds, note=note)
            return
        measurements = self._search.measurements

        depth = {} if recommended.prefetch is None else {"prefetch": recommended.prefetch}
        self._scaling = ScalingSearch(
            timed=measurements.timed,
            configuration=recommended.configuration.changed(**depth),
            counts=request.rank_counts,
            step_seconds=step_seconds,
            batch_size=request.batch_size,
            left=lambda: self._left - EXPLAIN_SHARE * self.budget.seconds,
            has_threads=request.selected is not None,
            cache=request.cache,
        ).run()

    def _compare_with_files(self) -> None:
        left, measured = self._left, self._search.measurements
        if (selected := self.request.selected) is None or left <= 0:
            return
        found = compare_with_files(
            selected.collection, measured.sampled, most_seconds=min(COMPARING_SECONDS, left)
        )
        for configuration, fault in found.faults.items():
            measured.faults.setdefault(configuration, fault)
        self._n_cells_compared = found.n_cells

    def _explain(self) -> None:
        """Find the bottleneck and, for shuffled blocks, whether loading or a copy is faster."""
        request, recommended, selected = self.request, self._recommended, self.request.selected
        # Other loaders, and several ranks, have no counters.
        if recommended is None or selected is None or request.ranks.n_local > 1:
            return
        speed, seconds = recommended.cells_per_second, self._left
        if self._search.measurements.faults or recommended.basis == "predicted" or speed is None:
            return
        self.on_progress("explain", 0, 1)
        # How other strategies, or servers, would read another layout is not known.
        may_advise = not (selected.strategy or self._found_cache == "remote" or self._cut_short)
        is_shuffled = self._order is not None and self._order.already_shuffled
        block_sizes = () if is_shuffled else request.space.block_sizes
        self._bottleneck, self._storage_advice = explain_throughput(
            self.process,
            self._search.measurements[recommended.configuration],
            batch_size=request.batch_size,
            cells_per_second=speed.value,
            paths=request.dataset.paths,
            waiting=None if recommended.waiting is None else recommended.waiting.share,
            step_seconds=request.constraints.step_seconds,
            n_cells=request.dataset.n_cells,
            block_sizes=block_sizes if may_advise else None,
            seconds=seconds,
            seed=request.seed,
        )

    def _look_at_other_columns(self) -> None:
        """Find obs columns that are mixed less than labels have to be, while there is time."""
        request, recommended, selected = self.request, self._recommended, self.request.selected
        if recommended is None or selected is None:
            return
        collection, labels = selected.collection, {each.name for each in request.labels}
        names = list(collection.obs)
        if self._found_cache != "remote" and len(collection) <= MOST_CELLS_OF_OTHERS:
            names += collection.obs_columns
        found, floor = dict[str, float](), request.constraints.entropy_floor
        for name in dict.fromkeys(each for each in names if each not in labels):
            if self._left <= 0:
                break
            with suppress(Exception):  # it cannot be read, or there is nothing to mix
                column = collection.read_obs([name])[name]
                if name not in collection.obs and not isinstance(column, CategoricalColumn):
                    continue
                label = selected.label(name, request.plans.drawn_rows, column)
                mixing = Mixing([label], request.plans, entropy_floor=floor)
                bits = mixing[recommended.configuration.plan_settings][name]
                found[name] = bits.share_of_random
        self._mixed_less = {
            name: share
            for name, share in sorted(found.items(), key=itemgetter(1))
            if not request.constraints.mixes(share)
        }

    def _keep(self) -> None:
        """Keep what was found for later runs."""
        search, recommended = self._search, self._recommended
        if self._key is None or search.measurements.faults or not len(search.measurements):
            return
        from cellfeed_tuner import _history  # noqa: PLC0415 - Optuna

        run = _history.EarlierRun(
            key=self._key,
            settings=self._settings,
            began=self._date.astimezone(UTC).isoformat(timespec="milliseconds"),
            path=self.request.dataset.paths[0],
            choice=None if recommended is None else recommended.configuration,
            cells_per_second=None if recommended is None else recommended.cells_per_second,
        )
        with interrupts_held():
            _history.record(_history.cache_folder(), run, search.ended_trials())

    @property
    def _left(self) -> float:
        """Seconds left for measuring."""
        return self.budget.left - self.budget.writing_seconds

    def _ranges(self) -> Ranges:
        space = self.request.space
        return Ranges(
            block_sizes=(space.block_sizes[0], space.block_sizes[-1]),
            fetch_factors=(space.fetch_factors[0], space.fetch_factors[-1]),
            workers=(space.workers[0], space.workers[-1]),
            n_configurations=space.size,
            n_considered=self._search.n_considered,
        )


def depths_to_measure(*, n_fetches: int, fetch_bytes: float, memory_bytes: float) -> list[int]:
    """Return the depths, ascending, that differ in effect and fit in memory; always the first.

    Parameters
    ----------
    n_fetches, fetch_bytes
        Fetches that one process reads in an epoch, and the stored bytes of one.
    memory_bytes
        Most bytes to prefetch.

    Examples
    --------
    >>> depths_to_measure(n_fetches=100, fetch_bytes=1e6, memory_bytes=1e10)
    [1, 2, 4, 8, 16]
    >>> depths_to_measure(n_fetches=4, fetch_bytes=1e6, memory_bytes=1e10)
    [1, 2, 4]
    >>> depths_to_measure(n_fetches=100, fetch_bytes=100e6, memory_bytes=1e10)
    [1, 2, 4]
    >>> depths_to_measure(n_fetches=100, fetch_bytes=1e6, memory_bytes=3e6)
    [1, 2]
    """
    first, *others = PREFETCHES
    # A depth that a smaller one reaches as well is no other depth.
    most = min(n_fetches - 1, MOST_BYTES_PREFETCHED / max(1.0, fetch_bytes))
    return [first] + [
        depth
        for less, depth in zip(PREFETCHES, others, strict=False)
        if less < most and depth * fetch_bytes <= memory_bytes
    ]
