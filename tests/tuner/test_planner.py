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

    def affords(self, configuration, gain=0.0):
        return len(self.measured) < self.most

    def cost(self, configuration):
        return 1.0


def planner_of(goal=fastest, seed=0, **settings):
    return Planner(GRID, batch_size=64, geometry=Geometry(), goal=goal, seed=seed, **settings)


def played(goal=fastest, most=1000, noise=0.02, withdrawn=(), seed=0, **settings):
    """Return what was measured, in that order, and the planner."""
    planner = planner_of(goal, seed, **settings)
    rng = np.random.default_rng(seed)
    measured: dict[Configuration, float] = {}
    budget = Number(measured, most)
    while (asked := planner.ask(budget)) is not None:
        assert budget.affords(asked)
        assert asked not in measured
        measured[asked] = seconds_per_cell(asked) * np.exp(noise * rng.standard_normal())
        planner.tell(asked, [measured[asked]])
        if asked in withdrawn:
            planner.withdraw(asked)
    return measured, planner


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


def test_what_was_withdrawn_is_not_asked_for_again_and_has_no_chance():
    best = min(GRID, key=seconds_per_cell)
    measured, planner = played(withdrawn=[best])
    assert best in measured
    assert best not in planner.chances()
    others = [each for each in GRID if each != best]
    assert min(others, key=seconds_per_cell) in measured


def test_what_failed_is_not_asked_for_again():
    planner = planner_of()
    asked = []
    while (configuration := planner.ask(Number([], 1))) is not None:
        asked.append(configuration)
        planner.tell(configuration, [])
    assert len(set(asked)) == len(asked)
    assert planner.chances() == {}


def test_chances_are_of_what_was_measured_and_sum_to_one():
    measured, planner = played(noise=0.05)
    chances = planner.chances()
    assert chances.keys() == measured.keys()
    assert sum(chances.values()) == pytest.approx(1)
    assert list(chances.values()) == sorted(chances.values(), reverse=True)


def test_chances_become_clear_with_replicates_and_not_with_their_number_of_rounds():
    """Two that differ by 10 %, while replicates differ by as much."""
    slow, fast = GRID[-3], GRID[-6]
    rng = np.random.default_rng(0)

    def chance_of_fast(n):
        planner = planner_of()
        for each, cost in ((slow, 1.1e-5), (fast, 1e-5)):
            planner.tell(each, (cost * np.exp(0.1 * rng.standard_normal(n))).tolist())
        return planner.chances()[fast]

    assert 0.2 < np.mean([chance_of_fast(1) for _ in range(20)]) < 0.9
    assert np.mean([chance_of_fast(64) for _ in range(5)]) > 0.99


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
    measured, _ = played(most=3, first=first)
    assert list(measured)[:2] == first


def test_where_costs_are_believed_only_what_may_be_the_best_is_measured():
    believed = {each: Observation(seconds_per_cell(each), 0.05) for each in GRID}
    measured, _ = played(believed=believed)
    best = min(map(seconds_per_cell, GRID))
    assert best in map(seconds_per_cell, measured)
    assert all(seconds_per_cell(each) < 1.3 * best for each in measured)
