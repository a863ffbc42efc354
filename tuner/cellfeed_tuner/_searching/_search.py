"""Spending a time budget: every pair of sizes once, then the best few in turns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from cellfeed_tuner._choose import NEED_MARGIN, Choice, Ordering, Requirements, choose
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    LEAST_CHANCE,
    LEAST_SUSTAINED_SECONDS,
    LEAST_TURNS,
    PROFILE_SECONDS,
    REPLICATE_SECONDS,
)
from cellfeed_tuner._interval import Estimate, is_same
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, Measurement
from cellfeed_tuner._measuring._timing import CountedRounds
from cellfeed_tuner._results import ConfigurationResult, Status
from cellfeed_tuner._searching._model import CLEARLY_FASTER, Model
from cellfeed_tuner._searching._replicates import Measurements, untimed
from cellfeed_tuner._searching._space import Space
from cellfeed_tuner._time_budget import Progress, silent

if TYPE_CHECKING:  # they load Optuna
    import optuna
    from optuna.trial import FrozenTrial

    from cellfeed_tuner._searching._study import Study

# Share of the budget until which pairs of sizes are timed once. Chosen: the rest is for comparing.
PROFILE_SHARE = 0.5
# Pairs that are timed however little of the budget they leave.
FEWEST_TIMED = 3
# Times as long as alone, from which on a machine is busy. Chosen: half of the processors are taken.
BUSY_SLOWDOWN = 2.0
# Probability of being better than the leader from which on a configuration may be the best, and
# most of the budget that a first timing may take of one that may, and of one that may not. Chosen:
# most take a hundredth.
MAY_BE_BEST, MOST_SHARE, MOST_OF_OTHERS_SHARE = 0.01, 0.25, 0.05
# Most rivals of a turn. Chosen: more of them would seldom meet the leader.
MOST_RIVALS = 2
# Pairs of sizes replayed from a large space if no known pair mixes well enough.
MOST_REPLAYED = 6
# Share of the budget until which nearly feasible configurations are timed if none is feasible.
SURVEY_UNTIL = 0.8
# Share of the budget until which turns run if a training step is measured afterwards.
TURNS_UNTIL_WITH_STEP = 0.75
# Share of the budget for measuring the choice without a break, which is done if the search has so
# many times as much, and if at least the last share of it is left.
SUSTAINED_SHARE, LONG_BUDGETS, SUSTAINED_LEFT = 0.08, 4.0, 0.6
# A first timing is stopped after this share of the budget until one has delivered, but not before
# so many seconds. Chosen: the speed of the disk is unknown then.
FIRST_LIMIT_SHARE, LEAST_FIRST_LIMIT_SECONDS = 0.125, 3.0
# Expected throughput before anything is timed. Chosen: what a slow disk gives with large fetches.
UNKNOWN_CELLS_PER_SECOND = 5000.0
# Seconds beyond the expected time after which a loop with a training step is stopped.
SLACK_SECONDS = 1.0
# A loader has slowed down if the second half of a long measurement has less than this share of the
# throughput that was expected. Chosen: beyond the noise of a busy machine.
SLOWED_SHARE = 0.7
# Expected duration of a timing of a profile before there is any. Chosen: a process starts, and a
# fetch or two.
EXPECTED_SECONDS = 2.0
# A predicted throughput is called unknown if the upper end of its interval is this many times the
# lower end. Chosen: it says nothing then.
VAGUE_INTERVAL = 100

_OUT_OF_BUDGET: tuple[Status, str] = ("out of budget", "")
_BELOW_FLOOR: tuple[Status, str] = ("below entropy floor", "")
_MAY_RUN = {"too slow", "mixes less", "below entropy floor", "out of budget"}


Timings = Iterable[tuple[int, Measurement]]
"""Timings of a profile, each with the number of its round."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search, from the first measurement to the last.

    Parameters
    ----------
    space
        All configurations, where there are too many to list them; None otherwise.
    study
        Where to write the search; see `autotune`.
    """

    measurements: Measurements
    requirements: Requirements
    space: Space | None = None
    study: "str | optuna.Study | None" = None
    ordering: Ordering = field(init=False)
    slowed: dict[Configuration, str] = field(default_factory=dict, init=False)
    _not_timed: dict[Configuration, tuple[Status, str]] = field(default_factory=dict, init=False)
    _model: Model = field(init=False)
    _study: "Study | None" = field(default=None, init=False)

    def run(self, grid: Iterable[Configuration]) -> None:
        """Do what `begin` and `measure` do."""
        self.begin(grid)
        self.measure()

    def begin(self, grid: Iterable[Configuration]) -> None:
        """Split the grid into candidates, and others with the reason why they are none."""
        requirements, need = self.requirements, self._need
        self._not_timed = {each: requirements.obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        self._model = Model(
            runnable,
            candidates,
            need=need and NEED_MARGIN * need,
            worth=requirements.worth,
            seed=self.measurements.seed,
        )
        self.ordering = Ordering(self._model.ratio, self.measurements.n_turns)
        if not candidates and self.space is not None:
            most = [each for each in self.space.best_mixed() if not requirements.obstacle(each)]
            self._add(most[:MOST_REPLAYED])

    def measure(self) -> None:
        """Profile, compare, and measure the best for longer, until it stays as fast."""
        while (each := self._next_pair()) is not None:
            self._time([each], PROFILE_SECONDS)
        # The best of them with each number of workers, and with each value of other settings.
        best = self._model.leader
        for each in [e for e in self._model.candidates if best and e.is_like(best)]:
            alike = [other for other in self.measurements if other.is_like(each)]
            has_workers = any(each.num_workers == other.num_workers for other in alike)
            has_others = any(each.others == other.others for other in alike)
            if not (has_workers and has_others) and self._affords(each):
                self._time([each], PROFILE_SECONDS)
        while True:
            self._compare()
            best = self._model.leader
            self._sustain()
            if self._model.leader == best:
                break
        # What was not timed because others are better.
        share = self.requirements.share
        for each, (chance, _) in self._model.prospects().items():
            if each in self._not_timed and chance < LEAST_CHANCE:
                is_less = self._need is not None and best and share(each) <= share(best)
                self._not_timed[each] = "mixes less" if is_less else "too slow", ""

    def profile(
        self,
        n_rounds: int,
        known: Timings,
        keep: Callable[[int, Measurement], None],
        on_progress: Progress,
    ) -> None:
        """Time everything that can run, also what mixes too little, in rounds of random order.

        What is known is not timed again; each new timing is passed to ``keep`` at once.
        """
        measurements, done = self.measurements, set[tuple[int, Configuration]]()
        measurements.on_progress = silent  # theirs tells of a budget
        for turn, found in known:
            measurements.restore(found, turn)
            done.add((turn, found.configuration))
        runnable = sorted(
            each for each, (status, _) in self._not_timed.items() if status in _MAY_RUN
        )
        rng = np.random.default_rng(measurements.seed)
        turns = [
            (turn, runnable[k])
            for turn in range(1, n_rounds + 1)
            for k in rng.permutation(len(runnable)).tolist()
        ]
        open_turns = [each for each in turns if each not in done]
        began, took = measurements.budget.spent, dict[Configuration, float]()
        for number, (turn, each) in enumerate(open_turns):
            spent = measurements.budget.spent - began
            usual = sum(took.values()) / len(took) if took else EXPECTED_SECONDS
            left = sum(took.get(one, usual) for _, one in open_turns[number:])
            on_progress("profile", spent, spent + left, f"round {turn} of {n_rounds}: {each}")
            if each in measurements and measurements[each].failure:
                continue
            measurements.turn = turn
            found = measurements.take(each, in_turn=True, seconds=PROFILE_SECONDS)
            took[each] = measurements.budget.spent - began - spent
            keep(turn, found)
        for each in measurements:
            self._not_timed.pop(each, None)
            self._model.tell(each, measurements.replicates(each))
            self.requirements.learn(measurements[each])

    # What is timed next.

    def _next_pair(self) -> Configuration | None:
        """Return the pair of sizes to time for the first time: what it may gain for its time.

        Until one has delivered, the widest that is expected in time; the first of all is the
        widest, unless the machine is busy.
        """
        timed, candidates = self.measurements, self._model.candidates
        fewest = min((each.num_workers for each in candidates), default=0)
        new = [e for e in candidates if e.num_workers == fewest and e not in timed]
        # However little time there is, something is timed, and a few while there is any.
        n, budget = len(timed), timed.budget
        is_one_of_few = not n or (n < FEWEST_TIMED and budget.left > 0)
        in_time = [each for each in new if self._affords(each)]
        if n or timed.slowdown >= BUSY_SLOWDOWN:
            new = in_time or (new if is_one_of_few else [])
        if not timed.has_delivered():
            if n and not in_time:
                return min(new, key=lambda e: self._seconds_of(e, PROFILE_SECONDS), default=None)
            return max(new, key=lambda e: (e.fetch_factor, e.block_size), default=None)
        if not new or (budget.left_until(PROFILE_SHARE) <= 0 and not is_one_of_few):
            return None
        if (proposed := self._trials.propose(self._accepts)) is not None:
            return proposed
        seconds = {each: self._seconds_of(each, PROFILE_SECONDS) for each in new}
        return max(new, key=lambda each: (self._worth(each, PROFILE_SECONDS), -seconds[each]))

    def _accepts(self, proposed: Configuration) -> bool:
        """Return whether what a user's sampler proposes can be timed next; it may be of a space."""
        if self.space is not None and proposed in self.space:
            self._add([proposed])
        elif proposed.num_workers > min(each.num_workers for each in self._model.candidates):
            return False
        is_new = proposed in self._model.candidates and proposed not in self.measurements
        return is_new and self._affords(proposed)

    def _compare(self) -> None:
        """Time the leader and its rivals in turns, until it leads or the time is over."""
        rng = np.random.default_rng(self.measurements.seed)
        while turn := self._next_turn():
            rng.shuffle(turn)
            self._time(turn, REPLICATE_SECONDS, in_turn=True)
            for each in self._trials.prune(turn):
                self._model.withdraw(each)
            leader = self._model.leader
            if self.space is not None and leader is not None:
                self._add(self.space.around(leader))

    def _next_turn(self) -> list[Configuration]:
        """Return the leader and the rivals that may gain most for their time; empty at the end."""
        timed, leader, prospects = self.measurements, self._model.leader, self._model.prospects()
        if leader is None or (leader in timed and not timed.has_delivered(leader)):
            return []
        # A loader that slows down is fast for as long as a turn takes.
        rivals = [
            each
            for each in prospects
            if each not in self.slowed and (each not in timed or timed.has_delivered(each))
        ]
        has_need = self._need is not None
        open_rivals = [each for each in rivals if prospects[each][0] >= LEAST_CHANCE]
        if not has_need:
            ratios = {each: self._model.ratio(each, leader) for each in open_rivals}
            open_rivals = [each for each, ratio in ratios.items() if not (ratio and is_same(ratio))]
        if not open_rivals and timed.n_turns(leader) >= LEAST_TURNS:
            return []
        open_rivals.sort(key=lambda e: -self._worth(e, REPLICATE_SECONDS))
        # Without any, the runner-up shows how much the leader leads.
        costs = self._model.seconds_per_cell()
        runner_up = sorted(rivals, key=lambda each: (-prospects[each][0], costs[each]))[:1]
        turn = [leader, *(open_rivals[:MOST_RIVALS] or runner_up)]
        if has_need and open_rivals and timed.has_delivered(leader):
            del turn[0]  # each has to keep up, and is not compared
        while turn and sum(self._seconds_of(e, REPLICATE_SECONDS) for e in turn) > self._left:
            turn.pop()
        return turn

    def _worth(self, configuration: Configuration, seconds: float) -> float:
        """Return what timing a configuration may gain in a second."""
        _, gain = self._model.prospects().get(configuration, (0.0, 0.0))
        return gain / self._seconds_of(configuration, seconds)

    @property
    def _need(self) -> float | None:
        return self.requirements.constraints.need_cells_per_second

    @property
    def _trials(self) -> "Study":
        if self._study is None:
            from cellfeed_tuner._searching import _study  # noqa: PLC0415 - loads Optuna

            ends = self.space.ends() if self.space else ()
            known = [*self._not_timed, *self.measurements, *ends]
            self._study = _study.Study(self.study, known, has_ranges=self.space is not None)
        return self._study

    # Timing.

    def _time(
        self, turn: Sequence[Configuration], seconds: float, *, in_turn: bool = False
    ) -> None:
        """Time some configurations, one after the other."""
        self.measurements.turn += 1
        for each in turn:
            self._measure(each, in_turn=in_turn, seconds=seconds)

    def _measure(self, configuration: Configuration, **how: "float | None") -> Measurement:
        """Measure one replicate of a configuration, and update what is known."""
        budget, requirements = self.measurements.budget, self.requirements
        if not self.measurements.has_delivered():
            first = max(FIRST_LIMIT_SHARE * budget.seconds, LEAST_FIRST_LIMIT_SECONDS)
            first = self.measurements.overhead_seconds + first * self.measurements.slowdown
            how = {"limit_seconds": min(first, budget.limit_seconds), **how}
        found = self.measurements.take(configuration, **how)  # type: ignore[arg-type]
        self._not_timed.pop(configuration, None)
        replicates = self.measurements.replicates(configuration)
        self._model.tell(configuration, replicates)
        last = replicates[-1] if found.round_seconds and replicates else None
        self._trials.report(configuration, last and last.seconds_per_cell, self.measurements.turn)
        if found.failure or found.peak_memory_bytes > requirements.constraints.memory_bytes:
            self._model.withdraw(configuration)
        self._withdraw_over_memory()
        if requirements.learn(found):
            for each in self._model.candidates:
                if not requirements.mixes(each):
                    self._model.withdraw(each)
        return found

    def _withdraw_over_memory(self) -> None:
        """Leave out what would take too much memory.

        That lies on the line through the smallest and the largest buffers that were timed.
        """
        peaks = dict[int, int]()
        for each in self.measurements:
            size, peak = each.minibatches_in_memory, self.measurements[each].peak_memory_bytes
            peaks[size] = min(peak, peaks.get(size, peak))
        few, many = min(peaks), max(peaks)
        of_minibatch = max(0.0, (peaks[many] - peaks[few]) / max(1, many - few))
        for each in [e for e in self._model.candidates if e not in self.measurements]:
            needed = peaks[few] + of_minibatch * (each.minibatches_in_memory - few)
            is_known = few < many or each.minibatches_in_memory > few
            if is_known and needed > self.requirements.constraints.memory_bytes:
                self._model.withdraw(each)
                self._not_timed[each] = "over memory", f"it would take about {needed / 1e6:,.0f} MB"

    def _seconds_of(self, configuration: Configuration, seconds: float, n_rounds: int = 1) -> float:
        """Return about how long a replicate takes that counts so many seconds, in all."""
        per_rank = configuration.minibatches_per_round * self.measurements.batch_size
        cells, n_new = per_rank * self.measurements.ranks.n_local, self._n_new(configuration)
        cost = self._model.seconds_per_cell().get(configuration, 1 / UNKNOWN_CELLS_PER_SECOND)
        cost *= self.measurements.slowdown  # by the clock
        counted = max(seconds, n_rounds * cells * cost)
        return self.measurements.overhead_seconds + n_new * cells * cost + counted

    def _n_new(self, configuration: Configuration) -> int:
        """Return how many first rounds of a replicate do not count."""
        per_rank = configuration.minibatches_per_round * self.measurements.batch_size
        n_rounds = self.requirements.n_cells // per_rank
        return CountedRounds.n_new(n_rounds, has_workers=configuration.num_workers > 0)

    def _affords(self, configuration: Configuration) -> bool:
        """Return whether there is time to time a configuration for the first time."""
        chance, _ = self._model.prospects().get(configuration, (1.0, 0.0))
        share = MOST_SHARE if chance >= MAY_BE_BEST else MOST_OF_OTHERS_SHARE
        most = min(share * self.measurements.budget.seconds, self._left)
        return self._seconds_of(configuration, PROFILE_SECONDS) <= most

    @property
    def _left(self) -> float:
        """Seconds left for turns, before the choice is measured for longer."""
        budget = self.measurements.budget
        last = self.measurements.overhead_seconds + self._sustained_seconds
        is_stepped = self.requirements.constraints.step_seconds is not None
        left = budget.left_until(TURNS_UNTIL_WITH_STEP if is_stepped else 1.0)
        return left - (last if budget.seconds >= LONG_BUDGETS * last else 0.0)

    @property
    def _sustained_seconds(self) -> float:
        """How long the choice is measured without a break at the end."""
        return max(LEAST_SUSTAINED_SECONDS, SUSTAINED_SHARE * self.measurements.budget.seconds)

    def _sustain(self) -> None:
        """Measure the leader without a break for longer, once, if there is time.

        If it turns out to be slower, that counts in place of all that was measured of it before.
        """
        timed, seconds, best = self.measurements, self._sustained_seconds, self._model.leader
        if best is None or best in self.slowed:
            return
        if best not in timed and self._seconds_of(best, 0.0) > timed.budget.left:
            return
        expected = self._model.speed(best)
        left = timed.budget.left - timed.overhead_seconds
        is_known = timed.longest_seconds(best) >= SUSTAINED_LEFT * seconds
        if is_known or expected is None or left < SUSTAINED_LEFT * seconds:
            return
        timed.turn += 1
        found = self._measure(
            best, limit_seconds=left, seconds=min(seconds, left), is_sustained=True
        )
        later = found.second_half
        if not later.round_seconds:
            return
        speed = 1 / timed.cost(later)
        if speed >= SLOWED_SHARE * expected.low:
            return
        self.slowed[best] = (
            f"slowed down from {expected.value:,.0f} to {speed:,.0f} cells/s after "
            f"{found.uncounted_seconds + sum(found.round_seconds) / 2:.0f} s"
        )
        timed.keep_only(later)
        self._model.tell(best, timed.replicates(best))

    def survey(self) -> None:
        """If nothing is feasible, time what comes closest, the cheapest first."""
        timed, mixes = self.measurements, self.requirements.mixes
        if any(timed[each].round_seconds for each in timed):
            return
        near = [each for each, (status, _) in self._not_timed.items() if status in _MAY_RUN]
        near += [each for each in timed if not timed[each].failure]

        def seconds(each: Configuration) -> float:
            return self._seconds_of(each, REPLICATE_SECONDS, LEAST_ROUNDS)

        for each in sorted(near, key=lambda each: (not mixes(each), seconds(each))):
            is_first = not len(timed)  # however little time there is
            if is_first or seconds(each) <= timed.budget.left_until(SURVEY_UNTIL):
                timed.turn += 1
                self._measure(each, limit_seconds=None, least_rounds=LEAST_ROUNDS)

    def with_step(self, choice: Choice) -> Measurement | None:
        """Measure the choice with the training step between minibatches; None if time is short.

        This may rest on fewer rounds than a throughput does.
        """
        configuration = choice.result.configuration
        step, left = self.requirements.constraints.step_seconds, self.measurements.budget.left
        cells_per_step = self.measurements.ranks.n_local * self.measurements.batch_size
        if choice.speed is None:
            return None
        seconds_per_minibatch = max(step or 0.0, cells_per_step / choice.speed.value)
        rounds = left / (seconds_per_minibatch * configuration.minibatches_per_round)
        least_rounds = min(LEAST_ROUNDS, int(rounds) - self._n_new(configuration))
        if step is None or least_rounds < 1:
            return None
        limit = left + SLACK_SECONDS
        found = self.measurements.timed(
            configuration, least_rounds=least_rounds, step_seconds=step, limit_seconds=limit
        )
        return found if found.round_seconds else None

    def _add(self, configurations: Iterable[Configuration]) -> None:
        """Add new configurations; those that can run and mix well enough become candidates."""
        below = [each for each, status in self._not_timed.items() if status == _BELOW_FLOOR]
        for each in configurations:
            is_known = each in self._not_timed or each in self.measurements
            if is_known or self.requirements.obstacle(each):
                continue
            # Larger blocks in smaller fetches mix even less, so that no replay is needed.
            is_below = any(
                each.block_size >= other.block_size
                and each.fetch_factor <= other.fetch_factor
                and each.others == other.others
                for other in below
            )
            mixes = not is_below and self.requirements.mixes(each)
            self._not_timed[each] = _OUT_OF_BUDGET if mixes else _BELOW_FLOOR
            if mixes:
                self._model.add([each])

    # What is known at the end.

    def ended_trials(self) -> "list[FrozenTrial]":
        """End the study, and return its trials of what was timed."""
        requirements, measurements = self.requirements, self.measurements
        memory = {each: measurements[each].peak_memory_bytes for each in measurements}
        shares = {each: requirements.share(each) for each in measurements}
        return self._trials.end(
            {"share_of_random_entropy": shares, "peak_memory_bytes": memory},
            {each: requirements.excesses(each, memory[each]) for each in measurements},
        )

    @property
    def timed(self) -> list[Configuration]:
        """Configurations that were measured, however briefly, in the order of their settings."""
        return sorted(self.measurements)

    @property
    def n_considered(self) -> int:
        """How many configurations have a known entropy."""
        return len({*self._not_timed, *self.measurements})

    def is_predictable(self, configuration: Configuration) -> bool:
        """Return whether a fetch has ended, of these sizes if any of them were timed."""
        alike = [each for each in self.measurements if each.is_like(configuration)]
        return any(map(self.measurements.has_delivered, alike or self.measurements))

    def results(self, grid: Iterable[Configuration]) -> list[ConfigurationResult]:
        """Return what is known of each configuration."""
        found = list[ConfigurationResult]()
        for each in grid:
            bits = self.requirements.entropies_of(each)
            if each in self._not_timed:
                found.append(untimed(each, bits, *self._not_timed[each]))
                continue
            result = self.measurements.result(each, bits)
            speed = self._by_the_clock(each) if result.n_rounds else None
            found.append(replace(result, cells_per_second=speed))
        return found

    def choose(self, results: Sequence[ConfigurationResult]) -> Choice | None:
        """Return the best configuration by all that is known; None if none is feasible.

        The fastest of those that were timed, unless there was no time to time one that is
        expected to be faster.
        """
        is_planned, timed = self.requirements.is_planned, results
        if not is_planned:  # a stopped measurement has no entropy
            timed = [each for each in results if each.is_entropy_measured]
        choice = choose(timed, self.requirements.constraints, self.ordering)
        # Mixing of other loaders is unknown before they are measured.
        if is_planned or choice is None:
            choice = self._predicted(results, choice) or choice
        if choice is None or self._need is not None or not is_planned:
            return choice
        chance = self._model.chance_of_faster(choice.configuration)
        return choice._replace(chance_of_faster=chance)

    def _predicted(
        self, results: Sequence[ConfigurationResult], choice: Choice | None
    ) -> Choice | None:
        """Return the likeliest configuration if it is clearly better than the choice."""
        leader = self._model.leader
        if leader is None:
            return None
        speed = self._by_the_clock(leader)
        if speed is not None and speed.high > VAGUE_INTERVAL * speed.low:
            speed = None
        if choice is not None:
            gain = self._model.ratio(leader, choice.configuration)
            is_clear = gain is not None and gain.value >= 1 + CLEARLY_FASTER
            if self._need is not None or leader == choice.configuration or not is_clear:
                return None
        elif self._need is not None and self.requirements.constraints.step_seconds is None:
            is_too_slow = speed is not None and speed.value < self._need
            if leader in self.measurements or is_too_slow:
                return None
        found = next((each for each in results if each.configuration == leader), None)
        if found is None:
            return None
        reason = f"Predicted to be the fastest (from {len(self.measurements)} timed)."
        if not self.is_predictable(leader):
            speed, reason = None, "Expected to be the fastest, though no fetch ended in time."
        return Choice(found, speed, reason, "predicted")

    def _by_the_clock(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second by the clock, by all that was timed; None before any timing."""
        speed, slowdown = self._model.speed(configuration), self.measurements.slowdown
        if speed is None:
            return None
        return Estimate(*(each / slowdown for each in (speed.value, speed.low, speed.high)))
