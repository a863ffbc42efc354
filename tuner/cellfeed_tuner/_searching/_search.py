"""Spending a time budget: a few looks that are proposed, then turns of two that decide."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import DEFAULT_SAMPLER, MOST_FIRST
from cellfeed_tuner._measuring._measure import FEWEST_ROUNDS, LEAST_ROUNDS, Measurement
from cellfeed_tuner._planning._constants import (
    FIRST_LOOKS,
    KNOWN,
    LEAST_CHANCE,
    LEAST_TURNS,
    MOST_REPLAYED,
    SHARE_PER_DOUBLING,
    SLACK_SECONDS,
    SURVEY_UNTIL,
    TURN_ROUNDS,
    TURN_SECONDS,
)
from cellfeed_tuner._planning._cost_model import CostModel, Geometry
from cellfeed_tuner._planning._posterior import Posterior
from cellfeed_tuner._planning._recommend import Choice, choose
from cellfeed_tuner._planning._space import Space
from cellfeed_tuner._planning._turns import Turns
from cellfeed_tuner._results._configuration_result import ConfigurationResult, Status
from cellfeed_tuner._searching._durations import Durations
from cellfeed_tuner._searching._measurements import Measurements
from cellfeed_tuner._searching._requirements import Requirements

if TYPE_CHECKING:  # they load Optuna
    from optuna.samplers import BaseSampler

    from cellfeed_tuner._searching._samplers import Proposals

__all__ = ["Search"]

_OUT_OF_BUDGET: tuple[Status, str] = ("out of budget", "")
_MAY_RUN = {"too slow", "below entropy floor", "out of budget"}
_BELOW_FLOOR: tuple[Status, str] = ("below entropy floor", "")


@dataclass(slots=True, kw_only=True)
class Search:
    """One search, from the first measurement to the last.

    Parameters
    ----------
    space
        Where there is more to choose from than is listed; None where all is.
    known
        What an earlier run has measured, the most telling first: some of it is looked at first.
    sampler
        What proposes; see `autotune`.
    model
        What predicts costs.
    """

    measurements: Measurements
    requirements: Requirements
    geometry: Geometry
    known: Sequence[Configuration] = ()
    space: Space | None = None
    sampler: "str | BaseSampler" = DEFAULT_SAMPLER
    model: type[CostModel] = CostModel
    turns: Turns = field(default_factory=Turns, init=False)
    _not_timed: dict[Configuration, tuple[Status, str]] = field(default_factory=dict, init=False)
    _posterior: Posterior = field(init=False)
    _durations: Durations = field(init=False)
    _proposals: "Proposals | None" = field(default=None, init=False)
    # Cells per second of first looks since the last turn, which make a turn.
    _first_speeds: dict[Configuration, float] = field(default_factory=dict, init=False)
    # What was measured once more after it was clear that it is the best.
    _confirmed: Configuration | None = field(default=None, init=False)

    def run(self, grid: Iterable[Configuration]) -> None:
        """Measure what may be chosen, as is proposed, until the best is clear."""
        self._begin(grid)
        if not self._posterior.candidates:
            return
        rng = np.random.default_rng(self.measurements.seed)
        while turn := self._next_turn():
            rng.shuffle(turn)
            self._take_turn(turn)
            self._widen()
        self._settle()
        for each, chance in self._posterior.chances().items():
            if each in self._not_timed and chance < LEAST_CHANCE:
                self._not_timed[each] = "too slow", "as its like were"

    @property
    def timed(self) -> list[Configuration]:
        """What was measured, if only for too short a time, in the order of its settings."""
        return sorted(self.measurements)

    @property
    def n_considered(self) -> int:
        """Of how many configurations the entropy is known."""
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
        """Where nothing is feasible, measure what comes nearest to it and costs least."""
        if self.measurements.with_throughput():
            return
        rest = [each for each, (status, _) in self._not_timed.items() if status in _MAY_RUN]
        rest += [each for each in self.measurements if not self.measurements[each].failure]
        mixes = self.requirements.mixes
        for each in sorted(rest, key=lambda each: (not mixes(each), self._durations.of(each))):
            is_first = not len(self.measurements)  # however little time there is
            if is_first or self._durations.of(each) <= self.measurements.budget.left_until(
                SURVEY_UNTIL
            ):
                self._look(each, LEAST_ROUNDS)

    def choose(self, results: Sequence[ConfigurationResult]) -> Choice | None:
        """Return the configuration to use by what is known now; None if none is feasible."""
        costs = self._posterior.seconds_per_cell()
        if not self.requirements.is_planned:  # what was stopped has no entropy
            results = [each for each in results if each.entropy_bits.measured is not None]
        return choose(results, self.requirements.constraints, self.turns, costs)

    def with_step(self, choice: Choice) -> Measurement | None:
        """Measure the choice with the training step between minibatches; None without the time.

        So that there is a figure, it may rest on fewer rounds than a throughput does.
        """
        configuration = choice.result.configuration
        step, left = self.requirements.constraints.step_seconds, self.measurements.budget.left
        cells_per_step = self.measurements.ranks.n_local * self.measurements.batch_size
        seconds_per_minibatch = max(step or 0.0, cells_per_step / choice.speed.value)
        rounds = left / (seconds_per_minibatch * configuration.minibatches_per_round)
        least_rounds = min(LEAST_ROUNDS, int(rounds) - self._durations.n_new(configuration))
        if step is None or least_rounds < 1:
            return None
        limit = 2 * left + SLACK_SECONDS
        found = self.measurements.timed(
            configuration, least_rounds=least_rounds, step_seconds=step, limit_seconds=limit
        )
        return found if found.round_seconds else None

    @property
    def likely(self) -> set[Configuration]:
        """What may still be the best."""
        chances = self._posterior.chances().items()
        return {each for each, chance in chances if chance >= LEAST_CHANCE}

    def _begin(self, grid: Iterable[Configuration]) -> None:
        """Sort out what may be chosen, and note why the rest may not."""
        requirements = self.requirements
        self._not_timed = {each: requirements.obstacle(each) or _OUT_OF_BUDGET for each in grid}
        runnable = [each for each, status in self._not_timed.items() if status == _OUT_OF_BUDGET]
        candidates = [each for each in runnable if requirements.mixes(each)]
        self._not_timed |= dict.fromkeys(set(runnable) - set(candidates), _BELOW_FLOOR)
        self._posterior = Posterior(
            runnable,
            candidates,
            batch_size=self.measurements.batch_size,
            geometry=self.geometry,
            goal_of=requirements.goal,
            seed=self.measurements.seed,
            model=self.model,
        )
        if not candidates and self.space is not None:
            most = [each for each in self.space.best_mixed() if not requirements.obstacle(each)]
            self._add(most[:MOST_REPLAYED])
        is_stepped = requirements.constraints.step_seconds is not None
        self._durations = Durations(
            self._posterior,
            self.measurements,
            n_cells=requirements.n_cells,
            is_stepped=is_stepped,
        )
        if self.sampler != DEFAULT_SAMPLER:
            from cellfeed_tuner._searching._samplers import Proposals  # noqa: PLC0415 - Optuna

            known = [*self._not_timed, *(self.space.ends() if self.space else ())]
            self._proposals = Proposals(self.sampler, known, self.measurements.seed)

    def _add(self, configurations: Iterable[Configuration]) -> None:
        """Take in what is new, can run and mixes well enough."""
        known = {*self._not_timed, *self.measurements}
        below = [each for each, status in self._not_timed.items() if status == _BELOW_FLOOR]
        for each in configurations:
            if each in known or self.requirements.obstacle(each):
                continue
            # What has larger blocks in smaller fetches than what mixes too little is not replayed.
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
        """Return what to measure beside each other next; empty where nothing is to be gained."""
        if (first := self._first_look()) is not None:
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
        if self._durations.has_rounds(best) and not self._durations.affords(best):
            return []
        if not self._durations.is_time_to_propose and self._is_decided(chances):
            if self._confirmed == best:
                return []
            self._confirmed = best  # if the next turn contradicts, there are more
        is_alone = all(each == best or chance < LEAST_CHANCE for each, chance in chances.items())
        pair = [best, *self._runner_up(best)] if is_alone else self._pair()
        doubted = self._posterior.doubted()
        if doubted is not None and self._durations.affords(doubted):
            self._posterior.take_back(doubted)
            pair += {doubted} - {*pair}
        while len(pair) > 1 and not self._durations.is_time_for(pair):
            pair.pop()
        is_clear = len(pair) == 1 and self.turns.count(pair[0]) >= LEAST_TURNS
        return pair if self._durations.is_time_for(pair) and not is_clear else []

    def _first_look(self) -> Configuration | None:
        """Return what to look at before anything is compared; None when that was done."""
        if len(self.measurements) >= FIRST_LOOKS:
            return None
        new = [each for each in self._posterior.candidates if self._durations.affords_first(each)]
        # Whether workers help is what is known least: the last has some, unless another has.
        other_way = not any(each.num_workers for each in self.measurements)
        is_last = len(self.measurements) == FIRST_LOOKS - 1
        others = [each for each in new if is_last and bool(each.num_workers) == other_way]
        known = [each for each in self.known if each in self._posterior.candidates][:MOST_FIRST]
        new = [each for each in known if each in new][:1] or others or new
        return self._proposed(new) if new else None

    def _proposed(self, new: Sequence[Configuration]) -> Configuration:
        """Return which of what is new to look at next, of at least one."""
        if self._proposals is not None:
            return self._proposals.next_of(new, self.measurements.by_replicate())
        return self._posterior.most_promising(new) or new[0]

    def _pair(self) -> list[Configuration]:
        """Return the likeliest best, and what is to be held against it, as far as there is time."""
        time = self._durations
        possible = [each for each in self._posterior.candidates if time.affords(each)]
        leader = self._posterior.leader(possible)
        if leader is None or not time.is_time_for([leader]):
            return []
        rest = [each for each in possible if time.is_time_for([leader, each]) and each != leader]
        rest = [each for each in rest if not self.turns.is_slower(each, leader)]
        new = [each for each in rest if each not in self.measurements]
        if self._proposals is not None:
            known = [each for each in rest if each in self.measurements]
            rest = new if new and time.is_time_to_propose else known
        other = self._posterior.challenger(leader, rest)
        if other is None:
            return [leader]
        is_known = self._posterior.error(leader) < KNOWN * self._posterior.error(other)
        if self._proposals is not None and other not in self.measurements:
            other = self._proposed(new)
        # A leader that is known well needs no look beside what is not.
        return [other] if is_known and leader in self.measurements else [leader, other]

    def _turn_for_need(self, enough: Collection[Configuration]) -> list[Configuration]:
        """Return what may mix best of what keeps up, for the time that a look at it takes.

        Nothing is held against anything else: each has to keep up by itself. ``enough`` are known
        to do so.
        """
        time = self._durations
        possible = [each for each in self._posterior.candidates if time.affords(each)]
        worth = max(map(self.requirements.worth, enough), default=0.0)
        gains = self._posterior.gains(worth, set(possible) - set(enough))
        least = SHARE_PER_DOUBLING if enough else LEAST_CHANCE
        gains = {each: gain for each, gain in gains.items() if gain >= least}
        new = [each for each in gains if each not in self.measurements]
        if new and self._proposals is not None:
            return [self._proposed(new)]
        return sorted(gains, key=lambda each: -gains[each] / time.of(each))[:1]

    def _take_turn(self, turn: Sequence[Configuration], n_rounds: int = TURN_ROUNDS) -> None:
        """Look at some, one after the other."""
        is_first = len(turn) == 1 and turn[0] not in self.measurements
        speeds = dict[Configuration, float]()
        for each in turn:
            if is_first:
                found = self._look(each, 1, limit_seconds=self._durations.first_limit)
            else:
                found = self._look(each, n_rounds, in_turn=True)
            if found.round_seconds:
                speeds[each] = found.rough_cells_per_second
        if is_first:
            self._first_speeds |= speeds
            return
        self.turns.note(self._first_speeds)
        self.turns.note(speeds)
        self._first_speeds = {}

    def _look(
        self,
        configuration: Configuration,
        least_rounds: int,
        *,
        in_turn: bool = False,
        limit_seconds: float | None = None,
    ) -> Measurement:
        """Take a look at a configuration, and tell of it."""
        found = self.measurements.take(
            configuration,
            least_rounds,
            seconds=TURN_SECONDS,
            in_turn=in_turn,
            limit_seconds=limit_seconds,
        )
        self._not_timed.pop(configuration, None)
        looks = self.measurements.replicates(configuration)
        self._posterior.tell(configuration, looks)
        memory_bytes = self.requirements.constraints.memory_bytes
        if found.failure or found.peak_memory_bytes > memory_bytes:
            self._posterior.withdraw(configuration)
        if self.requirements.learn(found):
            self._posterior.aim_anew()
            for each in self._posterior.candidates:
                if not self.requirements.mixes(each):
                    self._posterior.withdraw(each)
        return found

    def _is_decided(self, chances: Mapping[Configuration, float]) -> bool:
        """Return whether more turns would change nothing."""
        best = next(iter(chances))
        if self.turns.count(best) < LEAST_TURNS:
            return False
        likely = [each for each, chance in chances.items() if chance >= LEAST_CHANCE]
        likely += self._runner_up(best)
        rivals = [self.turns.rival(best, each) for each in likely if each != best]
        others = [self.turns.rival(best, each) for each in self.turns.finalists() if each != best]
        known = [each for each in (*rivals, *others) if each is not None]
        return None not in rivals and not any(each.is_undecided for each in known)

    def _runner_up(self, best: Configuration) -> list[Configuration]:
        """Return what is the fastest beside the best of what can be held against it, if any."""
        costs, time = self._posterior.seconds_per_cell(), self._durations
        others = [each for each in self._posterior.candidates if each in self.measurements]
        others = [each for each in others if each != best and time.affords(each)]
        others = [each for each in others if not self.turns.is_slower(each, best)]
        return sorted(others, key=costs.__getitem__)[:1]

    def _widen(self) -> None:
        """Take in what is around the likeliest best of a space that is not listed."""
        if self.space is None or len(self.measurements) < FIRST_LOOKS:
            return
        likeliest = next(iter(self._posterior.chances()), None)
        if likeliest is not None:
            self._add(self.space.around(likeliest))

    def _settle(self) -> None:
        """Give the likeliest that there is time for a throughput, if there were too few turns.

        Where there is time for none, the cheapest gets one all the same: a recommendation that
        rests on little is better than none.
        """
        likely = [each for each in self._posterior.chances() if self._durations.has_rounds(each)]
        for each in likely:
            for enough in (LEAST_ROUNDS, FEWEST_ROUNDS):
                missing = self._durations.missing_rounds(each, enough)
                left = self._durations.left
                if missing and self._durations.of(each, missing) <= left:
                    self._look(each, missing, limit_seconds=left)
            if not self._durations.missing_rounds(each):
                return
        rest = likely or self._posterior.candidates
        cheapest = min(rest, key=self._durations.of, default=None)
        if cheapest is not None and self.measurements.budget.left > 0:
            limit = max(self.measurements.budget.limit_seconds, self._durations.left)
            self._look(cheapest, self._durations.missing_rounds(cheapest), limit_seconds=limit)
