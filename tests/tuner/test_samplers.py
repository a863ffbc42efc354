"""What Optuna's samplers propose of candidates."""

import numpy as np
import optuna
import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._searching._samplers import Proposals

GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b in (4, 16, 64, 256)
    for f in (4, 16, 64)
    for w in (0, 2)
]


def cost(each):
    """Seconds per cell, least at block 64, fetch 64 and no workers."""
    apart = abs(np.log2(each.block_size / 64)) + abs(np.log2(each.fetch_factor / 64))
    return 1e-5 * (1 + 0.2 * apart + 0.3 * each.num_workers)


def searched(sampler, n=14, seed=0):
    """Propose so many, one after the other, and look at each twice."""
    proposals = Proposals(sampler, GRID, seed)
    looks: dict[Configuration, list[float]] = {}
    for _ in range(n):
        each = proposals.next_of([one for one in GRID if one not in looks], looks)
        looks[each] = [cost(each)] * 2
    return list(looks)


@pytest.mark.parametrize("sampler", ["gp", "random", "tpe", optuna.samplers.RandomSampler(seed=0)])
def test_all_propose_nothing_but_candidates_and_each_once(sampler):
    # The Gaussian process takes a second for each.
    n = 6 if sampler == "gp" else len(GRID)
    asked = searched(sampler, n)
    assert len(asked) == n
    assert set(asked) <= set(GRID)


def test_tpe_goes_by_what_is_still_raced():
    """Trials have not ended, but the better half comes first all the same."""
    better = sorted(GRID, key=cost)[: len(GRID) // 2]
    shares = [
        np.mean([each in better for each in searched("tpe", 12, seed)[4:]]) for seed in range(4)
    ]
    assert np.mean(shares) > 0.55
