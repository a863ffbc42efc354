"""The whole grid in rounds, interrupted and gone on with."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests import commands
from tests.tuner.measured_here import measure_here
from tests.tuner.simulated import Machine, profile_on

from cellfeed import FormatError, ParameterError, open_collection
from cellfeed_tuner import AutotuneResult, Configuration

pytestmark = pytest.mark.slow

GRID: dict[str, Any] = {
    "label": "plate", "batch_size": 64, "block_sizes": [4, 32], "fetch_factors": [2, 4],
    "workers": [0, 1], "entropy_floor": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate", "cell_type"])


def machine_of(**settings: Any) -> Machine:
    """Larger blocks and fetches are faster, and workers slower."""

    def cost(each: Configuration) -> float:
        return (1e-4 + 1e-3 / (each.block_size * each.fetch_factor)) * (1 + each.num_workers)

    return Machine(cost, memory=lambda _: 10**8, overhead=0.1, **settings)


class StopsAfter(Machine):
    """A machine on which the user presses Ctrl-C after some timings."""

    n = 0

    def run(self, request: Any, **limits: Any) -> Any:
        if len(self.asked) == self.n:
            raise KeyboardInterrupt
        return super().run(request, **limits)


def test_everything_that_can_run_is_timed_in_every_round(collection):
    machine = machine_of()
    result = profile_on(machine, collection, rounds=3, **GRID | {"entropy_floor": 1.0})
    asked = machine.asked[1:]  # the first compiles
    by_round = [asked[begin : begin + 8] for begin in range(0, 24, 8)]
    assert len(asked) == 24
    assert all(len(set(each)) == 8 for each in by_round)
    assert len(set(map(tuple, by_round))) == 3  # in another order
    table = result.table()
    assert set(table["known"]) <= {"timed", "compared"}
    assert (table["share_of_random"] < 1).any()  # also what mixes too little
    truth = [machine.speed(each.configuration) for each in result.configurations]
    assert table["cells_per_second"].tolist() == pytest.approx(truth, rel=0.05)


@pytest.mark.smoke
def test_the_fastest_that_mixes_is_recommended(collection):
    result = profile_on(machine_of(noise=0.1), collection, rounds=5, **GRID)
    chosen = result.recommended
    assert chosen is not None
    assert (chosen.configuration.block_size, chosen.configuration.num_workers) == (32, 0)
    assert chosen.basis == "compared"
    assert {each.n_turns for each in chosen.rivals} == {5}


@pytest.mark.parametrize("n", [1, 5, 11])
def test_after_an_interruption_only_the_rest_is_timed(collection, tmp_path, n):
    journal, whole = tmp_path / "profile.jsonl", machine_of()
    expected = profile_on(whole, collection, rounds=2, **GRID)
    stopped = StopsAfter(whole.cost, memory=whole.memory, overhead=0.1)
    stopped.n = n
    with pytest.raises(KeyboardInterrupt):
        profile_on(stopped, collection, rounds=2, journal=journal, **GRID)
    again = machine_of()
    result = profile_on(again, collection, rounds=2, journal=journal, **GRID)
    timed = stopped.asked[1:] + again.asked[1:]
    assert timed == whole.asked[1:]
    assert result.table()["cells_per_second"].tolist() == pytest.approx(
        expected.table()["cells_per_second"].tolist(), rel=0.01
    )
    # More rounds add to it.
    more = machine_of()
    profile_on(more, collection, rounds=3, journal=journal, **GRID)
    assert Counter(more.asked[1:]) == Counter(set(timed))


def test_what_fails_is_tried_once(collection):
    machine = machine_of(fails=lambda each: each.num_workers > 0)
    result = profile_on(machine, collection, rounds=3, **GRID)
    assert sum(each.num_workers > 0 for each in machine.asked) == 4
    failed = {each.configuration.num_workers for each in result.configurations if each.note}
    assert failed == {1}
    assert result.recommended is not None
    assert result.recommended.configuration.num_workers == 0


@pytest.mark.parametrize(
    ("changes", "differing"),
    [({"seed": 1}, "seed"), ({"batch_size": 8}, "batch_size"), ({"workers": [0]}, "grid")],
)
def test_a_journal_of_another_profile_is_refused(collection, tmp_path, changes, differing):
    journal = tmp_path / "profile.jsonl"
    profile_on(machine_of(), collection, rounds=2, journal=journal, **GRID)
    before = journal.read_bytes()
    with pytest.raises(ParameterError, match=f"profile.jsonl: .* another {differing}; delete it"):
        profile_on(machine_of(), collection, rounds=2, journal=journal, **GRID | changes)
    assert journal.read_bytes() == before


def test_a_line_that_was_being_written_is_timed_again(collection, tmp_path):
    journal = tmp_path / "profile.jsonl"
    profile_on(machine_of(), collection, rounds=2, journal=journal, **GRID)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    machine = machine_of()
    profile_on(machine, collection, rounds=2, journal=journal, **GRID)
    assert len(machine.asked[1:]) == 1
    lines = journal.read_bytes().splitlines()
    assert len(lines) == len(whole.splitlines())
    assert all(json.loads(line) for line in lines)


@pytest.mark.parametrize(
    "text", ["", "no JSON", "no JSON\n", "{}\n", '{"schema": "cellfeed.profile/1"}\n{}\n']
)
def test_a_foreign_file_is_one_line(collection, tmp_path, text):
    journal = tmp_path / "profile.jsonl"
    profile_on(machine_of(), collection, rounds=2, journal=journal, **GRID)
    head = journal.read_text().splitlines(keepends=True)[0]
    journal.write_text(text.replace('{"schema": "cellfeed.profile/1"}\n', head))
    if not text:
        profile_on(machine_of(), collection, rounds=2, journal=journal, **GRID)
        return
    before = journal.read_bytes()
    with pytest.raises(FormatError, match=r"profile.jsonl: (no journal|line 2 is damaged)"):
        profile_on(machine_of(), collection, rounds=2, journal=journal, **GRID)
    assert journal.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 1}, "rounds >= 2"),
        ({"budget": 60}, "`budget` is of `autotune`"),
        ({"block_sizes": range(1, 4097)}, "too many to time each; give lists"),
    ],
)
def test_what_a_profile_has_no_use_for_is_refused(collection, changes, said):
    with pytest.raises(ParameterError, match=said):
        profile_on(machine_of(), collection, **GRID | changes)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_size'"):
        profile_on(machine_of(), collection, block_size=4, **GRID)


def test_the_command_writes_a_table_a_picture_a_page_and_what_trains(
    small_collection, tmp_path, monkeypatch
):
    measure_here(monkeypatch)
    arguments = [
        "profile", small_collection, "--label", "plate", "--block-sizes", "4,32",
        "--fetch-factors", "2", "--workers", "0", "--batch-size", "16", "--rounds", "2",
        "--entropy-floor", "0.5", "--output", tmp_path,
    ]  # fmt: skip
    ran = commands.autotune(*arguments)
    assert ran.exit_code == 0, ran.output
    result = AutotuneResult.load(tmp_path / "profile.json")
    table = pd.read_csv(tmp_path / "profile.csv", keep_default_na=False, na_values=[""])
    assert table["block_size"].tolist() == [4, 32]
    assert np.isfinite(table["cells_per_second"]).all()
    assert result.loader_fault is None
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"profile.{kind}" for kind in ("csv", "html", "json", "jsonl", "png")}
    assert "profile.json'" in ran.stdout
    again = commands.autotune(*arguments)  # nothing is left to time
    assert again.exit_code == 0, again.output
    refused = commands.autotune(*arguments, "--seed", "1")
    assert refused.exit_code == 2
    assert "another seed" in refused.output
