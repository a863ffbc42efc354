import json

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, FormatError, PathError

RESULT = {
    "schema": "cellfeed.autotune/1",
    "dataset": {"batch_size": 32},
    "recommended": {"block_size": 8, "fetch_factor": 4, "num_workers": 2},
}
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


def test_what_is_new_in_the_file_is_no_obstacle(path):
    path.write_text(changed("recommended", "reason", value="it was the fastest"))
    assert CellDataset.from_autotune(ROWS, path).batch_size == 32


GARBLED = {
    "an empty file": "",
    "no JSON": "{'schema':",
    "a list": "[]",
    "a number": "3",
    "not UTF-8": b"\xff\xfe{}",
    "no schema": changed("schema", lost=True),
    "no recommendation": changed("recommended", lost=True),
    "a recommendation in words": changed("recommended", value="large blocks"),
    "no data set": changed("dataset", lost=True),
    "no batch size": changed("dataset", "batch_size", lost=True),
    "no batch size yet": changed("dataset", "batch_size", value=None),
    **{
        f"no {name}": changed("recommended", name, lost=True)
        for name in ("block_size", "fetch_factor", "num_workers")
    },
    "a block size of 0": changed("recommended", "block_size", value=0),
    "a block size in words": changed("recommended", "block_size", value="8"),
    "half a fetch": changed("recommended", "fetch_factor", value=0.5),
    "a fetch factor that is none": changed("recommended", "fetch_factor", value=float("nan")),
    "true workers": changed("recommended", "num_workers", value=True),
    "fewer workers than none": changed("recommended", "num_workers", value=-1),
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=GARBLED)
def test_garbled(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError, match=rf"^{path}: not a result of autotune .*; run it again$"):
        CellDataset.from_autotune(ROWS, path)


def test_of_another_schema(path):
    path.write_text(changed("schema", value="cellfeed.autotune/2"))
    expected = rf"^{path}: has schema 'cellfeed.autotune/2', but .*; run autotune again$"
    with pytest.raises(FormatError, match=expected):
        CellDataset.from_autotune(ROWS, path)


def test_that_recommends_nothing(path):
    path.write_text(changed("recommended", value=None))
    with pytest.raises(FormatError, match=rf"^{path}: recommends nothing, .*; run autotune again$"):
        CellDataset.from_autotune(ROWS, path)


def test_that_is_missing(path):
    with pytest.raises(PathError, match=rf"^{path}: no such file; make it with `autotune "):
        CellDataset.from_autotune(ROWS, path)
