import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from cellfeed import CellDataset, Streaming, open_collection


@pytest.fixture
def collection(plates):
    return open_collection(plates, obs=["plate", "number"])


def first_minibatch(collection, **options):
    return next(iter(CellDataset(collection, Streaming(), 40, seed=0, **options)))


def test_x_is_sparse_where_it_is_stored_sparse(collection, in_memory, plates):
    X = first_minibatch(collection).X
    assert X.layout == torch.sparse_csr
    assert X.crow_indices().dtype == X.col_indices().dtype == torch.int32
    assert X.dtype == torch.float32
    assert np.array_equal(X.to_dense().numpy(), in_memory(plates)[:40])


def test_x_is_dense_where_asked_or_stored_so(collection, write_h5ad, in_memory, plates):
    expected = in_memory(plates)[:40]
    stored_dense = open_collection(write_h5ad(expected))
    for X in (first_minibatch(collection, dense=True).X, first_minibatch(stored_dense).X):
        assert X.layout == torch.strided
        assert np.array_equal(X.numpy(), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float64", "bool"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_x_keeps_its_dtype(write_h5ad, dtype, dense):
    X = np.eye(5, 4).astype(dtype)
    minibatch = first_minibatch(open_collection(write_h5ad(sp.csr_matrix(X))), dense=dense)
    values = minibatch.X if dense else minibatch.X.values()
    assert values.numpy().dtype == dtype
    assert np.count_nonzero(values.numpy()) == 4


def test_torch_can_multiply_it(collection, in_memory, plates):
    weights = torch.rand(11, 3, generator=torch.Generator().manual_seed(0))
    product = first_minibatch(collection).X @ weights
    expected = torch.from_numpy(in_memory(plates)[:40]) @ weights
    torch.testing.assert_close(product, expected)


def test_obs_are_codes_and_numbers(collection):
    minibatch = first_minibatch(collection)
    assert minibatch.obs["plate"].dtype == torch.int64
    assert minibatch.obs["plate"].tolist() == [0] * 37 + [1] * 3
    assert minibatch.obs["number"].dtype == torch.float64
    assert minibatch.obs["number"].tolist() == minibatch.rows.tolist() == list(range(40))
    assert len(minibatch) == 40


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_pickle_is_the_same(collection, dense):
    minibatch = first_minibatch(collection, dense=dense)
    copy = pickle.loads(pickle.dumps(minibatch))
    assert copy.X.layout == minibatch.X.layout
    assert torch.equal(copy.X.to_dense(), minibatch.X.to_dense())
    assert copy.rows.tolist() == minibatch.rows.tolist()
    assert {name: t.tolist() for name, t in copy.obs.items()} == {
        name: t.tolist() for name, t in minibatch.obs.items()
    }


def test_selecting_cells_selects_from_all_parts(collection):
    cells = collection[10:60]
    some = cells[np.array([45, 0, 45])]
    assert some.rows.tolist() == some.obs["number"].tolist() == [55, 10, 55]
    assert some.obs["plate"].tolist() == [1, 0, 1]
    assert np.array_equal(some.X.toarray(), cells.X.toarray()[[45, 0, 45]])
