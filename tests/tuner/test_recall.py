"""What earlier runs are worth: which one decides what is measured first."""

import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._history import EarlierRun
from cellfeed_tuner._recall import recall
from cellfeed_tuner._searching._cost_model import Space

SPACE = Space.of((1, 4, 16, 64), (1, 4, 16))
COSTS = {each: 1e-5 * (1 + 20 / each.block_size + 4 / each.fetch_factor) for each in SPACE.grid()}
RANKED = sorted(COSTS, key=COSTS.__getitem__)


@pytest.fixture
def here(earlier_run):
    return earlier_run(COSTS)


def recalled(runs, now):
    return recall(runs, now.key, now.asked, SPACE)


def test_what_was_measured_comes_in_the_order_of_its_speed_the_choice_first(earlier_run, here):
    assert recalled([here], here)[0] == RANKED
    run = earlier_run(COSTS, choice=RANKED[3])
    assert recalled([run], here)[0] == [RANKED[3], *RANKED[:3], *RANKED[4:]]


def test_of_several_the_last_of_this_machine_and_these_versions_is_taken(earlier_run, here):
    last = earlier_run(COSTS, choice=RANKED[1], began="2026-11-21T00:00:00.000+00:00")
    elsewhere = earlier_run(
        COSTS, choice=RANKED[2], machine="elsewhere", began="2026-11-22T00:00:00.000+00:00"
    )
    assert recalled([here, last, elsewhere], here)[0][0] == RANKED[1]
    assert recalled([elsewhere], here)[0][0] == RANKED[2]


@pytest.mark.parametrize(
    ("change", "whose"),
    [
        ({}, "a result of this machine of 2026-11-20"),
        ({"machine": "elsewhere"}, "another machine's result (cpu of elsewhere)"),
        ({"versions": "0"}, "a result of this machine with other versions"),
        ({"labels": ["drug"]}, "a result of this machine of"),
    ],
)
def test_the_sentence_names_whose_result_it_is(earlier_run, here, change, whose):
    _, earlier = recalled([earlier_run(COSTS, **change)], here)
    assert earlier.use == "order"
    assert whose in earlier.sentence


@pytest.mark.parametrize(
    "change",
    [{"data": "others"}, {"batch_size": 128}, {"cache": "warm"}, {"n_ranks": 2}, {"world_size": 2}],
)
def test_what_measured_something_else_is_nothing(earlier_run, here, change):
    known, earlier = recalled([earlier_run(COSTS, **change)], here)
    assert known == []
    assert earlier.use == "none"


def test_one_rank_of_each_of_two_machines_is_not_one_process(earlier_run):
    run = earlier_run(COSTS, world_size=2)
    again = EarlierRun.from_json(run.to_json(), key=run.key, trials=run.trials)
    assert again == run
    assert not again.asked.is_like(earlier_run(COSTS).asked)
    assert str(again.asked.ranks) == "1 of 2 ranks"


def test_a_run_with_another_grid_is_nothing(earlier_run, here):
    other = {Configuration(block_size=3, fetch_factor=4): 1e-5}
    assert recalled([earlier_run(other)], here)[1].use == "none"


def test_only_configurations_of_the_space_are_measured_first(earlier_run, here):
    other = Configuration(block_size=3, fetch_factor=4)
    known, _ = recalled([earlier_run(COSTS | {other: 1e-9})], here)
    assert other not in known
    assert len(known) == len(COSTS)
