"""What samplers propose, and the study that a search makes."""

from dataclasses import dataclass
from math import ceil

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from tests.tuner.simulated import Outcome, TimingRequest, failed, search_on, timed

from cellfeed_tuner import Configuration, EntropyBits, Estimate
from cellfeed_tuner._searching._posterior import Replicate
from cellfeed_tuner._searching._trials import ended_trials

GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b in (4, 16, 64, 256)
    for f in (4, 16, 64)
    for w in (0, 2)
]
COST_MODEL, TPE = "cost-model", "tpe"
MIXED = EntropyBits(expected=Estimate(1.0, 1.0, 1.0), random=1.0)


def cost(each):
    """Seconds per cell, least at block 64, fetch 64 and no workers."""
    apart = abs(np.log2(each.block_size / 64)) + abs(np.log2(each.fetch_factor / 64))
    return 1e-5 * (1 + 0.2 * apart + 0.3 * each.num_workers)


@dataclass
class Machine:
    """Answers as a measuring process would; a slow machine, on which few are measured."""

    now: float = 0.0
    most_bytes: int = 100
    broken: Configuration | None = None

    def clock(self):
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        seconds = request.cells_per_round * cost(request.configuration)
        n_rounds = max(request.least_rounds, min(30, ceil(request.seconds / seconds)))
        self.now += 2.0 + n_rounds * seconds
        if request.configuration == self.broken:
            return failed("no workers here")
        return timed(n_rounds * [seconds], memory=10 * request.configuration.fetch_factor)


def searched(sampler, *, seed=0, memory=10**6, budget=60.0, known=(), **machine):
    search = search_on(
        Machine(**machine),
        {each.plan_settings: {"plate": MIXED} for each in GRID},
        floor=0.5, memory=memory, row_bytes=1e-6, seed=seed, budget=budget, known=known,
        sampler=sampler,
    )  # fmt: skip
    search.run(GRID)
    return search


@pytest.mark.parametrize(
    "sampler", [COST_MODEL, "gp", "random", TPE, optuna.samplers.RandomSampler(seed=0)]
)
def test_all_propose_nothing_but_candidates(sampler):
    # The Gaussian process takes a second for each.
    measured = list(searched(sampler, budget=20.0 if sampler == "gp" else 60.0).measurements)
    assert len(measured) > 4
    assert set(measured) <= set(GRID)


@pytest.mark.parametrize(("sampler", "least"), [(TPE, 0.55), (COST_MODEL, 0.8)])
def test_proposals_follow_what_is_still_racing(sampler, least):
    """No trial has ended, but the better half comes first all the same."""
    better = sorted(GRID, key=cost)[: len(GRID) // 2]
    shares = [
        np.mean([each in better for each in [*searched(sampler, seed=seed).measurements][4:12]])
        for seed in range(4)
    ]
    assert np.mean(shares) > least


def test_a_study_has_a_trial_for_each_configuration_that_was_measured():
    broken = GRID[0]
    search = searched(COST_MODEL, memory=300, known=[broken], broken=broken)
    ended = search.ended_trials()
    found = {Configuration(**each.params): each for each in ended}
    assert list(found) == list(search.measurements)
    states = {each: trial.state for each, trial in found.items()}
    assert states[broken] == TrialState.FAIL
    large = [each for each in states if 10 * each.fetch_factor > 300]
    assert large
    assert {states[each] for each in large} == {TrialState.PRUNED}
    fastest = min({*states} - {*large, broken}, key=cost)
    assert states[fastest] == TrialState.COMPLETE
    assert found[fastest].value == pytest.approx(cost(fastest))
    assert found[fastest].user_attrs["peak_memory_bytes"] == 10 * fastest.fetch_factor
    numbers = sorted(n for each in ended for n in each.intermediate_values)
    assert numbers == sorted({*numbers})  # each replicate has its own


def test_the_study_says_how_each_configuration_ended():
    fast, slow, big, broken = GRID[:4]
    of_fast = [Replicate(1.0 + 0.01 * number, number, 2 * number) for number in range(4)]
    of_slow = [Replicate(2.0 - 0.01 * number, number, 2 * number + 1) for number in range(4)]
    ended = ended_trials(
        {fast: of_fast, slow: of_slow, big: [Replicate(1.5, 5, 9)], broken: []},
        known=GRID,
        facts={each: {"peak_memory_bytes": 10.0} for each in (fast, slow)},
        excesses={big: {"memory": 5.0}, fast: {"memory": -5.0}},
        lost={slow},
    )
    found = {Configuration(**each.params): each for each in ended}
    assert {each: found[each].state for each in found} == {
        fast: TrialState.COMPLETE,
        slow: TrialState.PRUNED,  # it lost the race
        big: TrialState.PRUNED,  # it takes too much memory
        broken: TrialState.FAIL,
    }
    assert found[fast].value == pytest.approx(1.015)
    assert list(found[fast].intermediate_values.values()) == [1.0, 1.01, 1.02, 1.03]
    assert found[slow].user_attrs == {"peak_memory_bytes": 10.0}
    if hasattr(found[big], "constraints"):  # since Optuna 5
        assert found[big].constraints == {"memory": 5.0}
