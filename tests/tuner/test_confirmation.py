"""What is clear is measured once more, and what that shows counts."""

from dataclasses import dataclass, field
from math import ceil

import pytest
from tests.tuner.simulated import (
    BATCH_SIZE,
    Outcome,
    TimingRequest,
    entropy_of,
    search_on,
    timed,
)

from cellfeed_tuner import Configuration

BUDGET = 600.0
GRID = [Configuration(block_size=b, fetch_factor=f) for b in (4, 16, 64) for f in (16, 64)]
MIXED = entropy_of(3.0, random=3.0)


def true_seconds_per_cell(each):
    return 1e-4 * (1 + 4 / each.block_size + 4 / each.fetch_factor)


@dataclass
class TurningMachine:
    """One configuration becomes slower with a certain look, and stays so."""

    turns_slow: Configuration | None = None
    at_look: int = 0
    slower: float = 3.0
    now: float = 0.0
    asked: list[Configuration] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        each = request.configuration
        is_slow = each == self.turns_slow and len(self.asked) >= self.at_look
        self.asked.append(each)
        seconds = each.minibatches_per_round * BATCH_SIZE * true_seconds_per_cell(each)
        seconds *= self.slower if is_slow else 1.0
        n_rounds = 1 + max(request.least_rounds, ceil(request.seconds / seconds))
        self.now += 1.0 + n_rounds * seconds
        return timed(n_rounds * [seconds], n_new=1)


def chosen_on(machine):
    entropies = {each.plan_settings: {"plate": MIXED} for each in GRID}
    search = search_on(machine, entropies, budget=BUDGET)
    search.run(GRID)
    choice = search.choose(search.results(GRID))
    assert choice is not None
    return choice.result.configuration


@pytest.fixture(scope="module")
def undisturbed():
    """The choice, and how many looks it took."""
    machine = TurningMachine()
    chosen = chosen_on(machine)
    assert chosen == min(GRID, key=true_seconds_per_cell)
    assert machine.asked[-1] == chosen or machine.asked[-2] == chosen
    return chosen, len(machine.asked)


@pytest.mark.parametrize("slower", [2.0, 3.0])
def test_a_confirmation_that_contradicts_the_race_opens_the_choice_again(undisturbed, slower):
    """All is as before until the last turn, in which the choice is far slower than it was."""
    chosen, n_looks = undisturbed
    machine = TurningMachine(turns_slow=chosen, at_look=n_looks - 2, slower=slower)
    found = chosen_on(machine)
    assert len(machine.asked) > n_looks
    assert found != chosen
    rest = [each for each in GRID if each != chosen]
    assert true_seconds_per_cell(found) <= 1.05 * min(map(true_seconds_per_cell, rest))


def test_a_confirmation_that_agrees_ends_the_search(undisturbed):
    chosen, n_looks = undisturbed
    machine = TurningMachine(turns_slow=chosen, at_look=n_looks - 2, slower=1.0)
    assert chosen_on(machine) == chosen
    assert len(machine.asked) == n_looks
