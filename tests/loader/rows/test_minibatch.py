import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Minibatch,
    ParameterError,
    RaggedTensor,
    Streaming,
    open_collection,
)


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


PICKLED = {
    "sparse": (sp.csr_matrix, "float32"),
    "sparse, wide": (sp.csr_matrix, "float64"),
    "sparse, narrow": (sp.csr_matrix, "uint16"),
    "sparse, of booleans": (sp.csr_matrix, "bool"),
    "dense": (np.asarray, "float32"),
    "dense, narrow": (np.asarray, "uint8"),
    "dense, half precision": (np.asarray, "float16"),
}


@pytest.mark.parametrize(("kind", "dtype"), PICKLED.values(), ids=PICKLED)
@pytest.mark.parametrize("shape", [(5, 4), (3, 0)], ids=["", "no genes"])
@pytest.mark.parametrize("density", [0, 1])
def test_a_pickle_is_the_same(write_h5ad, kind, dtype, shape, density):
    """As it must be to come from a worker process."""
    X = kind(density * np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)).astype(dtype)
    obs = {"label": ["a", "b", "a", "b", "b"][: shape[0]], "number": np.arange(shape[0]) / 2}
    collection = open_collection(write_h5ad(X, obs), obs=["label", "number"])
    minibatch = first_minibatch(collection)
    copy = pickle.loads(pickle.dumps(minibatch))
    assert copy.X.layout == minibatch.X.layout
    assert copy.X.shape == minibatch.X.shape == shape
    for part in parts_of(minibatch):
        assert parts_of(copy)[part].dtype == parts_of(minibatch)[part].dtype
        assert parts_of(copy)[part].tolist() == parts_of(minibatch)[part].tolist()


def parts_of(minibatch: Minibatch) -> dict[str, torch.Tensor]:
    X = minibatch.X
    matrix = {"X": X}
    if X.layout == torch.sparse_csr:
        matrix = {"crow": X.crow_indices(), "col": X.col_indices(), "values": X.values()}
    return {**matrix, "rows": minibatch.rows, **minibatch.obs}


@pytest.mark.parametrize("n_cells", [0, 1, 4])
def test_a_pickle_of_a_part_of_a_tensor_is_the_same(n_cells):
    """A callback may hand on views that are not contiguous."""
    X, rows = torch.arange(24.0).reshape(4, 6)[:n_cells, 1::2], torch.arange(8)[: 2 * n_cells]
    minibatch = Minibatch({"X": X}, {"label": rows[1::2]}, rows[::2])
    copy = pickle.loads(pickle.dumps(minibatch))
    assert copy.X.tolist() == X.tolist()
    assert copy.obs["label"].tolist() == [1, 3, 5, 7][:n_cells]
    assert copy.rows.tolist() == [0, 2, 4, 6][:n_cells]


def test_it_says_what_it_has(collection):
    minibatch = first_minibatch(collection)
    shown = "(40 cells, X (csr float32, 40 x 11), obs=['plate', 'number'])"
    assert repr(minibatch) == f"Minibatch{shown}"
    assert repr(first_minibatch(collection, as_torch=False)) == f"Cells{shown}"
    assert repr(minibatch.to("cpu", dense=True)) == f"Minibatch{shown.replace('csr', 'dense')}"
    elsewhere = repr(minibatch.to("meta", dense=True))
    assert elsewhere == f"Minibatch{shown.replace('csr', 'dense').replace('11', '11, meta')}"
    offsets, values = torch.tensor([0, 2, 1_500]), torch.zeros(1_500, dtype=torch.int32)
    of_tokens = Minibatch({"X": RaggedTensor(offsets, values)}, {}, torch.arange(2))
    both = replace(of_tokens, controls=minibatch)
    assert repr(of_tokens) == "Minibatch(2 cells, X (ragged int32, 2), obs=[])"
    assert (
        repr(both) == f"Minibatch(2 cells, X (ragged int32, 2), obs=[], controls=Minibatch{shown})"
    )


def test_selecting_cells_selects_from_all_parts(collection):
    cells = collection[10:60]
    some = cells[np.array([45, 0, 45])]
    assert some.rows.tolist() == some.obs["number"].tolist() == [55, 10, 55]
    assert some.obs["plate"].tolist() == [1, 0, 1]
    assert np.array_equal(some.X.toarray(), cells.X.toarray()[[45, 0, 45]])


