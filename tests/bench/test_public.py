"""Other projects' benchmarks: SLAF's scores of randomness, and cellfeed behind two interfaces."""

import importlib
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from tests import commands

from cellfeed import BlockShuffling, Streaming
from cellfeed.synthetic import write_tahoe_like

scores: Any = importlib.import_module("bench.public.randomness")
adapters: Any = importlib.import_module("bench.public.adapters")
main: Any = importlib.import_module("bench.public.__main__").main
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks/public.md").read_text()
N_CELLS = 280


def as_published(cells, n_cells):
    """Return both scores as SLAF writes them down, over all pairs instead of some."""
    within = np.mean([[abs(a - b) for a, b in itertools.combinations(row, 2)] for row in cells])
    across = np.mean(
        [[abs(a - b) for a in one for b in other] for one, other in itertools.pairwise(cells)]
    )
    size = len(cells[0])
    consecutive = [range(size), range(size, 2 * size)]
    first = np.mean([abs(a - b) for a, b in itertools.combinations(consecutive[0], 2)])
    next_one = np.mean([abs(a - b) for a in consecutive[0] for b in consecutive[1]])
    anything = np.mean([abs(a - b) for a, b in itertools.combinations(range(n_cells), 2)])
    return [
        (value - lowest) / (anything - lowest)
        for value, lowest in ((within, first), (across, next_one))
    ]


@given(
    cells=st_np.arrays(
        np.int64,
        st.tuples(st.integers(2, 5), st.integers(2, 8)),
        elements=st.integers(0, 99),
    )
)
def test_is_the_published_formula(cells):
    found = scores.randomness(cells, 100)
    expected = as_published(cells.tolist(), 100)
    np.testing.assert_allclose([found.within, found.across], expected, rtol=1e-12, atol=1e-12)


def test_storage_order_is_0_and_random_cells_are_1():
    ordered = scores.of_strategy(Streaming(), 16)
    assert ordered.within == pytest.approx(0, abs=1e-9)
    assert ordered.across == pytest.approx(0, abs=1e-9)
    shuffled = scores.of_strategy(BlockShuffling(1), 16)
    assert shuffled.within == pytest.approx(1, abs=0.01)
    assert shuffled.across == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("block_size", "fetch_factor"), [(16, 1), (16, 16), (64, 16), (256, 64)])
def test_is_what_the_share_of_pairs_of_one_block_says(block_size, fetch_factor):
    """Two cells of one block are as near as in storage order, and others as far as at random."""
    n_cells, size = scores.N_CELLS, scores.BATCH_SIZE
    together = (block_size - 1) / (fetch_factor * size - 1)
    of_block, anything, lowest = (block_size + 1) / 3, (n_cells + 1) / 3, (size + 1) / 3
    distance = together * of_block + (1 - together) * anything
    expected = (distance - lowest) / (anything - lowest)
    found = scores.of_strategy(BlockShuffling(block_size), fetch_factor)
    assert found.within == pytest.approx(expected, abs=0.02)


def test_the_table_is_that_of_today():
    marks = r"<!-- python -m bench.public randomness -->\n(.*?)\n<!-- end -->"
    (table,) = re.findall(marks, PAGE, re.DOTALL)
    rows = {each.split("|")[1].strip(): each.split("|")[2:-1] for each in table.splitlines()}
    others = [name for name, _ in scores.other_strategies(1_000)]
    grid = [f"`BlockShuffling({size})`" for size in scores.BLOCK_SIZES]
    published = [f"{name}, as published" for name in scores.PUBLISHED]
    assert list(rows)[2:] == [*grid, *others, *published]
    for size, factor in ((16, 16), (16, 64), (64, 256)):
        found = scores.of_strategy(BlockShuffling(size), factor)
        shown = rows[f"`BlockShuffling({size})`"][scores.FETCH_FACTORS.index(factor)]
        assert shown.strip() == scores.shown(found)


@pytest.fixture(scope="module")
def plates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    return write_tahoe_like(folder, n_cells=N_CELLS, n_genes=50, n_plates=2, n_drugs=8, seed=0)


