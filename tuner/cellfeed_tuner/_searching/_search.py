"""Spending a time budget: a few proposed trials, then turns of two that decide."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cellfeed_tuner._choose import (
    SHARE_PER_DOUBLING,
    Choice,
    Ordering,
    Requirements,
    choose,
    predicted,
)
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    DEFAULT_SAMPLER,
    FEWEST_ROUNDS,
    FIRST_TRIALS,
    LEAST_CHANCE,
    LEAST_TURNS,
    RACE,
    TURN_ROUNDS,
)
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, Measurement
from cellfeed_tuner._results import ConfigurationResult, Status
from cellfeed_tuner._searching._cost_model import CostModel, Geometry, Space
from cellfeed_tuner._searching._durations import SUSTAINED_LEFT, Durations
from cellfeed_tuner._searching._posterior import Posterior, TurnsOf
from cellfeed_tuner._searching._replicates import Measurements

if TYPE_CHECKING:  # they load Optuna
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from cellfeed_tuner._searching._trials import OptunaProposals

# Most configurations from an earlier run that are measured first. Chosen.
MOST_FIRST = 2
# How many configurations the sampler "race" races. Measured: as good as the default in replays with
# little noise.
RACE_SIZE = 6
# If the leader's error is below this share of the challenger's, only the challenger is measured.
# Chosen.
KNOWN = 0.7
# Expected gain over the best measured configuration at which one that there was no time to measure
# is recommended. Chosen: as the next.
PREDICTED_GAIN = 0.05
# Pairs of sizes replayed from a large space if no known pair mixes well enough. Chosen.
MOST_REPLAYED = 6
# Share of the budget until which nearly feasible configurations are measured if none is feasible.
# Chosen.
SURVEY_UNTIL = 0.8
# Seconds beyond the expected time after which a loop with a training step is stopped. Chosen.
SLACK_SECONDS = 5.0
# Turns after which the likeliest may be measured for that long before the end. Chosen: it is then
# likely to stay so.
EARLY_TURNS = 2
# A loader has slowed down if the second half of that has less than this share of the throughput
# that was expected. Chosen: beyond the noise of a busy machine.
SLOWED_SHARE = 0.7
# A predicted throughput is called unknown if the upper end of its interval is this many times the
# lower end. Chosen: it says nothing then.
VAGUE_INTERVAL = 100

_OUT_OF_BUDGET: tuple[Status, str] = ("out of budget", "")
_MAY_RUN = {"too slow", "mixes less", "not raced", "below entropy floor", "out of budget"}
_BELOW_FLOOR: tuple[Status, str] = ("below entropy floor", "")
_NOT_RACED: tuple[Status, str] = ("not raced", "")


@dataclass(slots=True, kw_only=True)
class Search:
    """One search, from the first measurement to the last.

    Parameters
    ----------
    space
        All configurations, where there are too many to list them; None otherwise.
    known
        Configurations that an earlier run measured, the most telling first. Some of them are
        measured first.
    sampler
        Proposes configurations; see `autotune`.
    model
        Predicts costs.
    """

    measurements: Measurements
    requirements: Requirements
    geometry: Geometry
    known: Sequence[Configuration] = ()
    space: Space | None = None
    sampler: "str | BaseSampler" = DEFAULT_SAMPLER
    model: type[CostModel] = CostModel
    turns: TurnsOf[Configuration] = field(default_factory=TurnsOf[Configuration], init=False)
    ordering: Ordering = field(init=False)
    slowed: dict[Configuration, str] = field(default_factory=dict, init=False)
    _not_timed: dict[Configuration, tuple[Status, str]] = field(default_factory=dict, init=False)
    _posterior: Posterior = field(init=False)
    _durations: Durations = field(init=False)
    _proposals: "OptunaProposals | None" = field(default=None, init=False)
    # Cells per second of the first trials, which together make a turn.
    _first_speeds: dict[Configuration, float] = field(default_factory=dict, init=False)

    def run(self, grid: Iterable[Configuration]) -> None:
        """Measure proposed configurations until the best is clear, and stays as fast."""
        self.begin(grid)
        self.measure()

    def measure(self) -> None:
        """Do what `run` does after `begin`."""
        if not self._posterior.candidates:
            return
        rng = np.random.default_rng(self.measurements.seed)
        n_early = 0
        while True:
            while turn := self._next_turn():
                rng.shuffle(turn)
                self._take_turn(turn)
                self._widen()
                # Once early enough to look at others, and again after one has slowed down.
                is_late = not self._durations.is_time_to_propose and n_early <= len(self.slowed)
                best = self._likeliest
                if is_late and best is not None and self.turns.count(best) >= EARLY_TURNS:
                    n_early += 1
                    self._sustain()
            self._measure_finally()
            best = self._likeliest
            self._sustain()
            if self._likeliest == best:
                break
        if not any(map(self._durations.has_rounds, self._posterior.candidates)):
            return
        costs = self._posterior.seconds_per_cell()
        need = self.requirements.constraints.need_cells_per_second
        for each, chance in self._posterior.chances().items():
            if each in self._not_timed and each in costs and chance < LEAST_CHANCE:
                keeps_up = need is not None and costs[each] * need <= 1
                self._not_timed[each] = "mixes less" if keeps_up else "too slow", ""

    def ended_trials(self) -> "list[FrozenTrial]":
        """Return what was measured as the trials of a study that has ended."""
        from cellfeed_tuner._searching import _trials  # noqa: PLC0415 - loads Optuna

        measured = {each: self.measurements[each] for each in self.measurements}
        return _trials.ended_trials(
            {each: self.measurements.replicates(each) for each in measured},
            known=self._spanning,
            facts={
                each: {
                    "share_of_random_entropy": self.requirements.share(each),
                    "peak_memory_bytes": one.peak_memory_bytes,
                }
                for each, one in measured.items()
            },
            excesses={
                each: self.requirements.excesses(each, one.peak_memory_bytes)
                for each, one in measured.items()
            },
            lost={each for each in measured if self._has_lost(each)},
        )

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
        return [
            self.measurements.result(
                each, self.requirements.entropies_of(each), self._not_timed.get(each)
            )
            for each in grid
        ]

    def survey(self) -> None:
        """If nothing is feasible, measure what comes closest, the cheapest first."""
        if self.measurements.with_throughput():
            return
        untimed = [each for each, (status, _) in self._not_timed.items() if status in _MAY_RUN]
        untimed += [each for each in self.measurements if not self.measurements[each].failure]
        mixes = self.requirements.mixes
        for each in sorted(untimed, key=lambda each: (not mixes(each), self._durations.of(each))):
            is_first = not len(self.measurements)  # however little time there is
            if is_first or self._durations.of(each) <= self.measurements.budget.left_until(
                SURVEY_UNTIL
            ):
                self._measure(each, LEAST_ROUNDS)

    def interrupt(self) -> None:
        """Note that what was not measured by now will not be."""
        for each, status in self._not_timed.items():
            if status == _OUT_OF_BUDGET:
                self._not_timed[each] = "interrupted", ""

    def choose(self, results: Sequence[ConfigurationResult]) -> Choice | None:
        """Return the best configuration by all that is known; None if none is feasible.

        The fastest of those that were measured, unless there was no time to measure one that is
        expected to be faster.
        """
        choice = self._chosen(results)
        is_asked = self.requirements.constraints.need_cells_per_second is None
        if choice is None or not is_asked or not self.requirements.is_planned:
            return choice
        return choice._replace(
            chance_of_faster=self._posterior.chance_of_faster(choice.configuration),
            contradicts_model=self._posterior.is_contradicted,
        )

    def _chosen(self, results: Sequence[ConfigurationResult]) -> Choice | None:
        timed, constraints = results, self.requirements.constraints
        if not self.requirements.is_planned:  # a stopped measurement has no entropy
            timed = [each for each in results if each.entropy_bits.measured is not None]
        choice = choose(timed, constraints, self.ordering)
        leader = self._posterior.leader(self._posterior.candidates)
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
            gain = self._posterior.ratio(leader, choice.configuration)
            if gain is None or gain.value < 1 + PREDICTED_GAIN:
                return choice
        found = next((each for each in results if each.configuration == leader), None)
        if found is None:
            return choice
        return predicted(found, self._speed(leader), n_measured=len(self.measurements))

    def _speed(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second by the clock, as predicted from all that was measured.

        None if that says nothing of it.
        """
        speed, slowdown = self._posterior.speed(configuration), self.measurements.slowdown
        if speed is None or speed.high > VAGUE_INTERVAL * speed.low:
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
        least_rounds = min(LEAST_ROUNDS, int(rounds) - self._durations.n_new(configuration))
        if step is None or least_rounds < 1:
            return None
        limit = left + SLACK_SECONDS
        found = self.measurements.timed(
            configuration, least_rounds=least_rounds, step_seconds=step, limit_seconds=limit
        )
        return found if found.round_seconds else None

    def begin(self, grid: Iterable[Configuration]) -> None:
        """Split the grid into candidates, and others with the reason why they are none."""
        requirements = self.requirements
        self._not_timed = {each: requirements.obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        if self.sampler == RACE:
            # The largest blocks in the largest fetches, without workers if possible.
            candidates.sort(
                key=lambda e: (-e.num_workers, e.fetch_factor * e.block_size, e.fetch_factor)
            )
            raced = candidates[-RACE_SIZE:]
            self._not_timed |= dict.fromkeys(set(candidates) - set(raced), _NOT_RACED)
            candidates = raced
        self._posterior = Posterior(
            runnable,
            candidates,
            batch_size=self.measurements.batch_size,
            geometry=self.geometry,
            goal_of=requirements.goal,
            seed=self.measurements.seed,
            model=self.model,
        )
        self.ordering = Ordering(self._posterior.ratio, self.turns.count_together)
        if not candidates and self.space is not None:
            most = [each for each in self.space.best_mixed() if not requirements.obstacle(each)]
            self._add(most[:MOST_REPLAYED])
        is_stepped = requirements.constraints.step_seconds is not None
        self._durations = Durations(
            self._posterior, self.measurements, n_cells=requirements.n_cells, is_stepped=is_stepped
        )

    @property
    def _spanning(self) -> list[Configuration]:
        """Configurations whose settings span the search space."""
        ends = self.space.ends() if self.space else ()
        return [*self._not_timed, *self.measurements, *ends]

    def _propose(self, candidates: Sequence[Configuration]) -> Configuration:
        """Return the candidate to try next, of at least one.

        By the cost model, the first ones are those that it expects to be the fastest on any
        machine, and later ones those that may surpass the leader by most.
        """
        if len(candidates) == 1:
            return candidates[0]
        posterior = self._posterior
        if self._has_own_order:
            if self._proposals is None:
                from cellfeed_tuner._searching._trials import (  # noqa: PLC0415 - loads Optuna
                    OptunaProposals,
                )

                self._proposals = OptunaProposals(
                    self.sampler, self._spanning, seed=self.measurements.seed
                )
            timed = {e: self.measurements.timed_replicates(e) for e in self.measurements}
            return self._proposals.propose(candidates, timed)
        chosen = None
        if len(self.measurements) >= FIRST_TRIALS:
            leader = posterior.leader(posterior.candidates)
            chosen = leader and posterior.challenger(leader, candidates)
        return chosen or posterior.most_promising(candidates) or candidates[0]

    def _has_lost(self, configuration: Configuration) -> bool:
        """Return whether one was clearly slower, in turns, than the fastest candidate."""
        candidates, costs = {*self._posterior.candidates}, self._posterior.seconds_per_cell()
        finalists = [each for each in self.turns.finalists() if each in candidates]
        best = min(finalists, key=costs.__getitem__, default=configuration)
        rival = None if best == configuration else self.ordering.rival(configuration, best)
        return rival is not None and rival.ratio.high < 1

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
        self._posterior.add(
            each
            for each, status in self._not_timed.items()
            if status == _OUT_OF_BUDGET and each not in known
        )

    def _next_turn(self) -> list[Configuration]:
        """Return what to measure next, in one turn; empty if that would change nothing."""
        if (first := self._first_trial()) is not None:
            return [first]
        need = self.requirements.constraints.need_cells_per_second
        if need is not None:
            speeds = {e: self.measurements.cells_per_second(e) for e in self.measurements}
            known = {each for each, speed in speeds.items() if speed and speed.low >= need}
            enough = [each for each in self._posterior.candidates if each in known]
            turn = self._turn_for_need(enough)
            if turn or enough:
                return turn
        chances = self._posterior.chances()
        best = next(iter(chances), None)
        if best is None:
            return []
        if self._durations.has_rounds(best) and not self._affords(best):
            return []
        if not self._durations.is_time_to_propose and self._is_decided(chances):
            return []
        is_alone = all(each == best or chance < LEAST_CHANCE for each, chance in chances.items())
        pair = [best, *self._runner_up(best)] if is_alone else self._pair()
        doubted = self._posterior.doubted()
        if doubted is not None and self._affords(doubted):
            self._posterior.take_back(doubted)
            pair += {doubted} - {*pair}
        while len(pair) > 1 and not self._durations.is_time_for(pair):
            pair.pop()
        is_clear = len(pair) == 1 and self.turns.count(pair[0]) >= LEAST_TURNS
        return pair if self._durations.is_time_for(pair) and not is_clear else []

    def _first_trial(self) -> Configuration | None:
        """Return one of the first configurations to measure; None when there are enough."""
        if len(self.measurements) >= FIRST_TRIALS:
            return None
        new = [each for each in self._posterior.candidates if self._durations.affords_first(each)]
        # Whether workers help is what is known least: the last has some, unless another has.
        other_way = not any(each.num_workers for each in self.measurements)
        is_last = len(self.measurements) == FIRST_TRIALS - 1
        others = [each for each in new if is_last and bool(each.num_workers) == other_way]
        known = [each for each in self.known if each in self._posterior.candidates][:MOST_FIRST]
        new = [each for each in known if each in new][:1] or others or new
        return self._propose(new) if new else None

    def _pair(self) -> list[Configuration]:
        """Return the leader and its challenger, as far as there is time for them."""
        time = self._durations
        possible = [each for each in self._posterior.candidates if self._affords(each)]
        leader = self._posterior.leader(possible)
        if leader is None or not time.is_time_for([leader]):
            return []
        others = [each for each in possible if time.is_time_for([leader, each]) and each != leader]
        others = [each for each in others if not self._has_lost(each)]
        new = [each for each in others if each not in self.measurements]
        if self._has_own_order:
            known = [each for each in others if each in self.measurements]
            others = new if new and time.is_time_to_propose else known
        other = self._posterior.challenger(leader, others)
        if other is None:
            return [leader]
        is_known = self._posterior.error(leader) < KNOWN * self._posterior.error(other)
        if other not in self.measurements:
            other = self._propose(new)
        # A well-known leader need not be measured again beside one that is hardly known.
        is_alone = (
            is_known and leader in self.measurements and self.turns.count(other) < LEAST_TURNS
        )
        return [other] if is_alone else [leader, other]

    def _turn_for_need(self, enough: Collection[Configuration]) -> list[Configuration]:
        """Return the candidate that promises the most mixing for the time it takes to measure.

        Candidates are not compared with each other: each has to keep up with training. Those in
        ``enough`` are known to do so.
        """
        time = self._durations
        possible = [each for each in self._posterior.candidates if self._affords(each)]
        worth = max(map(self.requirements.worth, enough), default=0.0)
        gains = self._posterior.gains(worth, set(possible) - set(enough))
        least = SHARE_PER_DOUBLING if enough else LEAST_CHANCE
        gains = {each: gain for each, gain in gains.items() if gain >= least}
        new = [each for each in gains if each not in self.measurements]
        if new and self._has_own_order:
            return [self._propose(new)]
        return sorted(gains, key=lambda each: -gains[each] / time.of(each))[:1]

    def _affords(self, configuration: Configuration) -> bool:
        """Return whether a configuration may be measured in a turn.

        One that slows down is fast for as long as a turn takes: what is known of it stands.
        """
        return configuration not in self.slowed and self._durations.affords(configuration)

    def _take_turn(self, turn: Sequence[Configuration]) -> None:
        """Measure some configurations, one after the other."""
        is_first = len(turn) == 1 and turn[0] not in self.measurements
        n_rounds, limit_seconds = (
            (1, self._durations.first_limit) if is_first else (TURN_ROUNDS, None)
        )
        speeds = dict[Configuration, float]()
        if not is_first:  # the first trials make one turn
            self.measurements.begin_turn()
        for each in turn:
            found = self._measure(each, n_rounds, in_turn=not is_first, limit_seconds=limit_seconds)
            if found.round_seconds:
                speeds[each] = 1 / self.measurements.cost(found)
        if is_first:
            self._first_speeds |= speeds
            return
        self.turns.add(self._first_speeds)
        self.turns.add(speeds)
        self._first_speeds = {}

    def _measure(
        self,
        configuration: Configuration,
        least_rounds: int,
        *,
        in_turn: bool = False,
        limit_seconds: float | None = None,
        sustained_seconds: float | None = None,
    ) -> Measurement:
        """Measure one replicate of a configuration, and update what is known."""
        found = self.measurements.take(
            configuration,
            least_rounds,
            in_turn=in_turn,
            limit_seconds=limit_seconds,
            sustained_seconds=sustained_seconds,
        )
        self._not_timed.pop(configuration, None)
        self._posterior.tell(configuration, self.measurements.replicates(configuration))
        memory_bytes = self.requirements.constraints.memory_bytes
        if found.failure or found.peak_memory_bytes > memory_bytes:
            self._posterior.withdraw(configuration)
        if self.requirements.learn(found):
            self._posterior.aim_anew()
            for each in self._posterior.candidates:
                if not self.requirements.mixes(each):
                    self._posterior.withdraw(each)
        return found

    @property
    def _has_own_order(self) -> bool:
        """Whether a sampler other than ours decides which new configuration is next."""
        return self.sampler not in (DEFAULT_SAMPLER, RACE)

    def _is_decided(self, chances: Mapping[Configuration, float]) -> bool:
        """Return whether more turns would change nothing."""
        best = next(iter(chances))
        if self.turns.count(best) < LEAST_TURNS:
            return False
        likely = [each for each, chance in chances.items() if chance >= LEAST_CHANCE]
        likely += self._runner_up(best)
        rival = partial(self.ordering.rival, best)
        rivals = [rival(each) for each in likely if each != best]
        others = [rival(each) for each in self.turns.finalists() if each != best]
        known = [each for each in (*rivals, *others) if each is not None]
        return None not in rivals and not any(each.is_undecided for each in known)

    def _runner_up(self, best: Configuration) -> list[Configuration]:
        """Return the fastest of the others that are still in the race, if there is one."""
        costs = self._posterior.seconds_per_cell()
        others = [each for each in self._posterior.candidates if each in self.measurements]
        others = [each for each in others if each != best and self._affords(each)]
        racing = [each for each in others if not self._has_lost(each)]
        return sorted(racing, key=costs.__getitem__)[:1]

    def _widen(self) -> None:
        """Add the neighbours of the likeliest best, in a space that is not listed."""
        if self.space is None or len(self.measurements) < FIRST_TRIALS:
            return
        likeliest = self._likeliest
        if likeliest is not None:
            self._add(self.space.around(likeliest))

    def _measure_finally(self) -> None:
        """Measure the likeliest best for long enough to have a throughput, if it has none."""
        time, budget = self._durations, self.measurements.budget
        best = self._likeliest
        if best is None or (best in self.measurements and not time.has_rounds(best)):
            return
        self.measurements.begin_turn()
        for enough in (LEAST_ROUNDS, FEWEST_ROUNDS):
            missing, is_first = time.missing_rounds(best, enough), not len(self.measurements)
            # Of what was never measured, nobody knows how long it takes.
            if missing and budget.left > 0 and (is_first or time.of(best, missing) <= time.left):
                self._measure(best, missing, limit_seconds=budget.left)
                return

    @property
    def _likeliest(self) -> Configuration | None:
        return next(iter(self._posterior.chances()), None)

    def _sustain(self) -> None:
        """Measure the likeliest best without a break for longer, once, if there is time.

        If it turns out to be slower, that counts in place of all that was measured of it before.
        """
        budget, seconds = self.measurements.budget, self._durations.sustained_seconds
        best = self._likeliest
        if best is None or best in self.slowed or not self._durations.has_rounds(best):
            return
        expected = self._posterior.speed(best)
        left = budget.left - self.measurements.overhead_seconds
        is_known = self.measurements.longest_seconds(best) >= SUSTAINED_LEFT * seconds
        if is_known or expected is None or left < SUSTAINED_LEFT * seconds:
            return
        self.measurements.begin_turn()
        found = self._measure(best, 1, limit_seconds=left, sustained_seconds=min(seconds, left))
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
        self.turns.forget(best)
        self._posterior.tell(best, self.measurements.replicates(best))
