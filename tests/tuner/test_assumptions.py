"""Whether the cost model holds is judged by what was measured; where it does not, the search and
its report do without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from tests.tuner.simulated import Outcome, TimingRequest, entropy_of, search_on, timed

from cellfeed_tuner import Configuration
from cellfeed_tuner._choose import fastest
from cellfeed_tuner._searching._cost_model import Geometry
from cellfeed_tuner._searching._posterior import Posterior, Replicate

BATCH_SIZE = 64
GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256), (1, 4, 16, 64), (0, 1, 2))
]


def by_terms(configuration):
    """Seconds per cell as the cost model has them."""
    blocks = 1 / min(configuration.block_size, BATCH_SIZE * configuration.fetch_factor)
    fetch = 1 / configuration.fetch_factor
    return (blocks + fetch + 0.1) * 1e-4 * (1 + 0.3 * configuration.num_workers)


def without_structure(seed):
    """Seconds per cell that have nothing in common, by configuration."""
    logs = 0.7 * np.random.default_rng((seed, 1)).standard_normal(len(GRID))
    return dict(zip(GRID, 1e-4 * np.exp(logs), strict=True)).__getitem__


def posterior_after(seconds_per_cell, *, n, noise, seed, disturbed=None):
    """What is known after measuring so many configurations, of which one was disturbed."""
    rng = np.random.default_rng(seed)
    posterior = Posterior(
        *(GRID, GRID),
        batch_size=BATCH_SIZE,
        geometry=Geometry(),
        goal_of=lambda _: fastest,
        seed=seed,
    )
    for number, place in enumerate(rng.permutation(len(GRID))[:n]):
        seconds = seconds_per_cell(GRID[place]) * np.exp(noise * rng.standard_normal())
        seconds *= 2 if number == disturbed else 1
        posterior.tell(GRID[place], [Replicate(seconds, turn=0)])
    return posterior


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_the_cost_model_is_believed_where_it_holds_and_not_where_nothing_has_structure(noise):
    def n_believed(truth_of, n):
        found = [
            posterior_after(truth_of(seed), n=n, noise=noise, seed=seed).is_as_assumed
            for seed in range(20)
        ]
        return sum(found)

    assert n_believed(lambda _: by_terms, 4) >= 18
    assert n_believed(lambda _: by_terms, 8) >= 18
    assert n_believed(without_structure, 8) <= 4


def test_before_any_measurement_the_cost_model_is_believed():
    assert posterior_after(by_terms, n=0, noise=0.0, seed=0).is_as_assumed


def test_one_measurement_says_nothing_of_it():
    assert posterior_after(without_structure(0), n=1, noise=0.0, seed=0).is_as_assumed


def test_a_draw_of_many_unknown_ones_is_open_though_each_has_hardly_a_chance():
    posterior = posterior_after(without_structure(3), n=8, noise=0.05, seed=3)
    assert not posterior.is_as_assumed
    chances = posterior.chances()
    assert posterior.open_to_others(chances)
    leader = posterior.leader(GRID)
    unmeasured = posterior.challenger(leader, [each for each in GRID if each != leader])
    assert unmeasured not in posterior._replicates


class TestChanceOfFaster:
    def known(self, slower):
        """Two configurations are known, and one is slower by that share; nothing else can run."""
        some = GRID[:2]
        posterior = Posterior(
            *(some, some),
            batch_size=BATCH_SIZE,
            geometry=Geometry(),
            goal_of=lambda _: fastest,
            seed=0,
        )
        for each, cost in zip(some, (1.0 + slower, 1.0), strict=True):
            posterior.tell(each, [Replicate(cost * (1 + 0.01 * n % 2), n) for n in range(16)])
        return posterior

    def test_one_that_is_clearly_slower_says_which_is_faster(self):
        assert self.known(0.5).chance_of_faster(GRID[0]) == (1.0, GRID[1])

    def test_one_that_is_clearly_the_fastest_has_no_such_chance(self):
        assert self.known(0.5).chance_of_faster(GRID[1])[0] == 0.0

    def test_one_that_is_2_percent_slower_is_not_clearly_slower(self):
        assert self.known(0.02).chance_of_faster(GRID[0])[0] < 0.2

    def test_named_rivals_do_not_count(self):
        assert self.known(0.5).chance_of_faster(GRID[0], [GRID[1]]) == (0.0, None)


@dataclass
class Machine:
    """Its clock goes on by the same with each measurement; each has an error of 5 %."""

    seconds_per_cell: Callable[[Configuration], float]
    seed: int
    memory: Callable[[Configuration], int] = lambda _: 100
    now: float = 0.0
    asked: list[Configuration] = field(default_factory=list)

    def __post_init__(self):
        self._rng = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        each = request.configuration
        self.asked.append(each)
        cells = each.minibatches_per_round * BATCH_SIZE
        seconds = cells * self.seconds_per_cell(each) * np.exp(0.05 * self._rng.standard_normal())
        self.now += 4.0
        return timed(5 * [1e-3 * seconds], n_new=1, memory=self.memory(each))


def searched(machine, **options):
    entropies = {each.plan_settings: {"plate": entropy_of(3.0, 3.0)} for each in GRID}
    search = search_on(machine, entropies, seed=machine.seed, **options)
    search.run(GRID)
    results = search.results(GRID)
    return results, search.choose(results)


def test_without_structure_the_search_looks_at_many_and_says_that_it_is_undecided():
    """Unless what it measures first happens to be as the cost model has it."""
    n_many, n_said = 0, 0
    for seed in range(8):
        machine = Machine(without_structure(seed), seed)
        _, choice = searched(machine)
        assert choice is not None
        n_many += len(set(machine.asked)) >= 8
        is_said = "Undecided: throughputs do not follow the cost model" in choice.reason
        n_said += is_said
        if is_said:
            assert choice.chance_of_faster >= 0.2
            assert choice.reason.endswith("is more than 5% faster; a larger budget would tell.")
    assert n_many >= 5
    assert n_said >= 4


def test_with_structure_it_does_not_say_so():
    _, choice = searched(Machine(by_terms, 0))
    assert choice is not None
    assert "follow the cost model" not in choice.reason


def test_what_is_larger_than_one_that_is_over_memory_is_not_measured():
    """Of which nothing is known beforehand."""

    def memory(configuration):
        return 10**6 * configuration.fetch_factor * (1 + configuration.num_workers)

    machine = Machine(by_terms, 0, memory=memory)
    results, choice = searched(machine, memory=20 * 10**6)
    assert choice is not None
    assert memory(choice.configuration) <= 20 * 10**6
    over = [each for each in machine.asked if memory(each) > 20 * 10**6]
    assert over
    for number, each in enumerate(over):
        for later in over[number + 1 :]:
            is_larger = later.fetch_factor >= each.fetch_factor
            assert not (is_larger and later.num_workers >= each.num_workers)
    notes = {each.note for each in results if each.status == "over memory"}
    assert notes
    assert all(" MB" in each for each in notes)