@pytest.fixture
def arrayloader(monkeypatch):
    """A stub of laminlabs/arrayloader-benchmarks: it iterates, and counts what it is given."""
    stub: Any = types.ModuleType("arrayloader_benchmarks")
    stub.seen = []

    def benchmark_loader(loader, n_samples, batch_size):
        n_minibatches = n_samples // batch_size
        for number, minibatch in enumerate(iter(loader)):
            stub.seen.append(minibatch)
            if number == n_minibatches:
                break
        return 1234.5, 1e6 / 1234.5, [0.1]

    stub.benchmark_loader = benchmark_loader
    monkeypatch.setitem(sys.modules, "arrayloader_benchmarks", stub)
    return stub


def test_runs_in_arrayloader_benchmarks(arrayloader, plates):
    ended = commands.run(main, "arrayloader", *plates, "--fetch-factor", 2)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == "cellfeed: 1,234 samples/s in minibatches of 28\n"  # a tenth of all
    assert [len(each.X) for each in arrayloader.seen] == [28] * 10
    assert {each.X.shape[1] for each in arrayloader.seen} == {50}
    assert all(len(each.obs["cell_line"]) == 28 for each in arrayloader.seen)


def test_its_loader_has_the_parameters_of_the_others(plates):
    # As in scripts/run_loading_benchmark_on_collection.py of laminlabs/arrayloader-benchmarks.
    loader = adapters.get_cellfeed_loader(
        plates, block_size=4, fetch_factor=16, num_workers=0, batch_size=10, include_obs=False
    )
    cells = [minibatch.X.shape[0] for minibatch in loader]
    assert cells == [10] * 28


@pytest.fixture
def scspeedtest(monkeypatch):
    """A stub of bionemo-scspeedtest: what it calls, reads and returns."""
    stub: Any = types.ModuleType("bionemo.scspeedtest")

    def benchmark_single_dataloader(
        dataloader_factory, data_path, name="", dataset_factory=None, num_epochs=1,
        max_batches=None, max_time_seconds=None, warmup_batches=5, warmup_time_seconds=None,
        shuffle=False, num_runs=1, output_prefix="",
    ):  # fmt: skip
        loader = dataloader_factory()
        stub.name, stub.data_path, stub.num_workers = name, data_path, loader.num_workers
        # An epoch that it stops, and two whole ones.
        for _ in loader:
            break
        stub.epochs = [sum(batch.X.shape[0] for batch in loader) for _ in range(2)]
        return types.SimpleNamespace(samples_per_second=99.4)

    stub.benchmark_single_dataloader = benchmark_single_dataloader
    package = types.ModuleType("bionemo")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "bionemo", package)
    monkeypatch.setitem(sys.modules, "bionemo.scspeedtest", stub)
    return stub


def test_runs_in_scspeedtest(scspeedtest, plates):
    ended = commands.run(main, "scspeedtest", *plates, "--seconds", 1)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == "cellfeed: 99 samples/s\n"
    assert scspeedtest.num_workers == 0
    assert scspeedtest.epochs == [N_CELLS] * 2
    assert scspeedtest.data_path == str(plates[0].parent)
    assert "block_size 16" in scspeedtest.name


@pytest.mark.parametrize("command", ["arrayloader", "scspeedtest"])
def test_a_benchmark_that_is_not_installed_is_one_line(command, plates, monkeypatch):
    for name in ("arrayloader_benchmarks", "bionemo", "bionemo.scspeedtest"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = commands.run(main, command, *plates)
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "install it: pip install" in ended.stderr


def test_its_page_names_commands_that_exist():
    assert set(re.findall(r"python -m bench\.public (\w+)", PAGE)) == set(main.commands)
    known = {
        option for command in main.commands.values() for each in command.params
        for option in each.opts
    }  # fmt: skip
    lines = re.findall(r"^\.venv/bin/python -m bench\.public .*$", PAGE, re.MULTILINE)
    assert lines
    for line in lines:
        assert set(re.findall(r"--[a-z][\w-]*", line)) <= known
