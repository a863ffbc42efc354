"""The search on recorded grids: is the choice right, after some ten looks?"""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bench.backtest.__main__ import main
from bench.backtest.baselines import BASELINES
from bench.backtest.recorded_grid import read_grid
from bench.backtest.replay import DEFAULT_LOOKS, Replay, replay
from tests import commands

from cellfeed import FormatError, ParameterError
from cellfeed_tuner import Configuration, theory

ROOT = Path(__file__).parents[2]
RECORDED = [
    *sorted((ROOT / "notebooks" / "figures" / "data").glob("published_tahoe_*.csv")),
    *sorted((ROOT / "bench" / "grids").glob("*.csv")),
]
FLOORS = (0.9, 0.95, 0.99)
run = partial(commands.run, main)
BATCH_SIZE, N_CELLS, PLATES = 64, 10**6, 14
GRID = list(product((1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2, 4)))

# Prices in seconds, drawn anew for each world within a factor of two or so.
PLAIN = {
    "fetch": 1e-3, "file": 0.0, "seek": 2e-4, "chunk": 2e-4, "rows_per_chunk": 8.0, "cell": 1e-5,
    "transfer": 1e-5, "contention": 0.0, "ceiling": 0.0, "serial": 0.1, "departure": 0.0,
}  # fmt: skip
CHARACTERS = {
    "disk-bound": {"seek": 5e-3, "fetch": 3e-3, "serial": 0.5},
    "decompression-bound": {"chunk": 4e-3, "rows_per_chunk": 24.0, "serial": 0.02},
    "overhead-bound": {"fetch": 0.2, "seek": 1e-5, "chunk": 1e-5},
    "many files": {"file": 0.2},
    "worker-friendly": {"serial": 1e-3, "transfer": 1e-7},
    "worker-hostile": {"serial": 0.7, "transfer": 2e-4, "contention": 1e-4},
    "plateau": {"ceiling": 2e-4},
    "not monotone": {"departure": 0.15},
}


def world(character: str, seed: int) -> pd.DataFrame:
    """A grid as a machine of that character would give it, without noise."""
    rng = np.random.default_rng(seed)
    prices = {
        name: price * np.exp(0.5 * rng.standard_normal())
        for name, price in (PLAIN | CHARACTERS[character]).items()
    }
    rows = [(b, f, w, 1 / _seconds_per_cell(b, f, w, prices, rng)) for b, f, w in GRID]
    return pd.DataFrame(
        rows, columns=["block_size", "fetch_factor", "num_workers", "cells_per_second"]
    )


def _seconds_per_cell(block, fetch_factor, workers, prices, rng):
    cells = BATCH_SIZE * fetch_factor
    blocks, rows = max(1.0, cells / block), min(block, cells)
    chunks = N_CELLS / prices["rows_per_chunk"]
    touched = 1 + (rows - 1) / prices["rows_per_chunk"]
    fetch = (
        prices["fetch"]
        + prices["file"] * PLATES * (1 - (1 - 1 / PLATES) ** blocks)
        + prices["seek"] * blocks
        + prices["chunk"] * chunks * (1 - (1 - touched / chunks) ** blocks)
        + prices["cell"] * cells
    ) / cells
    serial = min(1.0, prices["serial"])
    seconds = max(fetch / max(1, workers), serial * fetch)
    seconds += (prices["transfer"] if workers else 0) + prices["contention"] * max(0, workers - 1)
    seconds = (seconds**4 + prices["ceiling"] ** 4) ** 0.25
    return seconds * np.exp(prices["departure"] * rng.standard_normal())


@pytest.fixture
def recorded(tmp_path):
    """Writes a table and reads it as a grid."""

    def read(table, **options):
        table.to_csv(tmp_path / "grid.csv", index=False)
        return read_grid(tmp_path / "grid.csv", **options)

    return read


@pytest.fixture(scope="module", params=[0.05, 0.15], ids=["quiet", "busy"])
def replayed(request):
    """Each recorded grid, with as few looks and as much noise as real runs have."""
    return request.param, [
        each
        for path in RECORDED
        for each in replay(
            read_grid(path),
            floors=(0.95,),
            n_seeds=7,
            spread=request.param,
            baselines=["six largest", "largest", "random"],
        )
    ]


