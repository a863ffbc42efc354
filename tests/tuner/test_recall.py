"""What earlier runs are worth: which one says what is looked at first."""

import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._history._earlier_run import Asked
from cellfeed_tuner._history._recall import Recollection

COSTS = {
    Configuration(block_size=b, fetch_factor=f): 1e-5 * (1 + 20 / b + 4 / f)
    for b in (1, 4, 16, 64)
    for f in (1, 4, 16)
}
RANKED = sorted(COSTS, key=COSTS.__getitem__)


@pytest.fixture
def here(earlier_run):
    return earlier_run(COSTS)


def recollect(runs, now):
    return Recollection.of(runs, now.key, now.asked)


def test_what_was_measured_comes_in_the_order_of_its_speed_the_choice_first(earlier_run, here):
    assert recollect([here], here).trials_in(here.asked.space) == RANKED
    run = earlier_run(COSTS, choice=RANKED[3])
    found = recollect([run], here).trials_in(here.asked.space)
    assert found == [RANKED[3], *RANKED[:3], *RANKED[4:]]


def test_of_several_the_last_of_this_machine_and_these_versions_is_taken(earlier_run, here):
    last = earlier_run(COSTS, began="2026-11-21T00:00:00.000+00:00")
    elsewhere = earlier_run(COSTS, machine="elsewhere", began="2026-11-22T00:00:00.000+00:00")
    assert recollect([here, last, elsewhere], here).run is last
    assert recollect([elsewhere], here).run is elsewhere


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "A result of this machine of 2026-11-20"),
        ({"machine": "elsewhere"}, "Another machine's result (cpu of elsewhere)"),
        ({"versions": "0"}, "this machine with other versions"),
        ({"budget": 5.0}, "A result of this machine of"),
    ],
)
def test_it_is_said_whose_result_it_is(earlier_run, here, change, said):
    found = recollect([earlier_run(COSTS, **change)], here)
    assert found.said.use == "order"
    assert said in found.said.sentence


@pytest.mark.parametrize(
    "change",
    [{"data": "others"}, {"batch_size": 128}, {"cache": "warm"}, {"n_ranks": 2}, {"world_size": 2}],
)
def test_what_measured_something_else_is_nothing(earlier_run, here, change):
    found = recollect([earlier_run(COSTS, **change)], here)
    assert (found.run, found.said.use) == (None, "none")
    assert found.trials_in(here.asked.space) == []


def test_one_rank_of_each_of_two_machines_is_not_one_process(earlier_run):
    asked = earlier_run(COSTS, world_size=2).asked
    assert Asked.from_json(asked.to_json()) == asked
    assert not asked.is_like(earlier_run(COSTS).asked)
    assert str(asked.ranks) == "1 of 2 ranks"


def test_runs_that_did_not_note_all_ranks_were_of_one_machine(earlier_run):
    plain = earlier_run(COSTS, n_ranks=2).asked.to_json()
    del plain["world_size"]
    assert str(Asked.from_json(plain).ranks) == "2 ranks"


def test_a_run_with_another_grid_is_nothing(earlier_run, here):
    other = {Configuration(block_size=3, fetch_factor=4): 1e-5}
    assert recollect([earlier_run(other)], here).said.use == "none"


def test_what_is_to_be_ignored_is_not_mentioned():
    found = Recollection.ignored()
    assert (found.run, found.said.use) == (None, "none")
    assert "ignored" in found.said.sentence