def test_columns_ascend_as_torch_wants_them(write_h5ad):
    """Files may hold the columns of a row in any order, and one twice."""

    def disorder(file) -> None:
        X = file["X"]
        X["indices"][:] = np.array([3, 0, 2, 1, 1, 0], dtype=X["indices"].dtype)

    stored = sp.csr_matrix(np.array([[1, 2, 3, 0], [4, 5, 6, 0]], dtype=np.float32))
    minibatch = first_minibatch(open_collection(write_h5ad(stored, edit=disorder)))
    X = minibatch.X
    torch.sparse_csr_tensor(
        X.crow_indices(), X.col_indices(), X.values(), size=X.shape, check_invariants=True
    )
    assert X.to_dense().tolist() == [[2, 0, 3, 1], [6, 9, 0, 0]]


@pytest.mark.parametrize("dense", [False, True])
def test_it_moves_as_a_whole(collection, in_memory, plates, dense):
    minibatch = first_minibatch(collection)
    there = minibatch.to("cpu", dense=dense)
    assert there.X.layout == (torch.strided if dense else torch.sparse_csr)
    X = there.X if dense else there.X.to_dense()
    assert np.array_equal(X.numpy(), in_memory(plates)[:40])
    assert there.rows.tolist() == minibatch.rows.tolist()
    assert there.obs.keys() == minibatch.obs.keys()
    on_meta = minibatch.to("meta")
    tensors = (on_meta.X.values(), on_meta.rows, *on_meta.obs.values())
    assert all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("many_bytes", [None, 1, 161])
@pytest.mark.parametrize("dense", [False, True])
def test_each_part_is_pinned(collection, dense, many_bytes, monkeypatch):
    """What a DataLoader with ``pin_memory`` asks for, also where no device can pin."""
    pinned = []
    if many_bytes is not None:
        monkeypatch.setattr("cellfeed._rows._minibatch._MANY_BYTES", many_bytes)

    def on_device(tensor, *, pin_memory):
        assert pin_memory
        pinned.append(torch.zeros_like(tensor))
        return pinned[-1]

    minibatch = first_minibatch(collection, dense=dense)
    monkeypatch.setattr(torch, "empty_like", on_device)
    same = minibatch.pin_memory()
    assert len(pinned) == (1 if dense else 3) + len(minibatch.obs) + 1
    assert same.rows is not minibatch.rows
    assert torch.equal(same.rows, minibatch.rows)
    for name, each in minibatch.obs.items():
        assert torch.equal(same.obs[name], each)
    dense_of = (lambda X: X) if dense else torch.Tensor.to_dense
    assert torch.equal(dense_of(same.X), dense_of(minibatch.X))
    assert same.X.layout == minibatch.X.layout


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", torch.float32, np.uint8])
@pytest.mark.parametrize("dense", [False, True])
def test_x_has_the_dtype_asked_for(collection, in_memory, plates, dtype, dense):
    X = first_minibatch(collection, dense=dense, dtype=dtype).X
    expected = in_memory(plates)[:40]
    values = X if dense else X.values()
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    assert values.numpy().dtype == np.dtype(name)
    got = X.numpy() if dense else X.to_dense().numpy()
    assert np.array_equal(got, expected.astype(name))


@pytest.mark.parametrize("dtype", ["str", object, "no such", torch.complex64, ">f4", "longdouble"])
def test_a_dtype_that_is_no_number_is_refused(collection, dtype):
    with pytest.raises(ParameterError, match="`dtype` must be a numeric dtype"):
        first_minibatch(collection, dtype=dtype)


def test_what_is_kept_does_not_change(collection, in_memory, plates):
    """Memory is used again, but never under a tensor that somebody still has."""
    expected = in_memory(plates)
    dataset = CellDataset(collection, BlockShuffling(block_size=3), 8, fetch_factor=2, seed=0)
    kept = [minibatch for _ in range(3) for minibatch in dataset]
    for minibatch in kept:
        assert np.array_equal(minibatch.X.to_dense().numpy(), expected[minibatch.rows])