def test_on_recorded_grids_nearly_all_choices_are_within_5_percent(replayed):
    noise, found = replayed
    shares = [each.share_within() for each in found]
    is_quiet = noise <= 0.05
    assert np.mean(shares) >= (0.95 if is_quiet else 0.85), shares
    assert len(missed(found)) <= (0.05 if is_quiet else 0.1) * 7 * len(found)


def test_no_simpler_search_does_as_well_on_all_grids_together(replayed):
    _, found = replayed

    def n_good(name=None):
        return sum(round(each.share_within(name) * len(each.regrets)) for each in found)

    for name in found[0].baseline_regrets:
        assert n_good() >= n_good(name), name


def test_no_more_looks_are_taken_than_there_are(replayed):
    _, found = replayed
    for each in found:
        assert all(
            taken <= given for taken, given in zip(each.n_replicates, DEFAULT_LOOKS, strict=True)
        )


def missed(found: list[Replay]) -> list[float]:
    """Return regrets above 5 % of which nothing was said."""
    return [
        regret
        for each in found
        for regret, undecided in zip(each.regrets, each.undecided, strict=True)
        if regret > 0.05 and not undecided
    ]


@pytest.mark.parametrize("name", BASELINES)
def test_every_simpler_search_has_as_many_looks_and_makes_a_choice(name):
    (path,) = (path for path in RECORDED if path.stem == "dense-28k")
    (found,) = replay(read_grid(path), floors=[0.99], n_seeds=2, spread=0.05, baselines=[name])
    assert 0 <= found.share_within(name) <= 1
    assert all(0 <= regret < 1 for regret in found.baseline_regrets[name])


@pytest.mark.parametrize("character", CHARACTERS)
def test_in_worlds_of_any_character_the_choice_is_within_5_percent(character, recorded):
    """Or it says that it is undecided between it and what is."""
    found = []
    for seed in range(6):
        grid = recorded(world(character, seed), distribution=[1] * PLATES)
        found += replay(grid, floors=[FLOORS[seed % 3]], n_seeds=1, spread=0.05, looks=[24])
    # What departs from any sum by 15 %, each for itself, cannot be told from a few looks.
    assert len(missed(found)) <= (2 if character == "not monotone" else 1), found


def exchanged(grid, seed):
    """The same throughputs, each of another configuration: a surface without structure."""
    places = np.random.default_rng(seed).permutation(len(grid))
    return replace(grid, runs=tuple(grid.runs[place] for place in places))


def test_without_structure_a_wrong_choice_is_said_to_be_undecided(recorded):
    found = [
        each
        for seed in range(3)
        for each in replay(
            exchanged(recorded(world("disk-bound", seed), distribution=[1] * PLATES), seed),
            floors=[0],
            n_seeds=1,
            spread=0.15,
        )
    ]
    assert missed(found) == []
    assert any(each.undecided[0] for each in found)


def test_a_search_repeats_itself(recorded):
    grid = recorded(world("plateau", 0), distribution=[1] * PLATES)
    assert replay(grid, floors=[0.95], n_seeds=2) == replay(grid, floors=[0.95], n_seeds=2)


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


def test_without_recorded_entropies_they_are_the_exact_expectation(recorded):
    grid = recorded(world("plateau", 0), distribution=[2] * PLATES, batch_size=32)
    place = grid.configurations.index(Configuration(block_size=16, fetch_factor=4))
    assert grid.entropies[place] == theory.expected_entropy_bits([1] * PLATES, 32, 16, 4)
    assert grid.random_entropy == theory.expected_entropy_bits([1] * PLATES, 32, 1, 1)


