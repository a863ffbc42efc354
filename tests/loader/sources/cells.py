"""Cells of many kinds, and what every storage of them is asked for."""

import sys

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense
from tests.loader.read_options import parameters_of

from cellfeed import (
    BlockShuffling,
    CategoricalColumn,
    CellDataset,
    FormatError,
    open_collection,
)

N_CELLS, N_GENES = 300, 40
ELEMENTS = ["X", "layers/counts", "raw/X", "obsm/X_pca"]
OBS = ["plate", "donor", "n_counts", "dosage", "is_control"]


def make_adata(seed=0):
    random = np.random.default_rng(seed)
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


def labels_of(collection, name, values=None):
    """Return the values of cells; all labels of a categorical column if no codes are given."""
    column = collection.obs[name]
    if isinstance(column, CategoricalColumn):
        return column.decode(column.codes if values is None else values).tolist()
    return values.tolist()


def epoch_of(collection, **options):
    options = {"batch_size": 16, "fetch_factor": 3, "seed": 1, "as_torch": False, **options}
    return CellDataset(collection, BlockShuffling(4), **parameters_of(options))


def assert_same_epochs(both, elements=ELEMENTS, obs=OBS, **options):
    """Assert that an epoch of two collections is the same, minibatch by minibatch."""
    assert list(both[0].elements) == list(both[1].elements) == elements
    for name in elements:
        names = [each.elements[name].column_names.tolist() for each in both]
        assert names[0] == names[1]
    epochs = [epoch_of(each, **options) for each in both]
    n = 0
    for some, others in zip(*epochs, strict=True):
        assert some.rows.tolist() == others.rows.tolist()
        for name in elements:
            assert np.array_equal(dense(some[name]), dense(others[name]))
            if sp.issparse(some[name]) and sp.issparse(others[name]):
                for part in ("data", "indices", "indptr"):
                    parts = [getattr(each[name], part) for each in (some, others)]
                    np.testing.assert_array_equal(*parts)
        for name in obs:
            pair = zip(both, (some, others), strict=True)
            labels = [labels_of(each, name, cells.obs[name]) for each, cells in pair]
            assert str(labels[0]) == str(labels[1])  # NaN equals NaN
        n += len(some.rows)
    assert n == N_CELLS


def assert_selected(collection, adata, rows):
    """Assert that a collection has these rows and no others, in any order that is asked for."""
    assert 0 < len(collection) == rows.size < N_CELLS
    order = np.random.default_rng(0).permutation(rows.size)
    cells = collection[order]
    assert np.array_equal(cells.X.toarray(), adata.X[rows[order]].toarray())
    assert np.array_equal(cells["layers/counts"].toarray(), 2 * adata.X[rows[order]].toarray())
    assert np.array_equal(dense(cells["obsm/X_pca"]), adata.obsm["X_pca"][rows[order]])
    donors = labels_of(collection, "donor", cells.obs["donor"])
    assert donors == adata.obs["donor"].iloc[rows[order]].tolist()


def said_without(package, path, patch):
    """Return what is said of a path where a package is not installed."""
    patch.setitem(sys.modules, package, None)
    with pytest.raises(FormatError) as raised:
        open_collection(path)
    return str(raised.value)
