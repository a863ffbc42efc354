"""Minibatches on a GPU have the values that they have on the CPU; skipped without CUDA."""

import importlib
import threading
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.matrices import random_csr

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Minibatch,
    ParameterError,
    RaggedTensor,
    open_collection,
)
from cellfeed.transforms import Log1p, NormalizeTotal

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU with CUDA", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
N, N_GENES, BATCH = 400, 60, 20
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def adata():
    rng = np.random.default_rng(0)
    counts = random_csr((N, N_GENES), 0.2, rng, np.float32)
    counts.data = np.ceil(100 * counts.data)
    obs = {"label": np.repeat(["a", "b", "c", "d"], N // 4), "depth": rng.random(N)}
    layers = {each: counts.astype(each) for each in ("float64", "int32", "int64", "int16", "uint8")}
    adata = ad.AnnData(sp.csr_matrix(counts), obs=obs, layers=layers)
    adata.obsm["dense"] = rng.random((N, 7), dtype=np.float32)
    return adata


@pytest.fixture(scope="module")
def collection(adata, tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "cells.h5ad"
    adata.write_h5ad(path, compression="gzip")
    elements = ["X", *(f"layers/{each}" for each in adata.layers if each), "obsm/dense"]
    return open_collection(path, obs=["label", "depth"], elements=elements)


def dataset_of(collection, **options: Any) -> CellDataset:
    return CellDataset(collection, BlockShuffling(8), BATCH, 4, seed=0, **options)


def tensors_of(minibatch: Minibatch) -> list[Any]:
    """All strided tensors: those of sparse elements too."""
    found = [minibatch.rows, *minibatch.obs.values()]
    for each in minibatch.elements.values():
        is_sparse = each.layout == torch.sparse_csr
        parts = (each.crow_indices, each.col_indices, each.values)
        found += [part() for part in parts] if is_sparse else [each]
    return found


def assert_cells_of(adata, minibatch: Minibatch) -> None:
    """A dense minibatch on the GPU has what the AnnData has in its rows."""
    torch.cuda.synchronize()
    assert all(each.device.type == "cuda" for each in tensors_of(minibatch))
    rows = minibatch.rows.cpu().numpy()
    for name, each in minibatch.elements.items():
        kind, _, key = name.partition("/")
        stored: Any = {"layers": adata.layers, "obsm": adata.obsm}[kind][key] if key else adata.X
        rows_of: Any = stored[rows]
        expected = rows_of.toarray() if hasattr(rows_of, "toarray") else rows_of
        found = each.cpu().numpy()
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, expected, err_msg=name)
    np.testing.assert_array_equal(minibatch.obs["depth"].cpu(), adata.obs["depth"].iloc[rows])
    labels = adata.obs["label"].astype("category").cat.codes.iloc[rows]
    np.testing.assert_array_equal(minibatch.obs["label"].cpu(), labels)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("is_dense", [False, True])
def test_an_epoch(adata, collection, num_workers, is_pinned, is_dense):
    loader = dataset_of(collection, dense=is_dense).loader(num_workers, pin_memory=is_pinned)
    seen = list[int]()
    for minibatch in loader:
        assert all(each.is_pinned() is is_pinned for each in tensors_of(minibatch))
        moved = minibatch.to(DEVICE, dense=True, non_blocking=is_pinned)
        assert_cells_of(adata, moved)
        seen += moved.rows.tolist()
    assert sorted(seen) == list(range(N))


def test_sparse_elements_stay_sparse(adata, collection):
    minibatch = next(iter(dataset_of(collection)))
    moved = minibatch.to("cuda")
    assert moved.X.layout == torch.sparse_csr
    weights = torch.rand(N_GENES, 3, device=DEVICE)
    expected = minibatch.X.to_dense() @ weights.cpu()
    torch.testing.assert_close((moved.X @ weights).cpu(), expected)
    assert moved.obs["label"].dtype == torch.int64
    torch.testing.assert_close(moved.to("cpu").X.to_dense(), minibatch.X.to_dense())


@pytest.mark.filterwarnings("ignore:.* is read slowly")
@pytest.mark.parametrize("dtype", [None, "float32", "float16", "uint16"])
@pytest.mark.parametrize("dense", [False, True])
def test_cells_that_stay_on_the_gpu(collection, dense, dtype):
    """Minibatches and states are those from files, bit for bit."""
    before = torch.cuda.memory_allocated()
    loaded = collection.load(device="cuda")
    assert torch.cuda.memory_allocated() - before >= loaded.loaded_bytes
    assert loaded.device == torch.device("cuda", torch.cuda.current_device())
    of_files, of_gpu = (dataset_of(each, dense=dense, dtype=dtype) for each in (collection, loaded))
    for loader in (of_gpu.loader(pin_memory=True), of_gpu):
        for one, other in zip(of_files, loader, strict=True):
            assert all(each.device == loaded.device for each in tensors_of(other))
            pairs = zip(tensors_of(one), tensors_of(other), strict=True)
            for expected, found in pairs:
                assert found.dtype == expected.dtype
                assert np.array_equal(found.cpu().numpy(), expected.numpy())
    assert of_files.state_dict() == of_gpu.state_dict()


@pytest.mark.parametrize("dense", [False, True])
def test_transforms_of_cells_that_stay_on_the_gpu(collection, dense):
    steps = [NormalizeTotal(1e4), Log1p()]
    datasets = [
        dataset_of(each, dense=dense, transform=steps)
        for each in (collection, collection.load(device="cuda"))
    ]
    for one, other in zip(*datasets, strict=True):
        found = other.to("cpu", dense=True).X
        torch.testing.assert_close(found, one.to("cpu", dense=True).X, rtol=2**-23, atol=2**-20)


def test_what_does_not_fit_on_the_gpu_is_refused(collection, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000, 10_000))
    with pytest.raises(ParameterError, match=r"on cuda:\d+, but 1,000 are available there"):
        collection.load(device="cuda")
    with pytest.raises(ParameterError, match="`device` must be one that torch has here"):
        collection.load(device=f"cuda:{torch.cuda.device_count()}")


def test_ragged_rows():
    offsets, values = torch.tensor([0, 2, 2, 5]), torch.arange(5.0)
    minibatch = Minibatch({"X": RaggedTensor(offsets, values)}, {}, torch.arange(3))
    moved = minibatch.pin_memory().to(DEVICE, non_blocking=True)
    assert moved.X.values.device.type == "cuda"
    assert torch.equal(moved.X.padded(-1).cpu(), minibatch.X.padded(-1))


@pytest.mark.parametrize("is_pinned", [False, True])
def test_threads_copy(adata, collection, is_pinned):
    """Ahead of the training loop: as `batch_transform` in `transform_threads`."""

    def copy(minibatch):
        assert threading.current_thread() is not threading.main_thread()
        return minibatch.pin_memory() if is_pinned else minibatch.to(DEVICE, dense=True)

    n = 0
    for minibatch in dataset_of(collection, batch_transform=copy, transform_threads=2).loader():
        here = minibatch.to(DEVICE, dense=True, non_blocking=True) if is_pinned else minibatch
        assert_cells_of(adata, here)
        n += len(here)
    assert n == N


def test_a_stream_copies_ahead(adata, collection):
    copied_in_stream: Any = importlib.import_module("bench.compare.gpu").copied_in_stream

    loader = dataset_of(collection).loader(pin_memory=True)
    expected = [each.rows for each in dataset_of(collection)]
    found = list[Any]()
    for minibatch in copied_in_stream(loader, DEVICE):
        torch.mm(torch.rand(500, 500, device=DEVICE), torch.rand(500, 500, device=DEVICE))
        found.append(minibatch.rows.cpu())
        assert_cells_of(adata, minibatch)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_training_resumes_exactly(collection, num_workers):
    def train(trained, first, stop):
        model, loader = trained
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        seen = list[Any]()
        for step, delivered in enumerate(loader, first):
            if step == stop:
                break
            minibatch = delivered.to(DEVICE, dense=True, non_blocking=True)
            loss = torch.nn.functional.cross_entropy(model(minibatch.X), minibatch.obs["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(minibatch.rows.cpu())
            saved = loader.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        return seen, saved

    def loader_and_model():
        torch.manual_seed(0)
        loader = dataset_of(collection).loader(num_workers, pin_memory=True)
        return torch.nn.Linear(N_GENES, 4).to(DEVICE), loader

    whole, (_, expected) = train(loader_and_model(), 0, None)
    before, (state, weights) = train(loader_and_model(), 0, 7)
    model, loader = loader_and_model()
    model.load_state_dict(weights)
    loader.load_state_dict(state)
    after, (_, found) = train((model, loader), 7, None)
    assert [each.tolist() for each in before + after] == [each.tolist() for each in whole]
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)


@pytest.mark.filterwarnings("ignore")  # Lightning warns of what this model does without
def test_lightning(collection):
    pl: Any = pytest.importorskip("pytorch_lightning")
    from cellfeed.frameworks.lightning import CellDataModule  # noqa: PLC0415 - needs Lightning

    devices = set[str]()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(N_GENES, 4)

        def training_step(self, minibatch, _):
            devices.add(minibatch.X.device.type)
            scores = minibatch.X @ self.linear.weight.T + self.linear.bias
            return torch.nn.functional.cross_entropy(scores, minibatch.obs["label"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    data = CellDataModule(train=dataset_of(collection), pin_memory=True)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), datamodule=data)
    assert devices == {"cuda"}
    assert trainer.global_step == N // BATCH
