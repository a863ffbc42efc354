"""The dictionary that STATE reads, against what cell-load documents for its batches."""

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

pytest.importorskip("torch")

import torch

from cellfeed import (
    CellDataset,
    ColumnError,
    GroupedSampling,
    MatchedControls,
    ParameterError,
    open_collection,
)
from cellfeed.frameworks.state import StateBatch

N, N_GENES, SET = 240, 20, 4
COLUMNS: dict[str, Any] = {"perturbation": "gene", "cell_type": "cell_type", "batch": "gem_group"}


@pytest.fixture(scope="module")
def adata():
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "gene": rng.choice(["non-targeting", "TP53", "AARS"], N),
            "cell_type": rng.choice(["k562", "jurkat"], N),
            "gem_group": rng.integers(1, 4, N).astype(str),
        },
        index=[f"cell {k}" for k in range(N)],
    ).astype("category")
    X = sp.csr_matrix(rng.poisson(1.0, (N, N_GENES)).astype(np.float32))
    hvg = rng.random((N, 5)).astype(np.float32)
    return ad.AnnData(
        X, obs, pd.DataFrame(index=[f"g{k}" for k in range(N_GENES)]), obsm={"X_hvg": hvg}
    )


@pytest.fixture(scope="module")
def collection(adata, tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "cells.h5ad"
    adata.write_h5ad(path)
    return open_collection(path, obs=[*COLUMNS.values()], elements=["obsm/X_hvg", "X"])


def dataset_of(collection, transform, *, k=1, **options):
    sets = GroupedSampling(("gene", "cell_type"), SET)
    strategy = MatchedControls(sets, "gene", "non-targeting", ["cell_type"], k=k)
    return CellDataset(
        collection, strategy, 3 * SET, 4, seed=0, batch_transform=transform, **options
    )


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_keys_shapes_and_values(adata, collection, num_workers):
    transform = StateBatch(collection, **COLUMNS, counts="X")
    plain = list(dataset_of(collection, None).loader(num_workers))
    made = list(dataset_of(collection, transform).loader(num_workers))
    assert len(made) == len(plain) > 3
    hvg, X, obs = adata.obsm["X_hvg"], adata.X.toarray(), adata.obs
    for batch, minibatch in zip(made, plain, strict=True):
        rows, controls = minibatch.rows.numpy(), minibatch.controls.rows.numpy()
        assert [*batch] == [
            *("pert_cell_emb", "ctrl_cell_emb", "pert_emb", "pert_name", "cell_type"),
            *("cell_type_onehot", "batch", "batch_name", "pert_cell_counts", "ctrl_cell_counts"),
        ]
        for name, of, which in (
            ("pert_cell_emb", hvg, rows),
            ("ctrl_cell_emb", hvg, controls),
            ("pert_cell_counts", X, rows),
            ("ctrl_cell_counts", X, controls),
        ):
            assert batch[name].dtype == torch.float32
            assert np.array_equal(batch[name].numpy(), of[which])
        for names, vectors, column in (
            ("pert_name", "pert_emb", "gene"),
            ("cell_type", "cell_type_onehot", "cell_type"),
            ("batch_name", "batch", "gem_group"),
        ):
            found = obs[column].iloc[rows].tolist()
            assert batch[names] == found
            ordered = sorted(set(obs[column]))
            expected = np.eye(len(ordered), dtype=np.float32)[
                [ordered.index(each) for each in found]
            ]
            assert np.array_equal(batch[vectors].numpy(), expected)
        # Sets of one perturbation and cell type, as STATE's sentences.
        sets = np.array(batch["pert_name"]).reshape(-1, SET)
        assert (sets == sets[:, :1]).all()
        assert "non-targeting" not in sets
        assert set(obs["gene"].iloc[controls]) == {"non-targeting"}
        assert (obs["cell_type"].iloc[controls].to_numpy() == batch["cell_type"]).all()


def test_features_in_place_of_one_hot_vectors(collection):
    features = {"non-targeting": [0.0, 0.0], "TP53": [1.0, 2.0], "AARS": [3.0, 4.0]}
    transform = StateBatch(collection, **COLUMNS, features=features)
    batch = next(iter(dataset_of(collection, transform)))
    assert batch["pert_emb"].tolist() == [features[name] for name in batch["pert_name"]]
    with pytest.raises(ParameterError, match="`features` lack 2 perturbations, such as 'AARS'"):
        StateBatch(collection, **COLUMNS, features={"TP53": [1.0]})


def test_refused(collection):
    with pytest.raises(ParameterError, match=r"no element 'obsm/X_pca'.*open it with"):
        StateBatch(collection, **COLUMNS, embedding="obsm/X_pca")
    with pytest.raises(ColumnError, match="no obs column 'plate'; open it with"):
        StateBatch(collection, **COLUMNS | {"batch": "plate"})
    transform = StateBatch(collection, **COLUMNS)
    with pytest.raises(ParameterError, match="has 24 for 12 cells; use MatchedControls"):
        next(iter(dataset_of(collection, transform, k=2)))
