"""Layers that share their column indices with X: decoded once, delivered for each."""

import pickle
import shutil
from functools import partial
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.transforms import Log1p

N_CELLS, GENES = 240, [f"g{number}" for number in range(60)]
ELEMENTS = ["X", "layers/log", "layers/twice"]


@pytest.fixture(scope="module", params=[True, False], ids=["sorted", "unsorted"])
def adata(request):
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(rng.poisson(0.5, (N_CELLS, len(GENES))).astype(np.float32))
    if not request.param:  # columns of each row in descending order
        rows = np.repeat(np.arange(N_CELLS), np.diff(X.indptr))
        order = np.lexsort((-X.indices, rows))
        X = sp.csr_matrix((X.data[order], X.indices[order], X.indptr), X.shape)
    log, twice = X.copy(), X.copy()
    log.data, twice.data = np.log1p(X.data), X.data * 2
    obs = pd.DataFrame(index=[f"c{number}" for number in range(N_CELLS)])
    layers = {"log": log, "twice": twice}
    return ad.AnnData(X, obs, pd.DataFrame(index=GENES), layers=layers)


@pytest.fixture(scope="module")
def separate(adata, new_folder):
    """As anndata writes it: each matrix has its own column indices."""
    path = new_folder() / "separate.h5ad"
    adata.write_h5ad(path, compression="gzip")
    return path


@pytest.fixture(scope="module")
def linked(separate, new_folder):
    """The same, with one hard and one soft link to the arrays of X."""
    path = Path(shutil.copy(separate, new_folder() / "linked.h5ad"))
    with h5py.File(path, "a") as file:
        for name in ("indices", "indptr"):
            del file[f"layers/log/{name}"], file[f"layers/twice/{name}"]
            file[f"layers/log/{name}"] = file[f"X/{name}"]
            file[f"layers/twice/{name}"] = h5py.SoftLink(f"/X/{name}")
    return path


@pytest.fixture(scope="module")
def store(separate, new_folder):
    out = new_folder() / "store.zarr"
    preshuffle = pytest.importorskip("cellfeed.preshuffling").preshuffle
    preshuffle(separate, out, elements=ELEMENTS, cells_per_chunk=8, in_order=True)
    return out


def n_chunks(path, adata, elements, **options) -> int:
    """Return how many chunks an epoch decodes, whose minibatches are those of ``adata``."""
    genes = options.pop("genes", None)
    columns = [GENES.index(name) for name in genes or GENES]
    collection = open_collection(path, elements=elements, genes=genes)
    dataset = CellDataset(collection, BlockShuffling(4), 16, fetch_factor=4, seed=0, **options)
    n_cells = 0
    for minibatch in dataset:
        rows, n_cells = np.asarray(minibatch.rows), n_cells + len(minibatch.rows)
        for name in elements:
            stored = adata.X if name == "X" else adata.layers[name.removeprefix("layers/")]
            truth = stored[rows].toarray()[:, columns]
            if name in options.get("transform", {}):
                truth = np.log1p(truth)
            np.testing.assert_allclose(dense(minibatch[name]), truth, rtol=1e-6)
    assert n_cells == N_CELLS
    return dataset.statistics().n_chunks


@pytest.mark.parametrize("genes", [None, ["g3", "g1", "g50"], GENES[::-1]])
@pytest.mark.parametrize("name", ["linked", "store"])
def test_indices_are_decoded_once(request, adata, name, genes):
    path = request.getfixturevalue(name)
    count = partial(n_chunks, path, adata, genes=genes)
    alone, two, three = (count(ELEMENTS[:n]) for n in (1, 2, 3))
    of_values = count(["layers/log", "layers/twice"]) - alone  # both arrays, and values again
    assert two - alone == three - two == of_values
    assert 2 * of_values <= alone  # X has at least as many chunks of column indices


def test_separate_indices_are_decoded_for_each(separate, adata):
    count = partial(n_chunks, separate, adata)
    assert count(ELEMENTS) == 3 * count(["X"])


@pytest.mark.parametrize("name", ["linked", "store"])
def test_values_are_transformed_for_each(request, adata, name):
    path = request.getfixturevalue(name)
    transforms = {"layers/twice": [Log1p()]}
    n_chunks(path, adata, ELEMENTS, transform=transforms)


def test_links_of_row_pointers_only_are_not_taken_for_all(separate, adata, tmp_path):
    path = Path(shutil.copy(separate, tmp_path / "pointers.h5ad"))
    with h5py.File(path, "a") as file:
        del file["layers/log/indptr"]
        file["layers/log/indptr"] = file["X/indptr"]
    count = partial(n_chunks, path, adata)
    assert count(ELEMENTS[:2]) == 2 * count(["X"])


def test_a_copy_without_links_is_decoded_for_each(store, adata, tmp_path):
    copied = Path(shutil.copytree(store, tmp_path / "copy.zarr"))
    count = partial(n_chunks, copied, adata)
    assert count(ELEMENTS[:2]) == 2 * count(["X"])


@pytest.mark.parametrize("name", ["linked", "store"])
def test_pickled(request, adata, name):
    collection = open_collection(request.getfixturevalue(name), elements=ELEMENTS)
    cells = pickle.loads(pickle.dumps(collection))[[5, 3, 239]]
    for element in ELEMENTS[1:]:
        truth = adata.layers[element.removeprefix("layers/")][[5, 3, 239]]
        np.testing.assert_array_equal(cells[element].toarray(), truth.toarray())
