"""Tuning on the rows that training visits."""

import json
import textwrap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import commands

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    EpochPlan,
    ParameterError,
    open_collection,
)
from cellfeed_tuner import AutotuneResult, Configuration, autotune
from cellfeed_tuner._measuring._timing import Findings, TimingRequest
from cellfeed_tuner._recall import data_fingerprint
from cellfeed_tuner._subject import Selected, label_codes

pytestmark = pytest.mark.usefixtures("short_replicates")

QUERY = "plate != 'p0' and cell_type in ['B', 'T']"
FEW = [*range(10), *range(4000, 4005)]
SMALL: dict[str, Any] = {
    "block_sizes": [4, 16],
    "fetch_factors": [2, 4],
    "workers": [0],
    "budget": 15.0,
}


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate", "cell_type"])


@pytest.fixture(scope="module")
def rows(collection):
    return collection.where(QUERY)


@given(st.data())
def test_entropy_is_that_of_the_plan_over_these_rows(data):
    # Plans are replayed over the labels of the selected rows, as if there were no others.
    n_rows = data.draw(st.integers(40, 200))
    chosen = sorted(data.draw(st.sets(st.integers(0, n_rows - 1), min_size=32)))
    sizes: dict[str, Any] = {
        "batch_size": 4,
        "fetch_factor": 2,
        "seed": data.draw(st.integers(0, 99)),
    }
    block_size = data.draw(st.integers(1, 9))
    replayed = EpochPlan(strategy=BlockShuffling(block_size), n_rows=len(chosen), **sizes)
    read = EpochPlan(strategy=BlockShuffling(block_size, chosen), n_rows=n_rows, **sizes)
    assert replayed.n_fetches == read.n_fetches
    for number in range(read.n_fetches):
        rows = np.array(chosen)[replayed.delivered_rows(number)]
        assert np.array_equal(rows, read.delivered_rows(number))


@pytest.fixture(scope="module")
def tuned(short_replicates, collection, rows):
    return autotune(collection, label="plate", indices=rows, entropy_floor=0.5, **SMALL)


class TestResult:
    def test_it_says_which_rows(self, tuned, collection, rows):
        assert tuned.loader_fault is None
        assert tuned.dataset.n_cells == len(collection)
        assert tuned.dataset.selection.n_cells == tuned.dataset.n_visited == rows.size
        assert tuned.dataset.selection.where == ""
        assert tuned.dataset.label_counts == (rows.size // 2, rows.size // 2)

    def test_entropy_is_measured_in_these_rows(self, tuned):
        measured = [
            each.entropy_bits.measured.value
            for each in tuned.configurations
            if each.entropy_bits.measured is not None
        ]
        assert measured
        assert max(measured) <= 1  # two plates; of all three it would be above

    def test_what_is_saved_is_what_was_found(self, tuned, tmp_path):
        tuned.save(tmp_path / "autotune.json")
        again = AutotuneResult.load(tmp_path / "autotune.json")
        assert again.dataset.selection == tuned.dataset.selection

    def test_training_takes_it_without_a_warning(self, tuned, collection, rows):
        dataset = CellDataset.from_autotune(collection, tuned, indices=rows, seed=0)
        seen = np.concatenate([each.rows for each in dataset])
        assert np.array_equal(np.sort(seen), rows)
        CellDataset.from_autotune(collection, tuned, seed=0)


class TestTiming:
    def test_these_rows_are_read(self, collection, rows):
        request = TimingRequest(
            configuration=Configuration(block_size=4, fetch_factor=2),
            batch_size=32,
            labels=["plate"],
            cache="warm",
            seed=0,
            least_rounds=4,
            seconds=0.1,
        )
        events = list[object]()
        request.run(Selected.of(collection, rows), events.append)
        cells = [cell for each in events if isinstance(each, Findings) for cell in each.cells]
        assert cells
        assert {cell.row for cell in cells} <= set(rows.tolist())


class TestSelected:
    @given(st.sets(st.integers(0, 599), min_size=1))
    def test_chunks_are_those_that_hold_any(self, chosen):
        selected = Selected.of(self.collection, sorted(chosen))
        per_chunk = self.collection.rows_per_chunk
        assert selected.rows_per_chunk == len(chosen) / len(
            {int(row / per_chunk) for row in chosen}
        )

    @pytest.fixture(autouse=True)
    def _collection(self, collection):
        assert len(collection) >= 600
        type(self).collection = collection

    collection: Any

    def test_all_rows_are_the_collection(self, collection):
        selected = Selected.of(collection)
        assert len(selected) == len(collection)
        assert selected.rows_per_chunk == collection.rows_per_chunk
        assert np.array_equal(selected.label("plate").codes, label_codes(collection, "plate"))

    def test_other_rows_are_other_data(self, collection, rows):
        codes = label_codes(collection, "plate")
        digests = {
            data_fingerprint(collection, codes, indices).digest
            for indices in (None, rows, rows[1:], np.arange(len(collection)))
        }
        assert len(digests) == 4


class TestMistakes:
    @pytest.mark.parametrize(
        ("indices", "error", "said"),
        [
            ("plate == 'p7'", ParameterError, "^no cell matches the query \"plate == 'p7'\""),
            ("tissue == 'lung'", ColumnError, "obs has no column 'tissue'"),
            ("plate.str", ParameterError, "'plate.str' is not allowed"),
            ([10**9], ParameterError, "^`indices < .* must hold"),
            (FEW, ParameterError, "^the selection has 15 cells, but even the smallest"),
            ("plate == 'p1'", ColumnError, r"'plate' has 1 value\(s\)"),
        ],
    )
    def test_they_are_refused_before_anything_is_measured(self, collection, indices, error, said):
        with pytest.raises(error, match=said):
            autotune(collection, label="plate", indices=indices)


@pytest.fixture(scope="module")
def ran(short_replicates, small_collection, tmp_path_factory):
    output = tmp_path_factory.mktemp("selected")
    settings = ["--where", QUERY, "--entropy-floor", "0.5", "--output", output, "--label", "plate"]
    grid = ["--block-sizes", "4,16", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
    printed = commands.autotune(small_collection, *settings, *grid)
    assert printed.exit_code == 0, printed.output
    return printed, output


class TestCommand:
    def test_the_report_says_which_cells(self, ran, rows):
        _, output = ran
        selection = json.loads((output / "autotune.json").read_text())["dataset"]["selection"]
        assert (selection["n_cells"], selection["where"]) == (rows.size, QUERY)
        assert f"{rows.size:,} cells where plate" in (output / "autotune.html").read_text()

    def test_the_code_trains_on_them(self, ran, rows):
        code = ran[0].stdout.split("To train with it:")[1].split("Wrote")[0]
        scope: dict[str, Any] = {}
        exec(textwrap.dedent(code), scope)
        seen = np.concatenate([each.rows for each in scope["dataset"]])
        assert np.array_equal(np.sort(seen), rows)

    def test_a_wrong_query_is_refused_in_a_line(self, small_collection):
        printed = commands.autotune(small_collection, "--label", "plate", "--where", "plate.values")
        assert printed.exit_code == 2
        assert "'plate.values' is not allowed" in printed.stderr
        assert "Traceback" not in printed.output
