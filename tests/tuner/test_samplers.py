"""What samplers propose, and the study that their trials make."""

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from cellfeed_tuner import Configuration
from cellfeed_tuner._choose import fastest
from cellfeed_tuner._searching._cost_model import Geometry
from cellfeed_tuner._searching._posterior import Posterior, Replicate, TurnsOf
from cellfeed_tuner._searching._trials import Trials

GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b in (4, 16, 64, 256)
    for f in (4, 16, 64)
    for w in (0, 2)
]
COST_MODEL, TPE = "cost-model", "tpe"


def cost(each):
    """Seconds per cell, least at block 64, fetch 64 and no workers."""
    apart = abs(np.log2(each.block_size / 64)) + abs(np.log2(each.fetch_factor / 64))
    return 1e-5 * (1 + 0.2 * apart + 0.3 * each.num_workers)


def trials_of(sampler, *, turns=None, seed=0):
    posterior = Posterior(
        GRID, GRID, batch_size=64, geometry=Geometry(), goal_of=lambda _: fastest, seed=seed
    )
    trials = Trials(
        GRID,
        sampler=sampler,
        posterior=posterior,
        turns=TurnsOf() if turns is None else turns,
        seed=seed,
    )
    return trials, posterior


def searched(sampler, n=14, seed=0):
    """Propose so many, one after the other, and report two replicates of each."""
    trials, posterior = trials_of(sampler, seed=seed)
    proposed = list[Configuration]()
    for _ in range(n):
        each = trials.propose([one for one in GRID if one not in proposed])
        trials.report(each, [cost(each)] * 2)
        posterior.tell(each, [Replicate(cost(each), 0), Replicate(cost(each), 1)])
        proposed.append(each)
    return proposed


@pytest.mark.parametrize(
    "sampler", [COST_MODEL, "gp", "random", TPE, optuna.samplers.RandomSampler(seed=0)]
)
def test_all_propose_nothing_but_candidates_and_each_once(sampler):
    # The Gaussian process takes a second for each.
    n = 6 if sampler == "gp" else len(GRID)
    proposed = searched(sampler, n)
    assert len(proposed) == n
    assert set(proposed) <= set(GRID)


@pytest.mark.parametrize(("sampler", "least"), [(TPE, 0.55), (COST_MODEL, 0.8)])
def test_proposals_follow_what_is_still_racing(sampler, least):
    """No trial has ended, but the better half comes first all the same."""
    better = sorted(GRID, key=cost)[: len(GRID) // 2]
    shares = [
        np.mean([each in better for each in searched(sampler, 12, seed)[4:]]) for seed in range(4)
    ]
    assert np.mean(shares) > least


def test_the_study_says_what_became_of_each_configuration():
    fast, slow, big, broken = GRID[:4]
    turns = TurnsOf[Configuration]()
    trials, posterior = trials_of(COST_MODEL, turns=turns)
    of_fast, of_slow = list[float](), list[float]()
    for number in range(4):
        of_fast.append(1.0 + 0.01 * number)
        of_slow.append(2.0 - 0.01 * number)
        trials.report(fast, of_fast)
        trials.report(slow, of_slow)
        turns.add({fast: 1 / of_fast[-1], slow: 1 / of_slow[-1]})
        posterior.tell(fast, [Replicate(*each[::-1]) for each in enumerate(of_fast)])
        posterior.tell(slow, [Replicate(*each[::-1]) for each in enumerate(of_slow)])
    trials.report(big, [1.5])
    trials.report(broken, [])
    assert trials.racing([fast, slow, big, GRID[5]]) == [fast, big, GRID[5]]

    facts = {each: {"peak_memory_bytes": 10.0} for each in (fast, slow)}
    values = {fast: 1.015, slow: 1.985, big: 1.5}
    ended = trials.end(values, facts, {big: {"memory": 5.0}, fast: {"memory": -5.0}})
    found = {Configuration(**each.params): each for each in ended}
    assert {each: found[each].state for each in found} == {
        fast: TrialState.COMPLETE,
        slow: TrialState.PRUNED,  # it lost the race
        big: TrialState.PRUNED,  # it takes too much memory
        broken: TrialState.FAIL,
    }
    assert found[fast].value == 1.015
    assert list(found[fast].intermediate_values.values()) == [1.0, 1.01, 1.02, 1.03]
    assert found[slow].user_attrs == {"peak_memory_bytes": 10.0}
    if hasattr(found[big], "constraints"):  # since Optuna 5
        assert found[big].constraints == {"memory": 5.0}


def test_a_configuration_that_was_only_proposed_is_no_trial():
    trials, _ = trials_of(COST_MODEL)
    measured, proposed = trials.propose(GRID[:1]), trials.propose(GRID[1:2])
    trials.report(measured, [1.0])
    (ended,) = trials.end({measured: 1.0}, {}, {})
    assert ended.params == dict(measured)
    assert proposed == GRID[1]


def test_a_stopped_replicate_gives_way_to_one_with_rounds():
    first, second = GRID[:2]
    trials, _ = trials_of(COST_MODEL)
    for each in (first, second):
        trials.report(each, [])
    trials.report(first, [0.1])
    trials.report(first, [0.1, 0.11])
    ended = trials.end({first: 0.105, second: 5.0}, {}, {})
    assert [list(each.intermediate_values.values()) for each in ended] == [[0.1, 0.11], [5.0]]
    assert [each.value for each in ended] == [0.105, 5.0]


def test_what_is_no_candidate_any_more_wins_no_race():
    fast, slow = GRID[:2]
    turns = TurnsOf[Configuration]()
    trials, posterior = trials_of(COST_MODEL, turns=turns)
    for number in range(4):
        turns.add({fast: 2.0 + 0.01 * number, slow: 1.0 - 0.01 * number})
    posterior.tell(fast, [Replicate(0.5, number) for number in range(4)])
    posterior.tell(slow, [Replicate(1.0, number) for number in range(4)])
    trials.report(fast, [0.5])
    trials.report(slow, [1.0])
    assert trials.racing([slow]) == []
    posterior.withdraw(fast)
    assert trials.racing([slow]) == [slow]


def test_a_sampler_refuses_what_is_not_a_setting():
    trials, _ = trials_of(COST_MODEL)
    trials._sampler.candidates = GRID
    with pytest.raises(ValueError, match="'depth' is not one of the settings block_size, "):
        trials._study.ask().suggest_int("depth", 1, 4)
