"""What is believed to be the best, in worlds of which everything is known."""

from itertools import product

import numpy as np
import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._choose import best_mixed, fastest
from cellfeed_tuner._searching._cost_model import Geometry
from cellfeed_tuner._searching._posterior import Posterior, Replicate

GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256), (1, 4, 16, 64), (0, 1, 2))
]


def seconds_per_cell(configuration):
    blocks = 1 / min(configuration.block_size, 64 * configuration.fetch_factor)
    fetch = 1 / configuration.fetch_factor
    return (blocks + fetch + 0.1) * 1e-4 * (1 + 0.3 * configuration.num_workers)


def posterior_of(goal_of=lambda them: fastest, seed=0):
    return Posterior(GRID, GRID, batch_size=64, geometry=Geometry(), goal_of=goal_of, seed=seed)


def replicates(*costs):
    """Replicates of different turns."""
    return [Replicate(cost, turn) for turn, cost in enumerate(costs)]


def played(posterior=None, most=14, noise=0.02, withdrawn=(), seed=0):
    """Return what was looked at, in that order, and the posterior."""
    posterior = posterior or posterior_of(seed=seed)
    rng = np.random.default_rng(seed)
    looks: dict[Configuration, list[float]] = {}

    def look(each):
        looks.setdefault(each, []).append(
            seconds_per_cell(each) * np.exp(noise * rng.standard_normal())
        )
        posterior.tell(each, replicates(*looks[each]))
        if each in withdrawn:
            posterior.withdraw(each)

    for _ in range(4):
        look(posterior.most_promising([each for each in GRID if each not in looks]))
    while sum(map(len, looks.values())) < most:
        leader = posterior.leader(posterior.candidates)
        rest = [each for each in posterior.candidates if each != leader]
        challenger = posterior.challenger(leader, rest)
        look(leader)
        look(challenger)
    return looks, posterior


@pytest.mark.parametrize("seed", range(5))
def test_the_leader_is_within_5_percent_of_the_fastest(seed):
    looks, posterior = played(seed=seed)
    leader = posterior.leader(GRID)
    assert seconds_per_cell(leader) <= 1.05 * min(map(seconds_per_cell, GRID))
    assert len(looks) < len(GRID) / 4


def test_what_is_left_to_choose_from_is_all_that_is_chosen_from():
    posterior = posterior_of()
    small = [each for each in GRID if each.fetch_factor == 1]
    assert posterior.most_promising(small) in small
    assert posterior.leader(small) in small
    assert posterior.challenger(GRID[0], small) in small
    assert posterior.most_promising([]) is posterior.leader([]) is None
    assert posterior.challenger(GRID[0], []) is None


def test_a_search_repeats_itself_by_its_seed():
    assert played(seed=3)[0] == played(seed=3)[0]


def test_what_was_withdrawn_or_failed_has_no_chance():
    best = min(GRID, key=seconds_per_cell)
    looks, posterior = played(withdrawn=[best])
    assert len(looks.get(best, [])) <= 1
    posterior.withdraw(best)
    assert best not in posterior.chances()
    posterior.tell(GRID[0], [])
    assert GRID[0] not in posterior.candidates


def test_chances_are_of_all_candidates_and_sum_to_one():
    _, posterior = played(noise=0.05)
    chances = posterior.chances()
    assert chances.keys() == set(GRID)
    assert sum(chances.values()) == pytest.approx(1)
    assert list(chances.values()) == sorted(chances.values(), reverse=True)


def test_chances_become_clear_with_looks():
    """Two that differ by 10 %, while looks differ by as much."""
    slow, fast = GRID[-3], GRID[-6]
    rng = np.random.default_rng(0)

    def share_of_fast(n):
        posterior = posterior_of()
        for each, cost in ((slow, 1.1e-5), (fast, 1e-5)):
            posterior.tell(each, replicates(*cost * np.exp(0.1 * rng.standard_normal(n))))
        chances = posterior.chances()
        return chances[fast] / (chances[fast] + chances[slow])

    assert 0.2 < np.mean([share_of_fast(1) for _ in range(20)]) < 0.97
    assert np.mean([share_of_fast(64) for _ in range(5)]) > 0.98


def test_with_a_need_what_is_likeliest_is_fast_enough_and_mixes_best():
    shares = [1 - 0.1 * np.log2(each.block_size) / 8 for each in GRID]
    need = 1 / 3e-5
    _, posterior = played(posterior_of(lambda them: best_mixed(need, shares)), most=24)
    fast = [each for each in GRID if 1 / seconds_per_cell(each) >= 1.1 * need]
    likeliest = next(iter(posterior.chances()))
    assert 1 / seconds_per_cell(likeliest) >= 0.9 * need
    assert likeliest.block_size <= min(each.block_size for each in fast)


