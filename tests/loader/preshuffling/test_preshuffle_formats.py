"""Stores of every format that was ever written open, also without the codecs of numcodecs."""

import zipfile
from pathlib import Path

import anndata as ad
import numcodecs.registry
import numpy as np
import pytest

from cellfeed import open_collection, preshuffle

# ``tests/data/preshuffled_N.zip`` was written by the first version with "cellfeed preshuffle N".
# From 4 on, indices and counts have filters of numcodecs; from 6 on, chunks have checksums.
DATA = Path(__file__).parents[2] / "data"
FORMATS = range(1, 7)
FILTERS = ("delta", "astype")


def matrix() -> np.ndarray:
    """What was preshuffled: 40 cells x 300 genes."""
    row, column = np.ogrid[:40, :300]
    X = np.where((7 * row + 3 * column) % 5 < 2, (row * column) % 11 + 1, 0).astype(np.float32)
    X[3, 7] = 1000
    return X


@pytest.fixture(params=FORMATS)
def store(request, tmp_path):
    with zipfile.ZipFile(DATA / f"preshuffled_{request.param}.zip") as archive:
        archive.extractall(tmp_path / "store.zarr")
    return tmp_path / "store.zarr", request.param


@pytest.fixture
def no_filters(monkeypatch):
    """As if numcodecs had dropped the codecs."""
    for name in FILTERS:
        monkeypatch.delitem(numcodecs.registry.codec_registry, name, raising=False)
        monkeypatch.delitem(numcodecs.registry.entries, name, raising=False)


def check(path: Path) -> None:
    collection = open_collection(path, obs=["plate", "source_row"])
    assert collection.describe()["is_fast"].all()
    rows = np.asarray(collection.obs["source_row"].values)
    assert sorted(rows) == list(range(40))
    found = collection[:].X
    assert found.dtype == np.float32
    assert np.array_equal(found.toarray(), matrix()[rows])


def test_it_opens(store):
    path, _ = store
    check(path)
    parts = [ad.read_zarr(each) for each in path.glob("dataset_*")]
    for part in parts:
        assert np.array_equal(part.X.toarray(), matrix()[part.obs["source_row"]])


@pytest.mark.usefixtures("no_filters")
def test_it_opens_and_is_rewritten_without_the_filters(store, tmp_path):
    path, number = store
    check(path)
    if number >= 4:
        with pytest.raises(Exception, match=r"codec .*not available"):
            ad.read_zarr(path / "dataset_0")
    preshuffle(path, tmp_path / "lasting.zarr", in_order=True, elements=["X"], codec="annbatch")
    assert np.array_equal(
        ad.read_zarr(tmp_path / "lasting.zarr/dataset_0").X.toarray(), open_collection(path)[:].X
        .toarray(),
    )  # fmt: skip
