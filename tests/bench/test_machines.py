"""The search on simulated machines: what it finds, and what it says where it finds too little."""

import json
from functools import partial

import numpy as np
import pytest
from bench.backtest.__main__ import main
from bench.backtest.machines import FLOORS, MACHINES, drawn_grid
from tests import commands

run = partial(commands.run, main)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_the_same_for_the_same_number_and_another_for_another(name):
    one, again, other = (drawn_grid(name, number) for number in (2, 2, 3))
    assert one.cells_per_second() == again.cells_per_second()
    assert one.cells_per_second() != other.cells_per_second()
    assert np.isfinite(list(one.cells_per_second().values())).all()
    for floor in FLOORS:
        assert 1 < len(one.feasible(floor)) < len(one)


def test_the_command_prints_shares_beside_those_of_another_version(tmp_path):
    output = tmp_path / "shares.json"
    small = ("machines", "independent", "--draws", 1, "--seeds", 1)
    printed = run(*small, "--output", output)
    assert printed.exit_code == 0, printed.output
    assert json.loads(output.read_text())["schema"] == "cellfeed.machines/1"
    rows = [line for line in printed.stdout.splitlines() if line.startswith("| independent")]
    assert [row.split(" | ")[1] for row in rows] == ["5%", "15%"]
    beside = run(*small, "--before", output)
    assert all(" → " in row for row in beside.stdout.splitlines()[2:])


def test_an_unknown_machine_is_one_error():
    printed = run("machines", "perpetual")
    assert printed.exit_code == 2
    assert "perpetual" in printed.stderr
    assert "Traceback" not in printed.stderr
