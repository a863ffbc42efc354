"""What a search says of a simulated machine, of which the truth is known."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import pytest
from bench.backtest.replay import Remembered
from tests.tuner.simulated import (
    BATCH_SIZE,
    Outcome,
    TimingRequest,
    entropy_of,
    search_on,
    tahoe_like,
    timed,
)

from cellfeed_tuner import Configuration, theory

N_CELLS, FLOOR = 1_000_000, 0.95
N_RUNS, NOISE, BUDGET = 200, 0.05, 60.0
# What a look takes beside its rounds, so that there are some 15, as in real runs.
OVERHEAD_SECONDS = 2.0
GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b in (4, 16, 64, 256)
    for f in (4, 16, 64, 256)
    for w in (0, 2)
]


def bits(configuration):
    """Expected entropy of a minibatch of 14 labels."""
    sizes = configuration.block_size, configuration.fetch_factor
    return theory.expected_entropy_bits([1] * 14, BATCH_SIZE, *sizes)


RANDOM_BITS = bits(Configuration(block_size=1, fetch_factor=1))


def true_speed(configuration):
    """Cells per second of a disk with a price per block and per cell, where workers help little."""
    cells = configuration.fetch_factor * BATCH_SIZE
    blocks = max(1, cells / configuration.block_size)
    seconds = (0.01 + 1e-4 * blocks + 1e-5 * cells) / (1 + 0.05 * configuration.num_workers)
    return cells / seconds


ENTROPIES = {each.plan_settings: {"plate": entropy_of(bits(each), RANDOM_BITS)} for each in GRID}
BEST = max(true_speed(each) for each in GRID if bits(each) >= FLOOR * RANDOM_BITS)


@dataclass
class NoisyMachine:
    """Rounds of one look have an error in common, and the machine may drift from look to look."""

    seed: int
    drift: float = 0.0
    now: float = 0.0
    log_load: float = 0.0
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self):
        self._rng = np.random.default_rng((self.seed, 7))

    def clock(self) -> float:
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        each = request.configuration
        self.log_load += self.drift * self._rng.standard_normal()
        error = self.log_load + NOISE * self._rng.standard_normal()
        cells = each.minibatches_per_round * BATCH_SIZE
        seconds = cells / true_speed(each) * np.exp(error)
        n_rounds = 1 + max(request.least_rounds, min(30, ceil(request.seconds / seconds)))
        self.now += OVERHEAD_SECONDS + n_rounds * seconds
        return timed(n_rounds * [seconds], n_new=1)


@dataclass(frozen=True)
class Said:
    """What a run said, and the load of the machine when it was over."""

    choice: Any
    seconds: float
    n_looks: int
    log_load: float

    @property
    def speed_now(self):
        """What measuring the choice again gives, at length."""
        return true_speed(self.choice.result.configuration) * np.exp(-self.log_load)


@pytest.fixture(scope="module", params=[0.0, 0.01], ids=["quiet", "drifting"])
def runs(request):
    """What so many searches have said."""
    found = []
    for seed in range(N_RUNS):
        process = NoisyMachine(seed, drift=request.param)
        options: dict[str, Any] = {
            "floor": FLOOR,
            "budget": BUDGET,
            "n_cells": N_CELLS,
            "model": Remembered,
        }
        search = search_on(process, ENTROPIES, seed=seed, geometry=tahoe_like(N_CELLS), **options)
        search.run(GRID)
        choice = search.choose(search.results(GRID))
        assert choice is not None
        found.append(Said(choice, process.now, search.measurements.n_replicates, process.log_load))
    return found


def test_choices_are_within_5_percent_of_the_best_in_95_percent_of_runs(runs):
    near = [true_speed(each.choice.result.configuration) >= 0.95 * BEST for each in runs]
    assert np.mean(near) >= 0.95


def test_intervals_hold_what_measuring_again_gives_as_often_as_they_say(runs):
    held = [each.choice.speed.low <= each.speed_now <= each.choice.speed.high for each in runs]
    assert 0.90 <= np.mean(held) <= 0.99


def test_intervals_of_ratios_hold_as_often_as_they_say(runs):
    """Of all rivals; turns cancel the drift."""
    held = []
    for each in runs:
        own = true_speed(each.choice.result.configuration)
        for rival in each.choice.rivals:
            ratio = own / true_speed(rival.configuration)
            held.append(rival.ratio.low <= ratio <= rival.ratio.high)
    assert len(held) >= N_RUNS / 2
    assert 0.90 <= np.mean(held) <= 0.99


def test_the_budget_is_kept_within_10_percent(runs):
    assert max(each.seconds for each in runs) <= 1.1 * BUDGET
    assert min(each.n_looks for each in runs) >= 8
