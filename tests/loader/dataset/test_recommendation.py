import json
import platform
import re
import warnings

import numpy as np
import psutil
import pytest
import scipy.sparse as sp

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    PathError,
    Streaming,
    open_collection,
)
from cellfeed.machine import usable_cores

RESULT = {
    "schema": "cellfeed.autotune/2",
    "dataset": {"batch_size": 32},
    "recommended": {"configuration": {"block_size": 8, "fetch_factor": 4, "num_workers": 2}},
}
SIZES = ("recommended", "configuration")
ROWS = np.arange(1000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "autotune.json"


def changed(*place: str, value=None, lost: bool = False) -> str:
    """The result as JSON, with one value replaced or left out."""
    result = json.loads(json.dumps(RESULT))
    parent = result
    for name in place[:-1]:
        parent = parent[name]
    if lost:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return json.dumps(result)


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_recommended_settings_are_used(path, kind):
    path.write_text(json.dumps(RESULT))
    dataset = CellDataset.from_autotune(ROWS, kind(path), seed=3)
    by_hand = CellDataset(ROWS, BlockShuffling(8), 32, 4, seed=3)
    assert [batch.tolist() for batch in dataset] == [batch.tolist() for batch in by_hand]
    assert dataset.loader().num_workers == 2
    assert dataset.loader(num_workers=0).num_workers == 0


def test_a_file_of_before_has_the_sizes_one_level_higher(path):
    sizes = {"block_size": 8, "fetch_factor": 4, "num_workers": 2}
    path.write_text(json.dumps(RESULT | {"schema": "cellfeed.autotune/1", "recommended": sizes}))
    dataset = CellDataset.from_autotune(ROWS, path, seed=3)
    assert dataset.strategy.block_size == 8  # type: ignore[attr-defined]
    assert (dataset.batch_size, dataset.fetch_factor) == (32, 4)


def test_what_is_new_in_the_file_is_no_obstacle(path):
    path.write_text(changed("recommended", "reason", value="it was the fastest"))
    assert CellDataset.from_autotune(ROWS, path).batch_size == 32


@pytest.mark.parametrize("indices", [np.arange(0, 1000, 3), [5, 6, 7]])
def test_the_rows_to_visit_may_be_given(path, indices):
    path.write_text(json.dumps(RESULT))
    dataset = CellDataset.from_autotune(ROWS, path, indices=indices)
    assert dataset.strategy.block_size == 8  # type: ignore[attr-defined]
    assert sorted(np.concatenate(list(dataset))) == list(indices)


def test_a_strategy_may_be_given(path):
    path.write_text(json.dumps(RESULT))
    strategy = Streaming(indices=[3, 4])
    dataset = CellDataset.from_autotune(ROWS, path, strategy=strategy)
    assert dataset.strategy is strategy
    assert (dataset.batch_size, dataset.fetch_factor, dataset.num_workers) == (32, 4, 2)
    with pytest.raises(ParameterError, match="`indices` and `strategy` cannot be combined; pass"):
        CellDataset.from_autotune(ROWS, path, strategy=strategy, indices=[3])


HERE = {
    "cpu": {"model": "unknown", "logical_cores": 64, "usable_cores": usable_cores()},
    "memory": {"total_bytes": psutil.virtual_memory().total, "available_bytes": 1},
    "platform": {"architecture": platform.machine()},
}
COLLECTION = {"n_cells": 40, "n_vars": 9, "layout": "csr", "dtype": "float32", "batch_size": 4}


class TestWhatWasMeasured:
    @pytest.fixture
    def make(self, path, write_h5ad):
        collection = open_collection(write_h5ad(sp.random(40, 9, 0.5, "csr", np.float32)))

        def make(dataset=None, machine=None, **parameters) -> list[str]:
            result = RESULT | {
                "dataset": COLLECTION | (dataset or {}),
                "machine": HERE | (machine or {}),
            }
            path.write_text(json.dumps(result))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                CellDataset.from_autotune(collection, path, **parameters)
            assert all(each.filename == __file__ for each in caught)
            return [str(each.message) for each in caught]

        return make

    def test_is_not_spoken_of_where_it_is_the_same(self, make):
        assert make() == []
        assert make(batch_size=4) == []

    @pytest.mark.parametrize("machine", [None, "unknown", {}, {"cpu": "unknown"}, {"cpu": {}}])
    def test_need_not_be_known(self, path, machine):
        path.write_text(changed("machine", value=machine))
        CellDataset.from_autotune(ROWS, path)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("n_cells", 39), ("n_vars", 8), ("layout", "dense"), ("dtype", "float64")],
    )
    def test_of_another_collection(self, make, path, name, value):
        (said,) = make({name: value})
        assert said == (
            f"{path}: was measured with {name}={value}, but it is {COLLECTION[name]} here; its "
            "settings may be far from the best, so run autotune again"
        )

    def test_of_another_element(self, make):
        assert make({"elements": ["X"]}) == []
        assert make({"elements": []}) == []
        (said,) = make({"elements": ["layers/counts"]})
        assert "was measured with elements=['layers/counts'], but it is ['X'] here; " in said

    def test_of_another_batch_size(self, make):
        (said,) = make(batch_size=8)
        assert "was measured with batch_size=4, but it is 8 here; " in said

    @pytest.mark.parametrize(
        ("machine", "expected"),
        [
            ({"cpu": {"usable_cores": 1000.5}}, "with 1000.5 usable cores, but there are"),
            ({"memory": {"total_bytes": 10**15}}, r"with 1e\+06 GB of memory, but there are"),
            ({"platform": {"architecture": "vax"}}, "with a processor of type vax, but it is"),
        ],
    )
    def test_on_another_machine(self, make, machine, expected):
        (said,) = make(machine=machine)
        assert re.search(expected, said)

    def test_all_differences_are_said_at_once(self, make):
        (said,) = make({"n_cells": 1, "n_vars": 2}, {"cpu": {"usable_cores": 1000}})
        assert said.count(" here; ") == 3
        assert "\n" not in said


