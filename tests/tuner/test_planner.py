"""What is measured next, in worlds of which everything is known."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._planning._cost_model import Geometry, Observation
from cellfeed_tuner._planning._goal import best_mixed, fastest
from cellfeed_tuner._planning._planner import Planner

GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256), (1, 4, 16, 64), (0, 1, 2))
]


def seconds_per_cell(configuration):
    blocks = 1 / min(configuration.block_size, 64 * configuration.fetch_factor)
    fetch = 1 / configuration.fetch_factor
    return (blocks + fetch + 0.1) * 1e-4 * (1 + 0.3 * configuration.num_workers)


@dataclass
class Number:
    """So many configurations may be measured."""

    measured: Collection[Configuration]
    most: int

    def affords(self, configuration):
        return configuration in self.measured or len(self.measured) < self.most

    def cost(self, configuration):
        return 1.0


def played(goal=fastest, most=1000, noise=0.02, common=0.0, withdrawn=(), seed=0):
    """Return all looks after a search, in the order of the first ones, and the planner."""
    planner = Planner(GRID, batch_size=64, geometry=Geometry(), goal=goal, seed=seed)
    rng = np.random.default_rng(seed)
    looks: dict[Configuration, list[list[float]]] = {}
    budget = Number(looks, most)
    while (asked := planner.ask(budget)) is not None:
        assert budget.affords(asked)
        moment = common * rng.standard_normal()
        new = seconds_per_cell(asked) * np.exp(moment + noise * rng.standard_normal(4))
        looks.setdefault(asked, []).append(new.tolist())
        planner.tell(asked, looks[asked])
        if asked in withdrawn:
            planner.withdraw(asked)
    return looks, planner


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_is_measured_though_most_are_not(seed):
    samples, _ = played(seed=seed)
    assert min(GRID, key=seconds_per_cell) in samples
    assert len(samples) < len(GRID) / 2


def test_no_more_is_measured_than_can_be_afforded():
    samples, _ = played(most=3)
    assert len(samples) == 3


def test_with_nothing_to_be_afforded_nothing_is_asked_for():
    assert played(most=0)[0] == {}


def test_a_search_repeats_itself_by_its_seed():
    assert played(seed=3)[0] == played(seed=3)[0]


def test_what_was_withdrawn_is_not_asked_for_again():
    best = min(GRID, key=seconds_per_cell)
    samples, _ = played(withdrawn=[best])
    assert len(samples[best]) == 1
    others = [each for each in GRID if each != best]
    assert min(others, key=seconds_per_cell) in samples


def test_what_failed_is_not_asked_for_again():
    planner = Planner(GRID, batch_size=64, geometry=Geometry(), goal=fastest, seed=0)
    asked = []
    while (configuration := planner.ask(Number([], 1))) is not None:
        asked.append(configuration)
        planner.tell(configuration, [])
    assert len(set(asked)) == len(asked)


def test_slow_configurations_leave_the_race_early():
    samples, _ = played(noise=0.1)
    best = min(GRID, key=seconds_per_cell)
    slow = [each for each in samples if seconds_per_cell(each) > 2 * seconds_per_cell(best)]
    assert all(len(samples[each]) == 1 for each in slow)


@pytest.mark.parametrize("seed", range(5))
def test_rounds_of_one_look_are_not_taken_for_independent(seed):
    """Rounds agree with each other, while looks are apart by 30 %: it takes many of these."""
    looks, _ = played(noise=0.001, common=0.3, seed=seed)
    means = {each: np.mean(found) for each, found in looks.items() if len(found) > 1}
    chosen = min(means, key=means.__getitem__)
    assert seconds_per_cell(chosen) <= 1.1 * min(map(seconds_per_cell, GRID))


def test_one_look_is_never_enough_however_well_its_rounds_agree():
    planner = Planner(GRID, batch_size=64, geometry=Geometry(), goal=fastest, seed=0)
    for each in GRID:
        planner.tell(each, [[seconds_per_cell(each)] * 4])
    assert planner.ask(Number(GRID, 1000)) == min(GRID, key=seconds_per_cell)


def test_with_a_need_the_best_mixed_of_the_fast_ones_is_measured():
    shares = [1 - 0.1 * np.log2(each.block_size) / 8 for each in GRID]
    need = 1 / 3e-5
    samples, _ = played(goal=best_mixed(need, shares))
    fast = [each for each in GRID if 1 / seconds_per_cell(each) >= need]
    least_block = min(each.block_size for each in fast)
    assert least_block in {each.block_size for each in samples}
    assert len(samples) < len(GRID) / 2


def test_probes_begin_with_what_is_given():
    first = [GRID[7], GRID[0]]
    planner = Planner(GRID, batch_size=64, geometry=Geometry(), goal=fastest, seed=0, first=first)
    asked: list[Configuration] = []
    for _ in range(3):
        configuration = planner.ask(Number(asked, 1000))
        assert configuration is not None
        asked.append(configuration)
        planner.tell(configuration, [[seconds_per_cell(configuration)] * 4])
    assert asked[:2] == first
    assert asked[2] not in first


def test_where_costs_are_believed_only_what_may_be_the_best_is_measured():
    believed = {each: Observation(seconds_per_cell(each), 0.05) for each in GRID}
    planner = Planner(
        GRID, batch_size=64, geometry=Geometry(), goal=fastest, seed=0, believed=believed
    )
    rng = np.random.default_rng(0)
    samples: dict[Configuration, list[list[float]]] = {}
    while (asked := planner.ask(Number(samples, 1000))) is not None:
        new = seconds_per_cell(asked) * np.exp(0.02 * rng.standard_normal(4))
        samples.setdefault(asked, []).append(new.tolist())
        planner.tell(asked, samples[asked])
    best = min(map(seconds_per_cell, GRID))
    assert best in map(seconds_per_cell, samples)
    assert all(seconds_per_cell(each) < 1.3 * best for each in samples)
