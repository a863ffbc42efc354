"""Minibatches in NumPy and SciPy although torch is installed."""

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    InterleavedDatasets,
    Streaming,
    open_collection,
)

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def _dataset(plates, **options):
    collection = open_collection(plates, obs=["plate", "number"])
    return CellDataset(collection, BlockShuffling(4), 8, 2, seed=0, **options)


def _same(cells):
    return cells


def assert_same(cells, minibatch):
    assert type(cells) is Cells
    assert cells.keys() == minibatch.keys()
    values = cells.X.toarray() if isinstance(cells.X, sp.csr_array) else cells.X
    assert isinstance(values, np.ndarray)
    assert np.array_equal(values, minibatch.to("cpu", dense=True).X.numpy())
    assert np.array_equal(cells.rows, minibatch.rows.numpy())
    assert cells.obs.keys() == minibatch.obs.keys()
    for name, column in cells.obs.items():
        assert np.array_equal(column, minibatch.obs[name].numpy())


@pytest.mark.parametrize("workers", [None, 0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dense": True},
        {"dtype": "float64"},
        {"fetch_transform": _same},
        {"fetch_transform": _same, "dense": True},
    ],
)
def test_cells_hold_what_tensors_do(plates, workers, options):
    in_numpy, in_torch = (
        _dataset(plates, as_torch=as_torch, **options) for as_torch in (False, True)
    )
    if workers is not None:
        in_numpy, in_torch = (each.loader(workers) for each in (in_numpy, in_torch))
    for cells, minibatch in zip(in_numpy, in_torch, strict=True):
        assert sp.issparse(cells.X) is not options.get("dense", False)
        assert_same(cells, minibatch)


@pytest.mark.parametrize("workers", [0, 2])
def test_they_go_on_where_they_were_stopped(plates, workers):
    """As tensors too: what a state is of does not depend on it."""
    stopped = _dataset(plates, as_torch=False).loader(workers)
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    state = stopped.state_dict()
    rest = [_dataset(plates, as_torch=as_torch).loader(workers) for as_torch in (False, True)]
    for loader in rest:
        loader.load_state_dict(state)
    for expected, cells, minibatch in zip(iterator, *rest, strict=True):
        assert np.array_equal(expected.rows, cells.rows)
        assert_same(cells, minibatch)


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_come_as_they_are(workers):
    dataset = CellDataset(np.arange(64), Streaming(), 8, 2, as_torch=False)
    several = InterleavedDatasets([dataset])
    for loader in (dataset.loader(workers), several.loader(workers)):
        minibatches = list(loader)
        assert all(type(each) is np.ndarray for each in minibatches)
        assert sorted(np.concatenate(minibatches).tolist()) == list(range(64))


def test_values_that_torch_does_not_have(tmp_path):
    values = np.arange(40, dtype=np.longdouble).reshape(8, 5)
    ad.AnnData(values).write_h5ad(tmp_path / "long.h5ad")
    collection = open_collection(tmp_path / "long.h5ad")
    dataset = CellDataset(collection, Streaming(), 4, 2, as_torch=False)
    assert np.array_equal(np.concatenate([cells.X for cells in dataset]), values)
