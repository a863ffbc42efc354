"""Cells of many kinds, and whether two collections deliver the same of them."""

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import BlockShuffling, CategoricalColumn, CellDataset

N_CELLS, N_GENES = 300, 40
ELEMENTS = ["X", "layers/counts", "raw/X", "obsm/X_pca"]
SMALL: dict[str, Any] = {
    "block_sizes": [4],
    "fetch_factors": [2],
    "workers": [0],
    "entropy_floor": 0.5,
    "budget": 300,
}
OBS = ["plate", "donor", "n_counts", "dosage", "is_control"]


def make_adata():
    random = np.random.default_rng(0)
    X = sp.csr_matrix(random.poisson(0.3, (N_CELLS, N_GENES)).astype(np.float32))
    plates = pd.Categorical.from_codes(
        random.integers(-1, 3, N_CELLS), pd.Index(["p2", "p1", "p3"])
    )
    obs = pd.DataFrame(
        {
            "plate": plates,
            "donor": [f"donor {k % 7}" for k in range(N_CELLS)],
            "n_counts": np.asarray(X.sum(axis=1)).ravel().astype(np.int64),
            "dosage": np.where(random.random(N_CELLS) < 0.2, np.nan, 0.5),
            "is_control": random.random(N_CELLS) < 0.5,
        },
        index=[f"cell {k}" for k in range(N_CELLS)],
    )
    adata = ad.AnnData(X, obs=obs, var=pd.DataFrame(index=[f"gene {k}" for k in range(N_GENES)]))
    adata.raw = ad.AnnData(X * 3, obs=obs, var=adata.var)
    adata.layers["counts"] = X * 2
    adata.obsm["X_pca"] = random.random((N_CELLS, 3)).astype(np.float32)
    return adata


def labels_of(collection, name, values):
    column = collection.obs[name]
    if isinstance(column, CategoricalColumn):
        return column.decode(values).tolist()
    return values.tolist()


def assert_same_epochs(both):
    """Assert that an epoch of two collections is the same, minibatch by minibatch."""
    assert list(both[0].elements) == list(both[1].elements) == ELEMENTS
    for name in ELEMENTS:
        names = [each.elements[name].column_names.tolist() for each in both]
        assert names[0] == names[1]
    epochs = [
        CellDataset(each, BlockShuffling(4), batch_size=16, fetch_factor=3, seed=1, as_torch=False)
        for each in both
    ]
    n = 0
    for some, others in zip(*epochs, strict=True):
        assert some.rows.tolist() == others.rows.tolist()
        for name in ELEMENTS:
            assert np.array_equal(dense(some[name]), dense(others[name]))
        for name in OBS:
            pair = zip(both, (some, others), strict=True)
            labels = [labels_of(each, name, cells.obs[name]) for each, cells in pair]
            assert str(labels[0]) == str(labels[1])  # NaN equals NaN
        n += len(some.rows)
    assert n == N_CELLS
