import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from cellfeed import (
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


def test_x_in_tensors(collection, in_memory, plates):
    """What else a minibatch holds is compared with NumPy by the suite for sources."""
    minibatch = first_minibatch(collection)
    assert minibatch.X.layout == torch.sparse_csr
    assert minibatch.X.crow_indices().dtype == minibatch.X.col_indices().dtype == torch.int32
    assert minibatch.obs["plate"].dtype == torch.int64
    assert minibatch.obs["number"].dtype == torch.float64
    assert minibatch.obs["number"].tolist() == minibatch.rows.tolist() == list(range(40))
    assert len(minibatch) == 40
    X = first_minibatch(collection, dense=True).X
    assert X.layout == torch.strided
    assert np.array_equal(X.numpy(), in_memory(plates)[:40])


def test_torch_can_multiply_it(collection, in_memory, plates):
    weights = torch.rand(11, 3, generator=torch.Generator().manual_seed(0))
    product = first_minibatch(collection).X @ weights
    expected = torch.from_numpy(in_memory(plates)[:40]) @ weights
    np.testing.assert_allclose(product, expected, rtol=1e-5)


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
    X = torch.empty((40, 11), device="meta")  # `to` would import much of PyTorch
    elsewhere = repr(replace(minibatch, elements={"X": X}))
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
        monkeypatch.setattr("cellfeed.rows._minibatch._MANY_BYTES", many_bytes)

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


@pytest.mark.parametrize("dtype", ["float64", np.float64, torch.float64])
def test_a_dtype_may_be_of_torch_or_numpy(collection, in_memory, plates, dtype):
    X = first_minibatch(collection, dense=True, dtype=dtype).X
    assert X.dtype == torch.float64
    assert np.array_equal(X.numpy(), in_memory(plates)[:40])


@pytest.mark.parametrize("dtype", ["str", object, "no such", torch.complex64, ">f4", "longdouble"])
def test_a_dtype_that_is_no_number_is_refused(collection, dtype):
    with pytest.raises(ParameterError, match="`dtype` must be a numeric dtype"):
        first_minibatch(collection, dtype=dtype)
