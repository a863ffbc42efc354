"""Minibatches carry the names of their cells, whoever reads them, and from any storage."""

import pickle
import warnings

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.storages.somas import write_experiment
from tests.servers.web import WebServer

from cellfeed import BlockShuffling, CellDataset, ParameterError, open_collection

N_CELLS = 60
NAMES = np.array([f"cell {k:03}" for k in range(N_CELLS)], object)
COUNTS = np.random.default_rng(0).poisson(0.5, (N_CELLS, 9)).astype(np.float32)


def cells():
    obs = pd.DataFrame({"plate": pd.Categorical(["a", "b"] * (N_CELLS // 2))}, index=NAMES)
    return anndata.AnnData(sp.csr_matrix(COUNTS), obs=obs)


def h5ad(folder):
    cells().write_h5ad(folder / "cells.h5ad", compression="gzip")
    return folder / "cells.h5ad", NAMES


def zarr(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that version 3 will be the default
        cells().write_zarr(folder / "cells.zarr")
    return folder / "cells.zarr", NAMES


def in_memory(_):
    return cells(), NAMES


def soma(folder):
    pytest.importorskip("tiledbsoma")
    write_experiment(folder / "cells.soma", cells())
    return folder / "cells.soma", NAMES


def huggingface(_):
    datasets = pytest.importorskip("datasets")
    rows = [np.flatnonzero(row) for row in COUNTS]
    table = {
        "genes": rows,
        "expressions": [row[own] for row, own in zip(COUNTS, rows, strict=True)],
    }
    numbers = np.arange(N_CELLS).astype(str).astype(object)  # it has no names of cells
    return datasets.Dataset.from_dict(table), numbers


def dataset_of(where, **options):
    collection = open_collection(where, obs_names=True)
    settings = {"batch_size": 7, "fetch_factor": 2, "seed": 3, **options}
    return CellDataset(collection, BlockShuffling(4), **settings)


def check(minibatches, names):
    seen = []
    for each in minibatches:
        rows = np.asarray(each.rows)
        assert each.obs_names.dtype == object
        assert each.obs_names.tolist() == names[rows].tolist()
        assert all(type(name) is str for name in each.obs_names)
        seen += rows.tolist()
    assert sorted(seen) == list(range(N_CELLS))


@pytest.mark.parametrize("written", [h5ad, zarr, in_memory, soma, huggingface])
def test_of_any_storage(tmp_path, written):
    where, names = written(tmp_path)
    check(dataset_of(where), names)


def test_of_several_files_and_in_any_order(tmp_path):
    where, _ = h5ad(tmp_path)
    collection = open_collection([where, in_memory(None)[0]], obs_names=True)
    rows = np.random.default_rng(1).integers(0, 2 * N_CELLS, 50)
    expected = np.tile(NAMES, 2)
    for some in (rows, rows[:0]):
        names = collection[some].obs_names
        assert names is not None
        assert names.tolist() == expected[some].tolist()


@pytest.mark.parametrize("as_torch", [True, False])
def test_from_workers(tmp_path, as_torch):
    where, names = h5ad(tmp_path)
    check(dataset_of(where, as_torch=as_torch).loader(num_workers=2), names)


@pytest.mark.parametrize(
    "options",
    [
        {"dense": True},
        {"prefetch": 3},
        {"as_torch": False},
        {"fetch_transform": lambda fetched: fetched},
        {"batch_transform": lambda batch: batch},
    ],
    ids=lambda options: next(iter(options)),
)
def test_however_they_are_made(tmp_path, options):
    where, names = h5ad(tmp_path)
    check(dataset_of(where, **options), names)


def test_after_a_stop(tmp_path):
    where, names = h5ad(tmp_path)
    dataset = dataset_of(where)
    minibatches = iter(dataset)
    begun = [next(minibatches) for _ in range(3)]
    resumed = dataset_of(where)
    resumed.load_state_dict(dataset.state_dict())
    check([*begun, *resumed], names)


def test_moved_and_pickled(tmp_path):
    pytest.importorskip("torch")
    where, _ = h5ad(tmp_path)
    minibatch = next(iter(dataset_of(where)))
    for copy in (minibatch.to("cpu", dense=True), pickle.loads(pickle.dumps(minibatch))):
        assert copy.obs_names.tolist() == minibatch.obs_names.tolist()


def test_from_a_server(tmp_path):
    pytest.importorskip("obstore")
    h5ad(tmp_path)
    with WebServer(tmp_path) as server:
        check(dataset_of(f"{server.url}/cells.h5ad"), NAMES)


def test_states_are_the_same_with_and_without(tmp_path):
    where, _ = h5ad(tmp_path)
    plain = CellDataset(
        open_collection(where), BlockShuffling(4), batch_size=7, fetch_factor=2, seed=3
    )
    assert plain.state_dict() == dataset_of(where).state_dict()
    assert next(iter(plain)).obs_names is None


def test_what_is_not_true_or_false(tmp_path):
    where, _ = h5ad(tmp_path)
    with pytest.raises(ParameterError, match=r"`obs_names` must be True or False.*in `obs`$"):
        open_collection(where, obs_names=["plate"])  # type: ignore[arg-type]