def test_a_floor_that_nothing_meets_has_no_choice(recorded):
    table = world("plateau", 0).query("block_size == 1024 and fetch_factor == 1")
    (found,) = replay(recorded(table, distribution=[1] * PLATES), floors=[0.9])
    assert (found.n_feasible, found.best, found.chosen) == (0, None, ())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda table: table.drop(columns="fetch_factor"), "has no column fetch_factor"),
        (lambda table: table.assign(cells_per_second="fast"), "something other than numbers"),
        (lambda table: table.assign(cells_per_second=0), "must be above 0"),
        (lambda table: table.assign(block_size=np.nan), "no row of block shuffling"),
        (lambda table: table.assign(block_size=0.5), "a whole number"),
    ],
)
def test_what_is_no_grid_is_refused(changed, said, recorded):
    with pytest.raises(FormatError, match=said):
        recorded(changed(world("plateau", 0)), distribution=[1, 1])


def test_replicates_differ_as_the_recorded_runs_do(recorded):
    table = world("plateau", 0)
    rng = np.random.default_rng(0)
    runs = pd.concat([table] * 3)
    runs["cells_per_second"] *= np.exp(0.1 * rng.standard_normal(len(runs)))
    assert recorded(runs, distribution=[1] * 2).replicate_spread() == pytest.approx(0.1, rel=0.1)
    assert recorded(table, distribution=[1] * 2).replicate_spread() == 0.05


@pytest.mark.parametrize(
    "wrong", [{"looks": []}, {"looks": [0]}, {"floors": [1.5]}, {"n_seeds": 0}]
)
def test_impossible_settings_are_refused(wrong, recorded):
    grid = recorded(world("plateau", 0), distribution=[1, 1])
    with pytest.raises(ParameterError, match=next(iter(wrong)).removesuffix("s")):
        replay(grid, **wrong)


@pytest.fixture
def grid_csv(tmp_path):
    world("disk-bound", 0).to_csv(tmp_path / "grid.csv", index=False)
    return tmp_path / "grid.csv"


def test_the_command_prints_a_row_for_each_floor(grid_csv):
    printed = run("replay", grid_csv, "--plates", 14, "--seeds", 2, "--floors", "0.9,0.99")
    assert printed.exit_code == 0, printed.output
    assert "Optuna's TPE sampler" in printed.stdout
    random = theory.expected_entropy_bits([1] * PLATES, BATCH_SIZE, 1, 1)
    n_feasible = sum(  # what misses the floor by less than 0.001 reaches it
        theory.expected_entropy_bits([1] * PLATES, BATCH_SIZE, block, fetch) >= 0.989 * random
        for block, fetch, _ in GRID
    )
    assert [line.split()[:2] for line in printed.stdout.splitlines() if " of 120 " in line] == [
        ["grid", "0.90"],
        ["0.99", str(n_feasible)],
    ]


def test_the_command_prints_json(grid_csv):
    printed = run("replay", grid_csv, "--distribution", "3,1", "--seeds", 2, "--json")
    found = json.loads(printed.stdout)
    assert found["schema"] == "cellfeed.replay/2"
    (of_grid,) = found["grids"]
    assert of_grid["grid"] == str(grid_csv)
    assert [each["floor"] for each in of_grid["floors"]] == list(FLOORS)
    for each in of_grid["floors"]:
        assert len(each["regrets"]) == len(each["shares_measured"]) == len(each["chosen"]) == 2
        assert 0 <= each["within_5_percent"] <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.csv"], "No such file"),
        (["{grid}"], "has no column entropy_bits; say how labels are distributed"),
        (["{grid}", "--plates", "2", "--distribution", "1,1"], "give one of them"),
        (["{grid}", "--floors", "1.5"], "within 0 and 1"),
        (["{grid}", "--floors", "high"], "are not numbers"),
        (["{grid}", "--distribution", "0,0"], "must be frequencies"),
        (["{grid}", "--seeds", "0"], "Invalid value"),
    ],
)
def test_mistakes_are_one_error_and_exit_code_2(grid_csv, arguments, said):
    printed = run("replay", *(each.format(grid=grid_csv) for each in arguments))
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
    grid = replace(recorded(table, distribution=[1] * PLATES), random_entropy=3.6)
    slow, just_below, _ = grid.configurations
    assert just_below in grid.feasible(0.99)
    assert slow not in grid.feasible(0.99)
    (found,) = replay(grid, floors=[0.99], n_seeds=3, spread=0.02)
    assert found.best == just_below
    assert all(abs(regret) < 1e-9 for regret in found.regrets)
