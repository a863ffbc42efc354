"""What Optuna's samplers propose of candidates, and what its plots show of a search."""

from typing import Any

import numpy as np
import optuna
import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._constants import SAMPLERS
from cellfeed_tuner._planning._cost_model import Geometry
from cellfeed_tuner._planning._posterior import Posterior, fastest
from cellfeed_tuner._searching._trials import RacePruner, Trials

GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b in (4, 16, 64, 256)
    for f in (4, 16, 64)
    for w in (0, 2)
]
BEST = Configuration(block_size=64, fetch_factor=64)


def cost(each):
    """Seconds per cell, least at `BEST`."""
    apart = abs(np.log2(each.block_size / 64)) + abs(np.log2(each.fetch_factor / 64))
    return 1e-5 * (1 + 0.2 * apart + 0.3 * each.num_workers)


def trials_of(sampler, seed=0):
    posterior = Posterior(
        GRID, GRID, batch_size=64, geometry=Geometry(), goal_of=lambda them: fastest, seed=seed
    )
    trials = Trials(GRID, sampler=sampler, posterior=posterior, n_first=4, is_race=True, seed=seed)
    return trials, posterior


def searched(sampler, n=14, seed=0):
    """Propose so many, one after the other, and look at each twice."""
    trials, posterior = trials_of(sampler, seed)
    asked = []
    for _ in range(n):
        each = trials.propose([one for one in GRID if one not in asked])
        asked.append(each)
        posterior.tell(each, [cost(each)] * 2)
        trials.report(each, [cost(each)] * 2)
    for each in asked:
        trials.close(each, [cost(each)] * 2, is_racing=True, excesses={"memory": -1.0})
    return asked, trials.ended()


@pytest.mark.parametrize("sampler", [*SAMPLERS, optuna.samplers.RandomSampler(seed=0)])
def test_all_propose_nothing_but_candidates_and_each_once(sampler):
    # The Gaussian process takes a second for each.
    n = 6 if sampler == "gp" else len(GRID)
    asked, study = searched(sampler, n)
    assert len(set(asked)) == n
    assert set(asked) <= set(GRID)
    assert [Configuration(**each.params) for each in study.trials] == asked


def test_the_cost_model_finds_the_best_sooner_than_chance_does():
    def place(sampler, seed):
        return searched(sampler, len(GRID), seed)[0].index(BEST)

    assert place("cost-model", 0) <= 5
    assert place("cost-model", 0) < np.mean([place("random", seed) for seed in range(10)])


def test_tpe_goes_by_what_is_still_raced():
    """Trials have not ended, but the better half comes first all the same."""
    better = sorted(GRID, key=cost)[: len(GRID) // 2]
    shares = [
        np.mean([each in better for each in searched("tpe", 12, seed)[0][4:]]) for seed in range(4)
    ]
    assert np.mean(shares) > 0.55


def test_the_study_holds_looks_as_intermediate_values_and_what_dropped_out_is_pruned():
    asked, study = searched("cost-model")
    states = {Configuration(**each.params): each.state for each in study.trials}
    assert states[BEST] == optuna.trial.TrialState.COMPLETE
    slow = max(asked, key=cost)
    assert states[slow] == optuna.trial.TrialState.PRUNED
    assert Configuration(**study.best_params) == BEST
    assert all(len(each.intermediate_values) == 2 for each in study.trials)


def test_what_failed_and_what_was_never_looked_at_are_failed_trials():
    trials, _ = trials_of("random")
    failed = trials.propose(GRID)
    never = trials.propose([each for each in GRID if each != failed])
    trials.report(failed, [])
    trials.close(failed, [], is_racing=False, excesses={"memory": -1.0})
    states = {Configuration(**each.params): each.state for each in trials.ended().trials}
    assert set(states.values()) == {optuna.trial.TrialState.FAIL}
    assert set(states) == {failed, never}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    "name", ["optimization_history", "intermediate_values", "parallel_coordinate", "edf"]
)
def test_plots_of_optuna_open_the_study(name):
    pytest.importorskip("matplotlib").use("agg")
    _, study = searched("random")
    plots: Any = optuna.visualization.matplotlib
    axes = getattr(plots, f"plot_{name}")(study)
    assert axes.has_data()


@pytest.mark.parametrize(("slower", "least", "most"), [(0.0, 0.0, 0.06), (0.3, 0.8, 1.0)])
def test_the_race_prunes_what_is_slower_and_rarely_what_is_not(slower, least, most):
    """Looks are off by 5 %; four of each of two."""
    rng = np.random.default_rng(0)
    pruned = []
    for _ in range(100):
        study = optuna.create_study(pruner=RacePruner())
        one, other = study.ask(), study.ask()
        for look in range(4):
            one.report(np.exp(0.05 * rng.standard_normal()), look)
            other.report((1 + slower) * np.exp(0.05 * rng.standard_normal()), look)
        pruned.append(other.should_prune())
    assert least <= np.mean(pruned) <= most


def test_a_single_look_prunes_nothing():
    study = optuna.create_study(pruner=RacePruner())
    one, other = study.ask(), study.ask()
    for look in range(3):
        one.report(1.0, look)
    other.report(100.0, 3)
    assert not other.should_prune()
