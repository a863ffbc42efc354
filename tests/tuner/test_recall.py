"""What earlier runs are worth: when they are believed, and when they are dropped."""

import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._history._earlier_run import Asked
from cellfeed_tuner._history._recall import Recollection, compare

COSTS = {
    Configuration(block_size=b, fetch_factor=f): 1e-5 * (1 + 20 / b + 4 / f)
    for b in (1, 4, 16, 64)
    for f in (1, 4, 16)
}
GRID = list(COSTS)
BEST = min(COSTS, key=COSTS.__getitem__)


def fresh(anchors, *, times=1.0, spread=0.01, but=None):
    """What anchors give now: all so many times as slow as they were, but for some."""
    return {
        each: [
            COSTS[each] * times * (but or {}).get(each, 1.0) * (1 + spread * sign)
            for sign in (-1, 1)
        ]
        for each in anchors
    }


@pytest.fixture
def held(earlier_run):
    return earlier_run(COSTS)


def recollect(runs, now):
    return Recollection.of(runs, now.key, now.asked)


def test_a_run_on_the_same_machine_data_and_versions_is_held_against_this_one(held):
    found = recollect([held], held)
    assert (found.held, found.order) == (held, None)


def test_of_several_the_last_full_one_is_held(earlier_run, held):
    short = earlier_run(COSTS, is_short=True)
    last = earlier_run(COSTS, began="2026-11-21T00:00:00.000+00:00")
    assert recollect([held, last, short], held).held is last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "elsewhere"}, "Another machine's result (cpu of elsewhere)"),
        ({"versions": "0"}, "this machine with other versions"),
        ({"budget": 5.0}, "this machine that was asked for less"),
        ({"entropy_floor": 0.99}, "this machine that was asked for less"),
        ({"further_labels": ("drug",)}, "this machine that was asked for less"),
    ],
)
def test_any_other_run_on_the_data_is_an_order_of_probes(earlier_run, held, change, said):
    found = recollect([earlier_run(COSTS, **change)], held)
    assert found.held is None
    assert found.said.use == "order"
    assert said in found.said.sentence
    assert found.first_probes(GRID)[0] == BEST


@pytest.mark.parametrize(
    "change",
    [{"data": "others"}, {"batch_size": 128}, {"cache": "warm"}, {"n_ranks": 2}, {"world_size": 2}],
)
def test_what_measured_something_else_is_nothing(earlier_run, held, change):
    found = recollect([earlier_run(COSTS, **change)], held)
    assert (found.held, found.order, found.said.use) == (None, None, "none")
    assert found.first_probes(GRID) == found.anchors(GRID) == []


def test_one_rank_of_each_of_two_machines_is_not_one_process(earlier_run):
    asked = earlier_run(COSTS, world_size=2).asked
    assert Asked.from_json(asked.to_json()) == asked
    assert not asked.is_like(earlier_run(COSTS).asked)
    assert str(asked.ranks) == "1 of 2 ranks"


def test_runs_that_did_not_note_all_ranks_were_of_one_machine(earlier_run):
    plain = earlier_run(COSTS, n_ranks=2).asked.to_json()
    del plain["world_size"]
    assert str(Asked.from_json(plain).ranks) == "2 ranks"


def test_a_run_with_a_smaller_grid_is_only_an_order(earlier_run, held):
    part = {each: cost for each, cost in COSTS.items() if each.block_size > 1}
    assert recollect([earlier_run(part)], held).said.use == "order"
    assert recollect([held], earlier_run(part)).held is held


def test_a_run_with_fewer_labels_has_looked_for_more(earlier_run, held):
    assert recollect([held], earlier_run(COSTS, further_labels=("drug",))).held is held


def test_a_run_with_another_grid_is_nothing(earlier_run, held):
    other = {Configuration(block_size=3, fetch_factor=4): 1e-5}
    assert recollect([earlier_run(other)], held).said.use == "none"


