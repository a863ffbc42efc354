"""Spending a time budget: every pair of sizes once, then the best few in turns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cellfeed_tuner._choose import Choice, Ordering, Requirements, choose, predicted
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    LEAST_CHANCE,
    LEAST_SUSTAINED_SECONDS,
    LEAST_TURNS,
    PROFILE_SECONDS,
    REPLICATE_SECONDS,
)
from cellfeed_tuner._interval import SAME_SPEED_SHARE, Estimate
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, Measurement
from cellfeed_tuner._measuring._timing import CountedRounds
from cellfeed_tuner._results import ConfigurationResult, Status
from cellfeed_tuner._searching._model import CLEARLY_FASTER, Model
from cellfeed_tuner._searching._replicates import Measurements
from cellfeed_tuner._searching._space import Space
from cellfeed_tuner._time_budget import Progress, silent

if TYPE_CHECKING:  # they load Optuna
    import optuna
    from optuna.trial import FrozenTrial

    from cellfeed_tuner._searching._study import Study

# Share of the budget until which pairs of sizes are timed that may be the best, and most of it
# that one of them may take. Chosen: the rest is for comparing.
PROFILE_SHARE, MOST_SHARE = 0.5, 0.25
# Most of the budget that a pair may take that is slower for certain. Chosen: most take a hundredth.
MOST_OF_OTHERS_SHARE = 0.05
# Probability of being better than the leader from which on a configuration may be the best. Chosen.
MAY_BE_BEST = 0.01
# Most rivals of a turn. Chosen: more of them would seldom meet the leader.
MOST_RIVALS = 2
# Pairs of sizes replayed from a large space if no known pair mixes well enough. Chosen.
MOST_REPLAYED = 6
# Share of the budget until which nearly feasible configurations are timed if none is feasible.
# Chosen.
SURVEY_UNTIL = 0.8
# Share of the budget until which turns run if a training step is measured afterwards. Chosen.
TURNS_UNTIL_WITH_STEP = 0.75
# Share of the budget for measuring the choice without a break, which is done if the search has so
# many times as much, and if at least the last share of it is left. Chosen.
SUSTAINED_SHARE, LONG_BUDGETS, SUSTAINED_LEFT = 0.08, 4.0, 0.6
# A first timing is stopped after this share of the budget until one has delivered, but not before
# so many seconds. Chosen: the speed of the disk is unknown then.
FIRST_LIMIT_SHARE, LEAST_FIRST_LIMIT_SECONDS = 0.125, 3.0
# Expected throughput before anything is timed. Chosen: what a slow disk gives with large fetches.
UNKNOWN_CELLS_PER_SECOND = 5000.0
# Seconds beyond the expected time after which a loop with a training step is stopped. Chosen.
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


class Journal(Protocol):
    """Timings that are kept while a profile goes on."""

    def __iter__(self) -> Iterator[tuple[int, Measurement]]:
        """Iterate over the timings, each with the number of its round."""
        ...

    def append(self, turn: int, found: Measurement, /) -> None:
        """Keep one timing."""
        ...


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
        requirements = self.requirements
        self._not_timed = {each: requirements.obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        self._model = Model(
            runnable, candidates, goal_of=requirements.goal, seed=self.measurements.seed
        )
        self.ordering = Ordering(self._model.ratio, self.measurements.n_turns)
        if not candidates and self.space is not None:
            most = [each for each in self.space.best_mixed() if not requirements.obstacle(each)]
            self._add(most[:MOST_REPLAYED])

    def measure(self) -> None:
        """Profile, compare, and measure the best for longer, until it stays as fast."""
        if not self._model.candidates:
            return
        self._profile()
        while True:
            self._compare()
            best = self._model.leader
            self._sustain()
            if self._model.leader == best:
                break
        self._sort_out()

    def profile(self, n_rounds: int, journal: "Journal | None", on_progress: Progress) -> None:
        """Time everything that can run, also what mixes too little, in rounds of random order.

        What the journal has is not timed again; what is new is appended to it.
        """
        measurements, done = self.measurements, set[tuple[int, Configuration]]()
        measurements.on_progress = silent  # theirs tells of a budget
        for turn, found in journal or ():
            measurements.restore(found, turn)
            done.add((turn, found.configuration))
        runnable = sorted(
            each for each, (status, _) in self._not_timed.items() if status in _MAY_RUN
        )
        rng = np.random.default_rng(measurements.seed)
        open_turns = [
            (turn, runnable[k])
            for turn in range(1, n_rounds + 1)
            for k in rng.permutation(len(runnable)).tolist()
            if (turn, runnable[k]) not in done
        ]
        began, took = measurements.budget.spent, dict[Configuration, float]()
        for number, (turn, each) in enumerate(open_turns):
            spent = measurements.budget.spent - began
            usual = sum(took.values()) / len(took) if took else EXPECTED_SECONDS
            left = sum(took.get(one, usual) for _, one in open_turns[number:])
            doing = f"round {turn} of {n_rounds}: {each}"
            on_progress("profile", spent, spent + left, doing)
            if each in measurements and measurements[each].failure:
                continue
            measurements.begin_turn(turn)
            found = measurements.take(each, 1, in_turn=True, seconds=PROFILE_SECONDS)
            took[each] = measurements.budget.spent - began - spent
            if journal is not None:
                journal.append(turn, found)
        for each in measurements:
            self._not_timed.pop(each, None)
            self._model.tell(each, measurements.replicates(each))
            if measurements[each].failure:
                self._model.withdraw(each)
            self.requirements.learn(measurements[each])

    # Every pair of sizes once.

    def _profile(self) -> None:
        """Time pairs of sizes once, and the best of them with each number of workers."""
        while (each := self._next_pair()) is not None:
            self._time([each], PROFILE_SECONDS, in_turn=False)
        best = self._model.leader
        alike = [each for each in self._model.candidates if best and each.is_like(best)]
        for each in alike:
            timed = [e for e in alike if e in self.measurements]
            is_new = all(each.num_workers != e.num_workers for e in timed)
            if (is_new or all(each.others != e.others for e in timed)) and self._affords(
                each, PROFILE_SECONDS
            ):
                self._time([each], PROFILE_SECONDS, in_turn=False)

    def _next_pair(self) -> Configuration | None:
        """Return the pair to time next: what it may gain for its time decides.

        The widest comes first. What is slower for certain comes last, if there is time.
        """
        budget, candidates = self.measurements.budget, self._model.candidates
        fewest = min((each.num_workers for each in candidates), default=0)
        new = [e for e in candidates if e.num_workers == fewest and e not in self.measurements]
        if not self.measurements.has_delivered:
            # However little time there is, something is timed.
            is_first = not len(self.measurements)
            new = [each for each in new if is_first or self._affords(each, PROFILE_SECONDS)]
            return max(new, key=lambda e: (e.fetch_factor, e.block_size), default=None)
        new = [each for each in new if self._affords(each, PROFILE_SECONDS)]
        if not new or budget.left_until(PROFILE_SHARE) <= 0:
            return None
        if (proposed := self._proposed(new)) is not None:
            return proposed
        prospects = self._model.prospects()
        likely = [each for each in new if prospects.get(each, (1.0, 0.0))[0] >= MAY_BE_BEST]
        if likely:
            return max(likely, key=lambda e: self._worth(e, prospects, PROFILE_SECONDS))
        last = min(new, key=lambda each: self._seconds_of(each, PROFILE_SECONDS))
        most = MOST_OF_OTHERS_SHARE * budget.seconds
        return last if self._seconds_of(last, PROFILE_SECONDS) <= most else None

    def _worth(
        self,
        configuration: Configuration,
        prospects: Mapping[Configuration, tuple[float, float]],
        seconds: float,
    ) -> float:
        """Return what timing a configuration may gain in a second."""
        return prospects.get(configuration, (0.0, 0.0))[1] / self._seconds_of(
            configuration, seconds
        )

    def _proposed(self, new: Sequence[Configuration]) -> Configuration | None:
        """Return what a user's sampler proposes of what is new, or of a space."""

        def accepts(each: Configuration) -> bool:
            if self.space is None or each not in self.space:
                return each in new
            self._add([each])
            return each in self._model.candidates and self._affords(each, PROFILE_SECONDS)

        return self._trials.propose(accepts)

    # The best few in turns.

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
        leader, prospects = self._model.leader, self._model.prospects()
        if leader is None or (leader in self.measurements and not self._is_timed(leader)):
            return []
        rivals = [each for each in prospects if self._may_race(each)]
        has_need = self.requirements.constraints.need_cells_per_second is not None
        open_rivals = [
            each
            for each in rivals
            if prospects[each][0] >= LEAST_CHANCE and (has_need or not self._is_same(each, leader))
        ]
        if not open_rivals and self.measurements.n_turns(leader) >= LEAST_TURNS:
            return []
        open_rivals.sort(key=lambda e: -self._worth(e, prospects, REPLICATE_SECONDS))
        # Without any, the runner-up shows how much the leader leads.
        costs = self._model.seconds_per_cell()
        runner_up = sorted(rivals, key=lambda each: (-prospects[each][0], costs[each]))[:1]
        turn = [leader, *(open_rivals[:MOST_RIVALS] or runner_up)]
        if has_need and open_rivals and self._is_timed(leader):
            del turn[0]  # each has to keep up, and is not compared
        while turn and sum(self._seconds_of(e, REPLICATE_SECONDS) for e in turn) > self._left:
            turn.pop()
        return turn

    def _is_same(self, configuration: Configuration, other: Configuration) -> bool:
        """Return whether two throughputs are known to differ by at most 2 %."""
        ratio = self._model.ratio(configuration, other)
        least, most = 1 - SAME_SPEED_SHARE, 1 + SAME_SPEED_SHARE
        return ratio is not None and least <= ratio.low <= ratio.high <= most

    def _may_race(self, configuration: Configuration) -> bool:
        if configuration in self.slowed:
            return False  # a loader that slows down is fast for as long as a turn takes
        return configuration not in self.measurements or self._is_timed(configuration)

    @property
    def _trials(self) -> "Study":
        if self._study is None:
            from cellfeed_tuner._searching import _study  # noqa: PLC0415 - loads Optuna

            ends = self.space.ends() if self.space else ()
            known = [*self._not_timed, *self.measurements, *ends]
            self._study = _study.Study(self.study, known, has_ranges=self.space is not None)
        return self._study

    # Timing.

    def _time(self, turn: Sequence[Configuration], seconds: float, *, in_turn: bool) -> None:
        """Time some configurations, one after the other."""
        self.measurements.begin_turn()
        for each in turn:
            limit = None if self.measurements.has_delivered else self._first_limit
            self._measure(each, 1, in_turn=in_turn, seconds=seconds, limit_seconds=limit)

    def _measure(
        self, configuration: Configuration, least_rounds: int, **how: "float | bool | None"
    ) -> Measurement:
        """Measure one replicate of a configuration, and update what is known."""
        found = self.measurements.take(configuration, least_rounds, **how)  # type: ignore[arg-type]
        self._not_timed.pop(configuration, None)
        replicates = self.measurements.replicates(configuration)
        self._model.tell(configuration, replicates)
        last = replicates[-1] if found.round_seconds and replicates else None
        self._trials.report(configuration, last and last.seconds_per_cell, self.measurements.turn)
        memory_bytes = self.requirements.constraints.memory_bytes
        if found.failure:
            self._model.withdraw(configuration)
        elif found.peak_memory_bytes > memory_bytes:
            self._withdraw_larger(configuration)
        self._withdraw_predicted()
        if self.requirements.learn(found):
            self._model.update_goal()
            for each in self._model.candidates:
                if not self.requirements.mixes(each):
                    self._model.withdraw(each)
        return found

    def _withdraw_larger(self, configuration: Configuration) -> None:
        """Leave out what takes no less memory than a configuration that took too much."""
        for each in self._model.candidates:
            is_larger = each.minibatches_in_memory >= configuration.minibatches_in_memory
            if is_larger and each.num_workers >= configuration.num_workers:
                self._model.withdraw(each)
                if each in self._not_timed:
                    what = "a configuration with smaller buffers exceeds the memory limit"
                    self._not_timed[each] = "over memory", what

    def _withdraw_predicted(self) -> None:
        """Leave out what would take too much memory, by the smallest and largest buffers timed."""
        peaks = {
            each.minibatches_in_memory: self.measurements[each].peak_memory_bytes
            for each in self.measurements
        }
        few, many = min(peaks), max(peaks)
        if few == many:
            return
        of_minibatch = max(0.0, (peaks[many] - peaks[few]) / (many - few))
        for each in [e for e in self._model.candidates if e not in self.measurements]:
            needed = peaks[few] + of_minibatch * (each.minibatches_in_memory - few)
            if needed > self.requirements.constraints.memory_bytes:
                self._model.withdraw(each)
                self._not_timed[each] = "over memory", f"it would take about {needed / 1e6:,.0f} MB"

    def _seconds_of(self, configuration: Configuration, seconds: float, n_rounds: int = 1) -> float:
        """Return about how long a replicate takes that counts so many seconds, in all."""
        per_rank = configuration.minibatches_per_round * self.measurements.batch_size
        cells, n_new = per_rank * self.measurements.ranks.n_local, self._n_new(configuration)
        cost = self._model.seconds_per_cell().get(configuration)
        if cost is None:
            return (n_new + n_rounds) * cells / UNKNOWN_CELLS_PER_SECOND
        cost *= self.measurements.slowdown  # by the clock
        counted = max(seconds, n_rounds * cells * cost)
        return self.measurements.overhead_seconds + n_new * cells * cost + counted

    def _n_new(self, configuration: Configuration) -> int:
        """Return how many first rounds of a replicate do not count."""
        per_rank = configuration.minibatches_per_round * self.measurements.batch_size
        n_rounds = self.requirements.n_cells // per_rank
        return CountedRounds.n_new(n_rounds, has_workers=configuration.num_workers > 0)

    def _affords(self, configuration: Configuration, seconds: float) -> bool:
        """Return whether there is time to time a configuration for the first time."""
        most = min(MOST_SHARE * self.measurements.budget.seconds, self._left)
        return self._seconds_of(configuration, seconds) <= most

    @property
    def _left(self) -> float:
        """Seconds left for turns, before the choice is measured for longer."""
        budget, last = self.measurements.budget, self.measurements.overhead_seconds
        last += self._sustained_seconds
        is_stepped = self.requirements.constraints.step_seconds is not None
        left = budget.left_until(TURNS_UNTIL_WITH_STEP if is_stepped else 1.0)
        return left - (last if budget.seconds >= LONG_BUDGETS * last else 0.0)

    @property
    def _sustained_seconds(self) -> float:
        """How long the choice is measured without a break at the end."""
        return max(LEAST_SUSTAINED_SECONDS, SUSTAINED_SHARE * self.measurements.budget.seconds)

    @property
    def _first_limit(self) -> float:
        """After how many seconds a replicate is stopped, until one has delivered."""
        budget = self.measurements.budget
        limit = max(FIRST_LIMIT_SHARE * budget.seconds, LEAST_FIRST_LIMIT_SECONDS)
        return min(limit, budget.limit_seconds)

    def _is_timed(self, configuration: Configuration) -> bool:
        """Return whether a configuration was measured, and delivered anything."""
        if configuration not in self.measurements:
            return False
        return self.measurements[configuration].first_round_seconds is not None

    def _sustain(self) -> None:
        """Measure the leader without a break for longer, once, if there is time.

        If it turns out to be slower, that counts in place of all that was measured of it before.
        """
        budget, seconds = self.measurements.budget, self._sustained_seconds
        best = self._model.leader
        if best is None or best in self.slowed:
            return
        if best not in self.measurements and self._seconds_of(best, 0.0) > budget.left:
            return
        expected = self._model.speed(best)
        left = budget.left - self.measurements.overhead_seconds
        is_known = self.measurements.longest_seconds(best) >= SUSTAINED_LEFT * seconds
        if is_known or expected is None or left < SUSTAINED_LEFT * seconds:
            return
        self.measurements.begin_turn()
        found = self._measure(
            best, 1, limit_seconds=left, seconds=min(seconds, left), is_sustained=True
        )
        later = found.second_half
        if not later.round_seconds:
            return
        speed = 1 / self.measurements.cost(later)
        if speed >= SLOWED_SHARE * expected.low:
            return
        self.slowed[best] = (
            f"slowed down from {expected.value:,.0f} to {speed:,.0f} cells/s after "
            f"{found.uncounted_seconds + sum(found.round_seconds) / 2:.0f} s"
        )
        self.measurements.keep_only(later)
        self._model.tell(best, self.measurements.replicates(best))

    # What is known at the end.

    def _sort_out(self) -> None:
        """Note which configurations were not timed because others are better."""
        best, share = self._model.leader, self.requirements.share
        has_need = self.requirements.constraints.need_cells_per_second is not None
        for each, (chance, _) in self._model.prospects().items():
            if each in self._not_timed and chance < LEAST_CHANCE:
                is_less = has_need and best is not None and share(each) <= share(best)
                self._not_timed[each] = "mixes less" if is_less else "too slow", ""

    def ended_trials(self) -> "list[FrozenTrial]":
        """End the study, and return its trials of what was timed."""
        timed = {each: self.measurements[each] for each in self.measurements}
        self._trials.end(
            facts={
                each: {
                    "share_of_random_entropy": self.requirements.share(each),
                    "peak_memory_bytes": one.peak_memory_bytes,
                }
                for each, one in timed.items()
            },
            excesses={
                each: self.requirements.excesses(each, one.peak_memory_bytes)
                for each, one in timed.items()
            },
        )
        return self._trials.trials

    @property
    def timed(self) -> list[Configuration]:
        """Configurations that were measured, however briefly, in the order of their settings."""
        return sorted(self.measurements)

    @property
    def n_considered(self) -> int:
        """How many configurations have a known entropy."""
        return len({*self._not_timed, *self.measurements})

    def results(self, grid: Iterable[Configuration]) -> list[ConfigurationResult]:
        """Return what is known of each configuration."""
        found = [
            self.measurements.result(
                each, self.requirements.entropies_of(each), self._not_timed.get(each)
            )
            for each in grid
        ]
        return [
            replace(each, cells_per_second=self._by_the_clock(each.configuration))
            if each.n_rounds
            else each
            for each in found
        ]

    def survey(self) -> None:
        """If nothing is feasible, time what comes closest, the cheapest first."""
        if self.measurements.with_throughput():
            return
        untimed = [each for each, (status, _) in self._not_timed.items() if status in _MAY_RUN]
        untimed += [each for each in self.measurements if not self.measurements[each].failure]
        mixes = self.requirements.mixes

        def seconds(each: Configuration) -> float:
            return self._seconds_of(each, REPLICATE_SECONDS, LEAST_ROUNDS)

        for each in sorted(untimed, key=lambda each: (not mixes(each), seconds(each))):
            is_first = not len(self.measurements)  # however little time there is
            if is_first or seconds(each) <= self.measurements.budget.left_until(SURVEY_UNTIL):
                self.measurements.begin_turn()
                self._measure(each, LEAST_ROUNDS)

    def interrupt(self) -> None:
        """Note that what was not measured by now will not be."""
        for each, status in self._not_timed.items():
            if status == _OUT_OF_BUDGET:
                self._not_timed[each] = "interrupted", ""

    def choose(self, results: Sequence[ConfigurationResult]) -> Choice | None:
        """Return the best configuration by all that is known; None if none is feasible.

        The fastest of those that were timed, unless there was no time to time one that is
        expected to be faster.
        """
        choice = self._chosen(results)
        is_asked = self.requirements.constraints.need_cells_per_second is None
        if choice is None or not is_asked or not self.requirements.is_planned:
            return choice
        chance = self._model.chance_of_faster(choice.configuration)
        return choice._replace(chance_of_faster=chance)

    def _chosen(self, results: Sequence[ConfigurationResult]) -> Choice | None:
        timed, constraints = results, self.requirements.constraints
        if not self.requirements.is_planned:  # a stopped measurement has no entropy
            timed = [each for each in results if each.entropy_bits.measured is not None]
        choice = choose(timed, constraints, self.ordering)
        leader = self._model.leader or self._widest
        # Mixing of other loaders is unknown before they are measured.
        if leader is None or (choice is not None and not self.requirements.is_planned):
            return choice
        if choice is None:
            need = constraints.need_cells_per_second
            is_required = need is not None and constraints.step_seconds is None
            if is_required and not self._may_reach(leader, need or 0.0):
                return None
        elif constraints.need_cells_per_second is not None or leader == choice.configuration:
            return choice
        else:
            gain = self._model.ratio(leader, choice.configuration)
            if gain is None or gain.value < 1 + CLEARLY_FASTER:
                return choice
        found = next((each for each in results if each.configuration == leader), None)
        if found is None:
            return choice
        return predicted(found, self._speed(leader), n_timed=len(self.measurements))

    @property
    def _widest(self) -> Configuration | None:
        """The candidate that reads most at a time, without workers if possible."""
        return max(
            self._model.candidates,
            key=lambda each: (-each.num_workers, each.fetch_factor, each.block_size),
            default=None,
        )

    def _speed(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second, as predicted from all that was timed; None if that is vague."""
        speed = self._by_the_clock(configuration)
        return None if speed is None or speed.high > VAGUE_INTERVAL * speed.low else speed

    def _by_the_clock(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second by the clock, by all that was timed; None before any timing."""
        speed, slowdown = self._model.speed(configuration), self.measurements.slowdown
        if speed is None:
            return None
        return Estimate(*(each / slowdown for each in (speed.value, speed.low, speed.high)))

    def _may_reach(self, configuration: Configuration, need: float) -> bool:
        """Return whether a configuration that was not measured is expected to be fast enough."""
        speed = self._speed(configuration)
        return configuration not in self.measurements and (speed is None or speed.value >= need)

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
        known = {*self._not_timed, *self.measurements}
        below = [each for each, status in self._not_timed.items() if status == _BELOW_FLOOR]
        for each in configurations:
            if each in known or self.requirements.obstacle(each):
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
        self._model.add(
            each
            for each, status in self._not_timed.items()
            if status == _OUT_OF_BUDGET and each not in known
        )
