"""The search on recorded grids: is the choice right, in the time of a default run?"""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from bench.backtest.__main__ import main
from bench.backtest.machines import MACHINES, SECONDS, drawn_grid
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import BASELINES, Replay, replay
from tests import commands

from cellfeed import FormatError
from cellfeed_tuner import Configuration, theory

ROOT = Path(__file__).parents[2]
RECORDED = [
    *sorted((ROOT / "notebooks" / "figures" / "data").glob("published_tahoe_*.csv")),
    *sorted((ROOT / "bench" / "grids").glob("*.csv")),
]
FLOORS = (0.9, 0.95, 0.99)
run = partial(commands.run, main)
BATCH_SIZE, PLATES = 64, 14
GRID = list(product((1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2, 4)))


def disk_table() -> pd.DataFrame:
    """A grid as a disk with a price per block and fetch would give it, without noise."""
    rows = [
        (
            *(b, f, w, (1 + 0.1 * w) / (1e-5 + 2e-4 / b + 1e-3 / f)),
            theory.expected_entropy_bits([1] * PLATES, BATCH_SIZE, b, f),
        )
        for b, f, w in GRID
    ]
    columns = ["block_size", "fetch_factor", "num_workers", "cells_per_second", "entropy_bits"]
    return pd.DataFrame(rows, columns=columns)


@pytest.fixture
def recorded(tmp_path):
    """Writes a table and reads it as a grid."""

    def read(table):
        table.to_csv(tmp_path / "grid.csv", index=False)
        return read_grid(tmp_path / "grid.csv")

    return read


def missed(found: list[Replay]) -> list[float]:
    """Return regrets above 5 % of which nothing was said."""
    return [
        regret
        for each in found
        for regret, undecided in zip(each.regrets, each.undecided, strict=True)
        if regret > 0.05 and not undecided
    ]


@pytest.mark.slow
class TestChoices:
    """How good choices are: on recorded grids, and on machines of any character."""

    @pytest.mark.parametrize("noise", [0.05, 0.15], ids=["quiet", "busy"])
    def test_on_recorded_grids_nearly_all_are_within_5_percent(self, noise):
        """With as little time and as much noise as real runs have."""
        simpler = ["six largest", "random"]
        settings: dict[str, Any] = {
            "floors": (0.95,),
            "n_seeds": 7,
            "spread": noise,
            "baselines": simpler,
        }
        found = [each for path in RECORDED for each in replay(read_grid(path), **settings)]
        shares = [each.share_within() for each in found]
        assert np.mean(shares) >= (0.95 if noise == 0.05 else 0.85), shares
        assert len(missed(found)) <= (0.05 if noise == 0.05 else 0.1) * 7 * len(found)

        def n_good(name=None):
            return sum(round(each.share_within(name) * len(each.regrets)) for each in found)

        for name in simpler:  # none does as well on all grids together
            assert n_good() >= n_good(name), name

    @pytest.mark.parametrize("name", MACHINES)
    def test_on_machines_of_any_character_it_is_or_says_that_it_is_undecided(self, name):
        """The search was fitted to none of them, and two have no structure."""
        has_structure = name not in {"permuted", "independent"}
        n_grids = 6 if has_structure else 12
        found = [
            each
            for number in range(n_grids)
            for each in replay(
                drawn_grid(name, number),
                floors=[FLOORS[number % 3]],
                n_seeds=1,
                spread=0.05,
                seconds=SECONDS,
            )
        ]
        # Where memory ends cannot be told from its neighbours.
        assert len(missed(found)) <= (2 if name == "memory cliff" else n_grids // 6), found
        if not has_structure:
            assert sum(each.undecided[0] for each in found) >= n_grids // 2


@pytest.mark.parametrize("name", BASELINES)
def test_every_simpler_search_has_as_much_time_and_makes_a_choice(name):
    (path,) = (path for path in RECORDED if path.stem == "dense-28k")
    settings: dict[str, Any] = {"floors": [0.99], "n_seeds": 1, "spread": 0.05, "baselines": [name]}
    (found,) = replay(read_grid(path), **settings)
    if name == "random":
        assert replay(read_grid(path), **settings) == [found]
    assert 0 <= found.share_within(name) <= 1
    assert all(0 <= regret < 1 for regret in found.baseline_regrets[name])


def test_only_block_shuffling_is_taken_and_runs_are_put_together(recorded):
    table = pd.DataFrame(
        [
            ["BlockShuffling", 4, 16, 0, 100.0, 3.0],
            ["BlockShuffling", 4, 16, 0, 300.0, 3.2],
            ["BlockShuffling", 1, 16, 0, 50.0, 3.5],
            ["Streaming", np.nan, 16, 0, 900.0, 0.0],
            ["BlockWeightedSampling", 4, 16, 0, 700.0, 3.0],
        ],
        columns=[
            "strategy",
            "block_size",
            "fetch_factor",
            "num_workers",
            "cells_per_second",
            "entropy_bits",
        ],
    )
    grid = recorded(table)
    slow, fast = (Configuration(block_size=b, fetch_factor=16) for b in (1, 4))
    assert grid.configurations == (slow, fast)
    # So many cells in so many seconds: the harmonic mean.
    assert grid.cells_per_second() == {slow: pytest.approx(50), fast: pytest.approx(150)}
    assert grid.random_entropy == 3.5  # recorded at block size 1
    assert grid.feasible(0.9) == [slow]
    assert grid.feasible(3.0 / 3.5) == [slow, fast]


def test_a_floor_that_nothing_meets_has_no_choice(recorded):
    table = disk_table().query("block_size == 1024 and fetch_factor == 1")
    random = theory.expected_entropy_bits([1] * PLATES, BATCH_SIZE, 1, 1)
    (found,) = replay(replace(recorded(table), random_entropy=random), floors=[0.9])
    assert (found.n_feasible, found.best, found.chosen) == (0, None, ())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda table: table.drop(columns="fetch_factor"), "has no column fetch_factor"),
        (lambda table: table.drop(columns="entropy_bits"), "has no column entropy_bits"),
        (lambda table: table.assign(cells_per_second="fast"), "something other than numbers"),
        (lambda table: table.assign(cells_per_second=0), "must be above 0"),
        (lambda table: table.assign(block_size=np.nan), "no row of block shuffling"),
        (lambda table: table.assign(block_size=0.5), "a whole number"),
    ],
)
def test_what_is_no_grid_is_refused(changed, said, recorded):
    with pytest.raises(FormatError, match=said):
        recorded(changed(disk_table()))