def test_what_is_to_be_ignored_is_not_mentioned(held):
    found = Recollection.ignored()
    assert (found.held, found.order, found.said.use) == (None, None, "none")
    assert "ignored" in found.said.sentence


def test_anchors_are_the_choice_its_rivals_and_a_cheap_one(earlier_run):
    choice = Configuration(block_size=16, fetch_factor=16)
    anchors = recollect([run := earlier_run(COSTS, choice=choice)], run).anchors(GRID)
    ranked = sorted(COSTS, key=COSTS.__getitem__)
    assert anchors[0] == choice
    assert anchors[2:] == [each for each in ranked if each != choice][:2]
    cheapest = min(COSTS, key=lambda each: COSTS[each] * each.minibatches_per_round)
    assert anchors[1] == cheapest


def test_the_cheap_anchor_has_another_number_of_workers(earlier_run):
    costs = COSTS | {each.changed(num_workers=2): 2 * cost for each, cost in COSTS.items()}
    run = earlier_run(costs)
    choice, cheap, *_ = recollect([run], run).anchors(list(costs))
    assert (choice.num_workers, cheap.num_workers) == (0, 2)


def test_anchors_are_candidates_of_today(held):
    candidates = [each for each in GRID if each != BEST]
    anchors = recollect([held], held).anchors(candidates)
    assert BEST not in anchors
    assert len(anchors) == 4


@pytest.mark.parametrize("times", [0.3, 1.0, 2.5])
def test_what_is_alike_but_for_a_common_factor_is_confirmed(held, times):
    anchors = recollect([held], held).anchors(GRID)
    found = compare(held, fresh(anchors, times=times))
    assert found.earlier.use == "confirmed"
    assert "short" in found.earlier.sentence
    assert set(found.believed) == set(GRID)
    for each, cost in found.believed.items():
        assert cost.seconds_per_cell == pytest.approx(times * COSTS[each], rel=0.01)
        assert cost.error >= 0.05  # it is not as good as a measurement


def test_a_ratio_that_has_changed_drops_all(held):
    anchors = recollect([held], held).anchors(GRID)
    found = compare(held, fresh(anchors, but={anchors[2]: 1.5}))
    assert (found.earlier.use, found.believed) == ("dropped", {})
    assert str(anchors[2]) in found.earlier.sentence
    assert "full" in found.earlier.sentence


def test_within_the_intervals_nothing_has_changed(held):
    anchors = recollect([held], held).anchors(GRID)
    assert compare(held, fresh(anchors, but={anchors[1]: 1.04})).earlier.use == "confirmed"
    off = {anchors[1]: 1.2}
    assert compare(held, fresh(anchors, but=off)).earlier.use == "dropped"
    assert compare(held, fresh(anchors, but=off, spread=0.15)).earlier.use == "confirmed"


def test_intervals_so_wide_that_nothing_can_be_refuted_confirm_nothing(held):
    anchors = recollect([held], held).anchors(GRID)
    wide = fresh(anchors, but={anchors[1]: 1.5}, spread=0.9)
    assert compare(held, wide).earlier.use == "dropped"


def test_an_anchor_that_fails_drops_all(held):
    anchors = recollect([held], held).anchors(GRID)
    found = compare(held, fresh(anchors) | {anchors[1]: []})
    assert found.earlier.use == "dropped"
    assert f"{anchors[1]} fails now" in found.earlier.sentence


@pytest.mark.parametrize("n", [0, 1, 2])
def test_one_ratio_confirms_nothing(held, n):
    anchors = recollect([held], held).anchors(GRID)[:n]
    assert compare(held, fresh(anchors)).earlier.use == "dropped"


def test_an_anchor_of_a_single_replicate_is_left_out(held):
    anchors = recollect([held], held).anchors(GRID)
    off = fresh(anchors, but={anchors[3]: 2.0})
    assert compare(held, off | {anchors[3]: off[anchors[3]][:1]}).earlier.use == "confirmed"