GARBLED = {
    "an empty file": "",
    "no JSON": "{'schema':",
    "a list": "[]",
    "a number": "3",
    "not UTF-8": b"\xff\xfe{}",
    "no schema": changed("schema", lost=True),
    "no recommendation": changed("recommended", lost=True),
    "a recommendation in words": changed("recommended", value="large blocks"),
    "no dataset": changed("dataset", lost=True),
    "no batch size": changed("dataset", "batch_size", lost=True),
    "no batch size yet": changed("dataset", "batch_size", value=None),
    **{
        f"no {name}": changed(*SIZES, name, lost=True)
        for name in ("block_size", "fetch_factor", "num_workers")
    },
    "a block size of 0": changed(*SIZES, "block_size", value=0),
    "a block size in words": changed(*SIZES, "block_size", value="8"),
    "half a fetch": changed(*SIZES, "fetch_factor", value=0.5),
    "a fetch factor that is none": changed(*SIZES, "fetch_factor", value=float("nan")),
    "true workers": changed(*SIZES, "num_workers", value=True),
    "fewer workers than none": changed(*SIZES, "num_workers", value=-1),
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=GARBLED)
def test_garbled(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(
        FormatError, match=rf"^{path}: not a result of autotune .*; give the file that it wrote$"
    ):
        CellDataset.from_autotune(ROWS, path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "no JSON object"),
        (changed(*SIZES, "block_size", lost=True), "'block_size' is missing"),
        (
            changed(*SIZES, "block_size", value=0),
            "`block_size >= 1` must hold, but got block_size=0",
        ),
    ],
)
def test_why_it_is_refused(path, content, why):
    path.write_text(content)
    with pytest.raises(FormatError, match=rf"not a result of autotune \({re.escape(why)}\); give"):
        CellDataset.from_autotune(ROWS, path)


@pytest.mark.parametrize("result", [None, 5, {}, ROWS])
def test_neither_a_path_nor_a_result(result):
    with pytest.raises(ParameterError, match=r"^`result` must be .*, but got one of type \w+$"):
        CellDataset.from_autotune(ROWS, result)


def test_json_in_place_of_a_path():
    with pytest.raises(PathError, match="no such file; make it with `autotune"):
        CellDataset.from_autotune(ROWS, changed("schema", value="cellfeed.autotune/3"))


def test_of_another_schema(path):
    path.write_text(changed("schema", value="cellfeed.autotune/3"))
    expected = rf"^{path}: has schema 'cellfeed.autotune/3', but .*; run autotune again$"
    with pytest.raises(FormatError, match=expected):
        CellDataset.from_autotune(ROWS, path)


def test_that_recommends_nothing(path):
    path.write_text(changed("recommended", value=None))
    with pytest.raises(FormatError, match=rf"^{path}: recommends nothing, .*; run autotune again$"):
        CellDataset.from_autotune(ROWS, path)


def test_that_found_the_loader_wrong(path):
    fault = "row 5 of a.h5ad: X differs"
    for recommended in (None, RESULT["recommended"]):
        result = RESULT | {"recommended": recommended, "loader_fault": fault}
        path.write_text(json.dumps(result))
        expected = f"{path}: recommends nothing, since wrong data were delivered: {fault}"
        with pytest.raises(FormatError, match=f"^{re.escape(expected)}$"):
            CellDataset.from_autotune(ROWS, path)
    path.write_text(changed("loader_fault", value=None))
    assert CellDataset.from_autotune(ROWS, path).batch_size == 32


def test_that_is_missing(path):
    with pytest.raises(PathError, match=rf"^{path}: no such file; make it with `autotune "):
        CellDataset.from_autotune(ROWS, path)
