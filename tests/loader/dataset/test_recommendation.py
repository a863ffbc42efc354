"""Settings that autotune wrote: taken, compared with what is here, or refused."""

import json
import platform
import re
import warnings
from typing import Any

import numpy as np
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

SIZES = {"block_size": 8, "fetch_factor": 4, "num_workers": 2}
RESULT = {
    "schema": "cellfeed.autotune/4",
    "dataset": {"batch_size": 32},
    "recommended": {"configuration": SIZES},
}
ROWS = np.arange(1000)
MACHINES: list[Any] = [None, "unknown", {}, {"cpu": "unknown"}, {"cpu": {}}]
LOST = object()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "autotune.json"


def changed(place: str, value=LOST) -> str:
    """The result as JSON, with one value replaced or left out."""
    result = json.loads(json.dumps(RESULT))
    *above, name = place.split("/")
    parent = result
    for part in above:
        parent = parent[part]
    parent[name] = value
    if value is LOST:
        del parent[name]
    return json.dumps(result)


@pytest.mark.parametrize(
    "result",
    [
        json.dumps(RESULT),
        changed("recommended/reason", "it was the fastest"),
        changed("loader_fault", None),
        *(changed("machine", machine) for machine in MACHINES),
    ],
    ids=["usual", "with what is new", "without a fault", *[f"m{k}" for k in range(5)]],
)
def test_the_recommended_settings_are_used(path, result):
    path.write_text(result)
    for place in (path, str(path)):
        dataset = CellDataset.from_autotune(ROWS, place, seed=3)
        by_hand = CellDataset(ROWS, BlockShuffling(8), 32, 4, seed=3)
        assert [batch.tolist() for batch in dataset] == [batch.tolist() for batch in by_hand]
        assert dataset.loader().num_workers == 2
        assert dataset.loader(num_workers=0).num_workers == 0


def test_rows_or_a_strategy_may_be_given(path):
    path.write_text(json.dumps(RESULT))
    for indices in (np.arange(0, 1000, 3), [5, 6, 7]):
        dataset = CellDataset.from_autotune(ROWS, path, indices=indices)
        assert dataset.strategy.block_size == 8  # type: ignore[attr-defined]
        assert sorted(np.concatenate(list(dataset))) == list(indices)
    strategy = Streaming(indices=[3, 4])
    dataset = CellDataset.from_autotune(ROWS, path, strategy=strategy)
    assert dataset.strategy is strategy
    assert (dataset.batch_size, dataset.fetch_factor, dataset.num_workers) == (32, 4, 2)
    with pytest.raises(ParameterError, match="`indices` and `strategy` cannot be combined; pass"):
        CellDataset.from_autotune(ROWS, path, strategy=strategy, indices=[3])


HERE = {
    "cpu": {"model": "unknown", "logical_cores": 64, "usable_cores": usable_cores()},
    "platform": {"architecture": platform.machine()},
}
COLLECTION = {"n_cells": 40, "n_vars": 9, "layout": "csr", "dtype": "float32", "batch_size": 4}


ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    (
        {"dataset": {"elements": ["layers/counts"]}},
        r"with elements=\['layers/counts'\], but it is \['X'\] here; ",
    ),
    ({"batch_size": 8}, "with batch_size=4, but it is 8 here; "),
    (
        {"machine": {"cpu": {"usable_cores": 1000.5}}},
        r"with machine.cpu.usable_cores=1000.5, but it is",
    ),
    (
        {"machine": {"platform": {"architecture": "vax"}}},
        "with machine.platform.architecture=vax, but it is",
    ),
]


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
        assert make() == make(batch_size=4) == []
        assert make({"elements": ["X"]}) == make({"elements": []}) == []

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

    @pytest.mark.parametrize(("measured", "expected"), ELSEWHERE)
    def test_of_another_element_or_size_or_on_another_machine(self, make, measured, expected):
        (said,) = make(**measured)
        assert re.search(f"was measured {expected}", said)

    def test_all_differences_are_said_at_once(self, make):
        (said,) = make({"n_cells": 1, "n_vars": 2}, {"cpu": {"usable_cores": 1000}})
        assert said.count(" here; ") == 3
        assert "\n" not in said


_CONFIGURATION = "recommended/configuration/"
GARBLED: dict[str, tuple[str | bytes, str]] = {
    "an empty file": ("", "no JSON object"),
    "no JSON": ("{'schema':", "no JSON object"),
    "a deep list": ("[" * 100_000, "no JSON object"),
    "a list": ("[]", ""),
    "a number": ("3", ""),
    "not UTF-8": (b"\xff\xfe{}", ""),
    "no schema": (changed("schema"), "'schema' is missing"),
    "no recommendation": (changed("recommended"), ""),
    "a recommendation in words": (changed("recommended", "large blocks"), ""),
    "no dataset": (changed("dataset"), ""),
    "no batch size": (changed("dataset/batch_size"), "'batch_size' is missing"),
    "no batch size yet": (changed("dataset/batch_size", None), ""),
    **{f"no {name}": (changed(_CONFIGURATION + name), f"'{name}' is missing") for name in SIZES},
    "a block size of 0": (
        changed(f"{_CONFIGURATION}block_size", 0),
        "`block_size >= 1` must hold, but got block_size=0",
    ),
    "a block size in words": (changed(f"{_CONFIGURATION}block_size", "8"), "`block_size`"),
    "half a fetch": (changed(f"{_CONFIGURATION}fetch_factor", 0.5), "`fetch_factor`"),
    "no number": (changed(f"{_CONFIGURATION}fetch_factor", float("nan")), "`fetch_factor`"),
    "true workers": (changed(f"{_CONFIGURATION}num_workers", True), "`num_workers`"),
    "fewer workers than none": (changed(f"{_CONFIGURATION}num_workers", -1), "`num_workers"),
}


@pytest.mark.parametrize(("content", "why"), GARBLED.values(), ids=GARBLED)
def test_garbled(path, content, why):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    told = rf"^{path}: not a result of autotune \(.*{re.escape(why)}.*\); give the file that it wr"
    with pytest.raises(FormatError, match=told):
        CellDataset.from_autotune(ROWS, path)


@pytest.mark.parametrize("result", [None, 5, {}, ROWS])
def test_neither_a_path_nor_a_result(result):
    with pytest.raises(ParameterError, match=r"^`result` must be .*, but got one of type \w+$"):
        CellDataset.from_autotune(ROWS, result)


def test_what_is_not_there(path):
    with pytest.raises(PathError, match=rf"^{path}: no such file; make it with `autotune "):
        CellDataset.from_autotune(ROWS, path)
    with pytest.raises(PathError, match="no such file; make it with `autotune"):
        CellDataset.from_autotune(ROWS, changed("schema"))  # JSON in place of a path


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            changed("schema", "cellfeed.autotune/2"),
            r"has schema 'cellfeed.autotune/2', but .*; run autotune again$",
        ),
        (changed("recommended", None), "recommends nothing, .*; run autotune again$"),
        *(
            (
                json.dumps(RESULT | {"recommended": each, "loader_fault": "row 5: X differs"}),
                "recommends nothing, since wrong data were delivered: row 5: X differs$",
            )
            for each in (None, RESULT["recommended"])
        ),
    ],
)
def test_results_without_settings_for_this_version(path, content, told):
    path.write_text(content)
    with pytest.raises(FormatError, match=f"^{path}: {told}"):
        CellDataset.from_autotune(ROWS, path)