def test_replicates_differ_as_the_recorded_runs_do(recorded):
    table = disk_table()
    rng = np.random.default_rng(0)
    runs = pd.concat([table] * 3)
    runs["cells_per_second"] *= np.exp(0.1 * rng.standard_normal(len(runs)))
    assert recorded(runs).replicate_spread() == pytest.approx(0.1, rel=0.1)
    assert recorded(table).replicate_spread() == 0.05


@pytest.fixture
def grid_csv(tmp_path):
    disk_table().to_csv(tmp_path / "grid.csv", index=False)
    return tmp_path / "grid.csv"


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_floor(grid_csv):
    printed = run("replay", grid_csv, "--seeds", 1, "--floor", 0.9, "--floor", 0.99)
    assert printed.exit_code == 0, printed.output
    random = theory.expected_entropy_bits([1] * PLATES, BATCH_SIZE, 1, 1)
    n_feasible = sum(  # what misses the floor by less than 0.001 reaches it
        theory.expected_entropy_bits([1] * PLATES, BATCH_SIZE, block, fetch) >= 0.989 * random
        for block, fetch, _ in GRID
    )
    rows = [line.split(" | ") for line in printed.stdout.splitlines() if " of 120 " in line]
    assert [(row[0].strip("| "), row[1]) for row in rows] == [("grid", "0.90"), ("", "0.99")]
    assert rows[1][2] == f"{n_feasible} of 120"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.csv"], "does not exist"),
        (["{grid}", "--floor", "1.5"], "0<=x<=1"),
        (["{grid}", "--floor", "high"], "is not a valid float"),
        (["{grid}", "--seconds", "0"], "x>0"),
        (["{grid}", "--seeds", "0"], "Invalid value"),
        (["machines", "perpetual"], "perpetual"),
    ],
)
def test_mistakes_are_one_error_and_exit_code_2(grid_csv, arguments, said):
    command = [] if arguments[0] == "machines" else ["replay"]
    printed = run(*command, *(each.format(grid=grid_csv) for each in arguments))
    assert printed.exit_code == 2
    assert printed.stdout == ""
    assert said in printed.stderr
    assert "Traceback" not in printed.stderr


def test_what_is_feasible_is_what_a_search_takes_to_be(recorded):
    """A choice that just misses the floor is no gain over the best, nor are both."""
    table = pd.DataFrame(
        [[4, 16, 0, 100.0, 3.5], [16, 16, 0, 300.0, 0.9895 * 3.6], [64, 16, 0, 900.0, 0.98 * 3.6]],
        columns=["block_size", "fetch_factor", "num_workers", "cells_per_second", "entropy_bits"],
    )
    grid = replace(recorded(table), random_entropy=3.6)
    slow, just_below, _ = grid.configurations
    assert just_below in grid.feasible(0.99)
    assert slow not in grid.feasible(0.99)
    (found,) = replay(grid, floors=[0.99], n_seeds=3, spread=0.02)
    assert found.best == just_below
    assert all(abs(regret) < 1e-9 for regret in found.regrets)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_the_same_for_the_same_number_and_another_for_another(name):
    one, again, other = (drawn_grid(name, number) for number in (2, 2, 3))
    assert one.cells_per_second() == again.cells_per_second()
    assert one.cells_per_second() != other.cells_per_second()
    assert np.isfinite(list(one.cells_per_second().values())).all()
    for floor in FLOORS:
        assert 1 < len(one.feasible(floor)) < len(one)


@pytest.mark.slow
def test_the_command_prints_shares_of_machines():
    printed = run("machines", "independent", "--draws", 1, "--seeds", 1)
    assert printed.exit_code == 0, printed.output
    rows = [line for line in printed.stdout.splitlines() if line.startswith("| independent")]
    assert [row.split(" | ")[1] for row in rows] == ["5%", "15%"]
    assert all(row.count("%") == 5 for row in rows)
