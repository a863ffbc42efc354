"""The ``autotune show`` command."""

import json

import pytest
from tests import commands

from cellfeed_tuner import Configuration
from cellfeed_tuner._history import cache_folder, record

FAST = Configuration(block_size=64, fetch_factor=16)


@pytest.fixture
def kept(earlier_run, trials_of):
    """Keep a run, as `earlier_run` makes it."""

    def keep(costs, **facts):
        run = earlier_run(costs, **facts)
        record(cache_folder(), run, trials_of(run))

    return keep


def show(*arguments):
    shown = commands.autotune("show", *arguments)
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_nothing_known_is_a_plain_line(cache_folder):
    said = show()
    assert said.startswith("No earlier runs; results of autotune are stored in ")
    assert str(cache_folder) in said
    assert json.loads(show("--json"))["runs"] == []


def test_the_last_run_of_each_kind_is_listed(kept):
    kept({FAST: 1e-4})
    kept({FAST: 1e-5}, began="2026-11-21T00:00:00.000+00:00")
    kept({FAST: 1e-3}, machine="elsewhere")
    shown = " ".join(show().split())
    assert "100,000 [90,000, 110,000]" in shown
    assert "1,000 [900, 1,100]" in shown
    assert "10,000 [9,000" not in shown
    assert shown.index("2026-11-21") < shown.index("2026-11-20")
    found = json.loads(show("--json"))
    assert found["schema"] == "cellfeed.known/1"
    last, other = found["runs"]
    assert last["choice"] == {"block_size": 64, "fetch_factor": 16, "num_workers": 0}
    assert round(last["cells_per_second"]["value"]) == 100_000
    assert other["machine"]["cpu"] == "cpu of elsewhere"
    assert last["asked"]["labels"] == ["plate"]
    assert {"digest", "n_cells"} <= last["data"].keys()


def test_says_how_fast_it_is_compared_with_the_run_before(kept):
    kept({FAST: 1e-4}, began="2026-11-19T00:00:00.000+00:00")
    kept({FAST: 1e-5}, machine="elsewhere", began="2026-11-21T00:00:00.000+00:00")
    kept({FAST: 1e-5}, data="others", began="2026-11-21T00:00:00.000+00:00")
    kept({FAST: 1e-5}, batch_size=8, began="2026-11-21T00:00:00.000+00:00")
    assert "than before" not in show()
    kept({FAST: 2e-4}, began="2026-11-22T00:00:00.000+00:00", versions="2")
    shown = " ".join(show().split())
    assert "slower: 0.50x" in shown
    last = json.loads(show("--json"))["runs"][0]["before"]
    assert last["began"].startswith("2026-11-19")
    assert last["ratio"]["value"] == pytest.approx(0.5)
    slow = Configuration(block_size=1, fetch_factor=1)
    kept({slow: 2e-4}, began="2026-11-23T00:00:00.000+00:00", versions="2")
    shown = " ".join(show().split())
    for words in ("equally", "1.00x", "2026-11-22", "another", "configuration"):
        assert words in shown


def test_runs_for_other_numbers_of_ranks_are_listed_apart(kept):
    kinds = [(1, 1), (2, 2), (1, 2)]
    for n_ranks, world_size in kinds:
        kept({FAST: 1e-4}, n_ranks=n_ranks, world_size=world_size)
    ranks = [each["asked"]["ranks"] for each in json.loads(show("--json"))["runs"]]
    assert [(each["n_local"], each["n_total"]) for each in ranks] == kinds
    assert " ".join(show().split()).count("ranks") == 2


def test_a_run_without_a_choice_is_listed(kept):
    kept({FAST: 1e-4}, cells_per_second=None)
    assert "none" in show()


def test_more_words_are_refused():
    said = commands.autotune("show", "plates")
    assert said.exit_code == 2
