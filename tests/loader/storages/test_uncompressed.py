"""HuggingFace datasets, folders of memory maps and AnnData objects, as a training uses them."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.experimental import AnnCollection
from tests.loader.storages.arrow_files import dataset_of, write_dataset
from tests.loader.storages.memory_maps import write_npy, write_scdl

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CategoricalColumn,
    CellDataset,
    HuggingFaceSource,
    MemoryMapSource,
    open_collection,
    preshuffle,
)
from cellfeed_tuner import autotune

N_CELLS, N_GENES = 320, 40
KINDS = ["folder", "dataset", "npy", "scdl", "objects", "backed", "AnnCollection"]


def make_adata():
    random = np.random.default_rng(0)
    X = sp.csr_matrix(random.poisson(0.3, (N_CELLS, N_GENES)).astype(np.float32))
    obs = pd.DataFrame(
        {"plate": pd.Categorical([f"plate {k // 40}" for k in range(N_CELLS)])},
        index=[f"cell {k}" for k in range(N_CELLS)],
    )
    var = pd.DataFrame(index=[f"gene {k}" for k in range(N_GENES)])
    return ad.AnnData(X, obs=obs, var=var)


@pytest.fixture(scope="module")
def adata():
    return make_adata()


@pytest.fixture(scope="module")
def open_kind(adata, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uncompressed")
    names = adata.var_names
    adata.write_h5ad(folder / "cells.h5ad")

    def write(kind):
        X, obs, where = adata.X, adata.obs, folder / kind
        if kind == "folder":
            if not where.exists():
                write_dataset(where, X, obs, num_shards=3)
            return HuggingFaceSource(where, var_names=names)
        if kind == "dataset":
            return HuggingFaceSource(dataset_of(X, obs), n_vars=N_GENES, var_names=names)
        if kind == "npy":
            return MemoryMapSource(write_npy(where, X), obs=obs, var=adata.var)
        if kind == "scdl":
            if not where.exists():
                write_scdl(where, X, obs, adata.var)
            return where
        if kind == "backed":
            return ad.read_h5ad(folder / "cells.h5ad", backed="r")
        halves = [adata[: N_CELLS // 2].copy(), adata[N_CELLS // 2 :].copy()]
        return halves if kind == "objects" else AnnCollection(halves)

    def open_kind(kind):
        return open_collection(write(kind), obs=["plate"])

    return open_kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_minibatches_as_from_the_file(open_kind, adata, kind):
    collection = open_kind(kind)
    assert collection.slow_reading() is None
    assert collection.var_names.tolist() == adata.var_names.tolist()
    dataset = CellDataset(
        collection, BlockShuffling(8), batch_size=16, fetch_factor=4, seed=0, as_torch=False
    )
    seen = []
    for minibatch in dataset:
        rows = minibatch.rows
        assert np.array_equal(minibatch.X.toarray(), adata.X[rows].toarray())
        plates = collection.obs["plate"].decode(minibatch.obs["plate"]).tolist()
        assert plates == adata.obs["plate"].iloc[rows].tolist()
        seen += rows.tolist()
    assert sorted(seen) == list(range(N_CELLS))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_resume(open_kind, kind):
    collection = open_kind(kind)
    labels = collection.obs["plate"].codes
    weights = np.where(labels == labels.max(), 1.0, 0.0)
    strategy = BlockWeightedSampling(4, weights=weights, total_size=100)

    def dataset():
        return CellDataset(collection, strategy, batch_size=10, fetch_factor=2, seed=3)

    whole = [minibatch.rows.tolist() for minibatch in dataset()]
    assert set(labels[np.concatenate(whole)]) == {labels.max()}
    first, second = dataset(), dataset()
    taken = [next(each).rows.tolist() for each in [iter(first)] for _ in range(3)]
    second.load_state_dict(first.state_dict())
    assert taken + [minibatch.rows.tolist() for minibatch in second] == whole


@pytest.mark.usefixtures("short_replicates")
@pytest.mark.parametrize("kind", ["folder", "npy", "scdl", "objects"])
def test_autotune(open_kind, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
    result = autotune(
        open_kind(kind), label="plate", batch_size=16, block_sizes=[4], fetch_factors=[2],
        workers=[0], entropy_floor=0.5, budget=600,
    )  # fmt: skip
    assert result.loader_fault is None
    assert result.recommended is not None


@pytest.mark.parametrize("kind", ["folder", "scdl"])
def test_preshuffle(open_kind, adata, kind, tmp_path):
    (source,) = open_kind(kind).sources
    preshuffle(source.location, tmp_path / "shuffled.zarr", seed=0)
    shuffled = open_collection(tmp_path / "shuffled.zarr", obs=["source_row", "plate"])
    rows = np.asarray(shuffled.obs["source_row"].values)
    assert np.array_equal(np.sort(rows), np.arange(N_CELLS))
    assert np.array_equal(shuffled[:].X.toarray(), adata.X[rows].toarray())
    plates = shuffled.obs["plate"]
    assert isinstance(plates, CategoricalColumn)
    assert plates.decode(plates.codes).tolist() == adata.obs["plate"].iloc[rows].tolist()