def test_a_single_look_that_puts_what_promised_much_out_of_the_race_is_doubted_once():
    posterior = posterior_of()
    alone = [each for each in GRID if each.num_workers == 0]
    odd = min(alone, key=seconds_per_cell)
    for each in alone[::2]:
        if each != odd:
            posterior.tell(each, replicates(*[seconds_per_cell(each)] * 2))
    assert posterior.doubted() is None
    posterior.tell(odd, replicates(3 * seconds_per_cell(odd)))
    assert posterior.doubted() == odd
    posterior.take_back(odd)
    assert posterior.doubted() is None
    posterior.tell(odd, replicates(3 * seconds_per_cell(odd), seconds_per_cell(odd)))
    assert posterior.seconds_per_cell()[odd] == pytest.approx(seconds_per_cell(odd), rel=0.1)


def test_what_is_added_may_be_chosen():
    posterior = posterior_of()
    posterior.tell(GRID[0], replicates(1e-4))
    new = Configuration(block_size=1024, fetch_factor=256)
    posterior.add([new, GRID[0]])
    assert posterior.candidates == [*GRID, new]
    assert new in posterior.chances()


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_how_much_looks_differ_is_found_from_few_even_where_none_was_repeated(noise):
    """Over many searches, within a factor of two."""
    rng = np.random.default_rng(0)
    model = posterior_of()._model
    found = [
        model.fit(
            {
                each: [seconds_per_cell(each) * np.exp(noise * rng.standard_normal()) for _ in "ab"]
                for each in GRID[-30::3]
            }
        ).spread
        for _ in range(20)
    ]
    assert noise / 2 < np.median(found) < 2 * noise


@pytest.mark.parametrize("seed", range(3))
def test_costs_that_have_nothing_in_common_contradict_the_model(seed):
    """Costs of six configurations; and the same costs, each of another of all configurations."""
    rng = np.random.default_rng(seed)
    costs = {each: seconds_per_cell(each) for each in GRID}
    exchanged = dict(zip(GRID, rng.permutation(list(costs.values())), strict=True))
    chances = []
    for truth, is_contradicted in ((costs, False), (exchanged, True)):
        posterior = posterior_of()
        assert not posterior.is_contradicted
        expected = posterior.most_promising(GRID)
        seen = [expected, *(GRID[place] for place in rng.choice(len(GRID), 5, replace=False))]
        for each in seen:
            posterior.tell(each, replicates(*truth[each] * np.exp(0.02 * rng.standard_normal(2))))
        assert posterior.is_contradicted == is_contradicted
        fastest_seen = min(seen, key=truth.__getitem__)
        chances.append(posterior.chance_of_faster(fastest_seen))
    assert 0 <= chances[0] < 1 / 3 < chances[1] <= 1


def test_nothing_unmeasured_is_faster_where_all_is_measured():
    posterior = posterior_of()
    assert posterior.chance_of_faster(GRID[0]) == 0.0  # before any measurement
    for each in GRID:
        posterior.tell(each, replicates(seconds_per_cell(each)))
    assert posterior.chance_of_faster(GRID[0]) == 0.0


def test_what_a_turn_does_to_all_alike_changes_no_ratio():
    """One was measured while the machine was three times as slow, beside others."""
    posterior, some = posterior_of(), GRID[::6]
    rng = np.random.default_rng(0)
    costs: dict[Configuration, list[Replicate]] = {each: [] for each in some}
    for turn in range(6):
        moment = 3.0 if turn % 2 else 1.0
        for place, each in enumerate(some):
            if place != 1 or turn % 2:
                noise = np.exp(0.02 * rng.standard_normal())
                costs[each].append(Replicate(moment * noise * seconds_per_cell(each), turn))
    for each, found in costs.items():
        posterior.tell(each, found)
    ratio = posterior.ratio(some[1], some[0])
    assert ratio is not None
    true = seconds_per_cell(some[0]) / seconds_per_cell(some[1])
    assert ratio.value == pytest.approx(true, rel=0.1)
    assert ratio.low <= true <= ratio.high
    back = posterior.ratio(some[0], some[1])
    assert back is not None
    assert (back.low, back.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))


def test_before_any_measurement_no_ratio_is_known():
    assert posterior_of().ratio(GRID[0], GRID[1]) is None
    assert posterior_of().speed(GRID[0]) is None
