"""`Collection.load(device=...)`: minibatches are those from files, on a device; here, the CPU."""

import copy
import json
import pickle
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.collection.stored import collections_of, write_files
from tests.loader.collection.test_load import (
    Ragged,
    RaggedAndImages,
    bits,
    memory_files,
    strategies,
)
from tests.loader.dataset.torchrun import torchrun
from tests.loader.sampling.epochs import WithNext

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed.collection import _loaded
from cellfeed.transforms import Log1p, NormalizeTotal

pytestmark = [
    pytest.mark.skipif(not _loaded.can_lend(), reason="the system has no such memory"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* is read slowly"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory, replace):
    return write_files(tmp_path_factory.mktemp("files"), replace, are_distinct=True)


@pytest.mark.slow
@pytest.mark.parametrize("join", ["same", "inner", "outer", "genes"])
@settings(max_examples=max(1, settings().max_examples // 4))
@given(data=st.data())
def test_minibatches_and_states_are_those_of_files(files, join, data):
    collection = data.draw(collections_of(files, join))
    on_device = collection.load(device="cpu")
    options = {
        "strategy": data.draw(strategies(len(collection), data.draw(st.integers(0, 9)))),
        "batch_size": data.draw(st.integers(1, 9)),
        "fetch_factor": data.draw(st.integers(1, 3)),
        "dtype": data.draw(st.sampled_from([None, "float32", "float64", "float16", "int32"])),
        "dense": data.draw(st.booleans()),
        "seed": 0,
    }
    datasets = [CellDataset(each, **options) for each in (collection, on_device)]
    n_begun = data.draw(st.integers(1, len(datasets[0])))
    of_files, of_device = (bits(islice(each, n_begun)) for each in datasets)
    assert of_files == of_device
    states = [each.state_dict() for each in datasets]
    assert states[0] == states[1]
    for each in datasets:
        each.load_state_dict(json.loads(json.dumps(states[0])))
    of_files, of_device = map(bits, datasets)
    assert of_files == of_device


N, N_GENES = 60, 12
KINDS = ("uint8", "uint16", "int32", "int64", "uint64", "float32", "float64")


@cache
def values_of(dtype):
    """Values that fill a dtype, as far as other dtypes can hold them; some rows have none."""
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        found = rng.normal(0, 100, (N, N_GENES)).astype(dtype)
    else:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        found = rng.integers(least, most, (N, N_GENES), dtype, endpoint=True)
    found[rng.random(found.shape) < 0.7] = 0
    found[::7] = 0
    if np.dtype(dtype).kind == "f":
        found[1:4, 0] = 0.5, -0.5, -0.0
    return found


@pytest.fixture(scope="module")
def collection():
    counts = np.random.default_rng(1).integers(0, 4, (N, N_GENES)).astype(np.float32)
    obs = {
        "label": np.resize(["a", "b", "c"], N),
        "plate": np.resize(["x", "y"], N),
        "depth": np.arange(N, dtype=np.uint32),
        "share": np.random.default_rng(2).random(N),
        "is_first": np.arange(N) < 9,
    }
    adata = ad.AnnData(sp.csr_matrix(counts), obs=obs)
    adata.obs_names = [f"cell {k}" for k in range(N)]
    for dtype in KINDS:
        adata.layers[dtype] = sp.csr_matrix(values_of(dtype))
        adata.obsm[dtype] = values_of(dtype)
    elements = ["X", *(f"{where}/{dtype}" for where in ("layers", "obsm") for dtype in KINDS)]
    return open_collection(adata, elements=elements, obs=[*obs], obs_names=True)


@pytest.fixture(scope="module")
def on_device(collection):
    return collection.load(device="cpu")


def both(collection, on_device, strategy=None, batch_size=8, fetch_factor=2, **options):
    strategy = strategy or BlockShuffling(4)
    given = {"seed": 0} | options
    return [
        CellDataset(each, strategy, batch_size, fetch_factor, **given)
        for each in (collection, on_device)
    ]


@pytest.mark.parametrize("dtype", [None, "float16", "bool", *KINDS])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")
def test_dtypes_are_cast_as_numpy_casts(collection, on_device, dtype):
    # Of floats out of range of 64-bit integers, C does not say what they become.
    wanted = {
        name: np.dtype(dtype or each.dtype)
        for name, each in collection.elements.items()
        if name != "X" and not (dtype == "uint64" and each.dtype.kind == "f")
    }
    for dense in (False, True):
        dataset = CellDataset(on_device, BlockShuffling(4), 35, dtype=wanted, dense=dense, seed=0)
        for minibatch in dataset:
            for name, own in wanted.items():
                stored = values_of(name.partition("/")[2])[minibatch.rows.numpy()].astype(own)
                found = minibatch[name]
                if found.layout == torch.sparse_csr:
                    parts = found.values(), found.col_indices(), found.crow_indices()
                    found = torch.from_numpy(filled(found.shape, *map(torch.Tensor.numpy, parts)))
                assert found.numpy().dtype == own
                np.testing.assert_array_equal(found.numpy(), stored, err_msg=name)


def filled(shape, values, columns, pointers):
    """Sparse rows as an array, also of float16, which SciPy does not have."""
    made = np.zeros(shape, values.dtype)
    made[np.repeat(np.arange(len(made)), np.diff(pointers)), columns] = values
    return made


def joined(minibatches):
    return torch.cat([each.to("cpu", dense=True).X for each in minibatches])


@pytest.mark.parametrize("element", ["layers/uint8", "obsm/uint8", "layers/float64"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "transform",
    [
        [NormalizeTotal(100)],
        [NormalizeTotal(1e4), Log1p()],
        [Log1p(), NormalizeTotal(10)],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*read counts")
def test_transforms(collection, on_device, element, dense, transform):
    some = [each.of_element(element) for each in (collection, on_device)]
    of_files, of_device = (
        joined(each).numpy()
        for each in both(some[0], some[1], Streaming(), dense=dense, transform=transform)
    )
    assert of_files.dtype == of_device.dtype
    # A unit in the last place of float32; sums of float64 depend on their order.
    rtol = 2.0**-23 if of_files.dtype == np.float32 else 1e-12
    np.testing.assert_allclose(of_device, of_files, rtol=rtol)


def test_sums_of_counts_are_exact(collection, on_device):
    datasets = both(collection, on_device, transform={"X": NormalizeTotal(1e4)})
    of_files, of_device = map(bits, datasets)
    assert of_files == of_device


def test_a_column_that_a_row_has_twice_is_refused():
    indices, pointers = np.array([1, 1, 1, 2, 0, 2]), np.array([0, 2, 4, 4, 6])
    twice = sp.csr_matrix((np.arange(6, dtype="f4"), indices, pointers), shape=(4, 3))
    given = open_collection(ad.AnnData(twice))
    with pytest.raises(ParameterError, match=r"^`X` has a column twice in one row; write it again"):
        given.load(device="cpu")
    once = sp.csr_matrix((np.arange(4, dtype="f4"), [1, 1, 2, 2], [0, 1, 3, 3, 4]), shape=(4, 3))
    given = open_collection(ad.AnnData(once))  # the same column ends a row and begins the next
    assert bits(both(given, given.load(device="cpu"))[1]) == bits(both(given, given)[0])


@pytest.mark.parametrize("rows", [None, [1, 3]])
def test_rows_of_different_lengths_and_images(rows, monkeypatch):
    monkeypatch.setattr(Ragged, "dtype", np.dtype(np.float32))
    given = open_collection(RaggedAndImages(), elements=["spans", "obsm/images"])
    strategy = BlockShuffling(1) if rows is None else BlockShuffling(1, indices=rows)
    datasets = both(given, given.load(rows, device="cpu"), strategy, 2)
    assert bits(datasets[0]) == bits(datasets[1])


def test_records_are_refused():
    given = open_collection(RaggedAndImages(), elements=["spans"])
    with pytest.raises(ParameterError, match=r"^`spans` has records, .* without `device`$"):
        given.load(device="cpu")


def test_several_files_and_a_part_of_them(plates):
    given = open_collection(plates, obs=["plate"])
    rows = np.arange(1, len(given), 2)
    some = given.load(rows, device="cpu")
    datasets = both(given, some, BlockShuffling(3, indices=rows))
    assert bits(datasets[0]) == bits(datasets[1])
    with pytest.raises(ParameterError, match=r"^row \d+ is visited, but is not among the"):
        list(both(given, some)[1])
    np.testing.assert_array_equal(some[:].X.toarray(), given[:].X.toarray())


ORDERS: dict[str, dict[str, Any]] = {
    "streams": {"streams": 4},
    "streams of a rank": {"streams": 4, "rank": 1, "world_size": 2},
    "a rank": {"rank": 1, "world_size": 3},
    "whole minibatches": {"drop_last": True, "batch_size": 7},
    "threads": {"batch_transform": lambda batch: batch, "transform_threads": 2},
    "companions": {"strategy": WithNext(BlockShuffling(4))},
}


@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_order(collection, on_device, options):
    of_files, of_device = map(list, both(collection, on_device, **options))
    assert bits(of_files) == bits(of_device)
    assert [[*e.obs_names] for e in of_files] == [[*e.obs_names] for e in of_device]
    for one, other in zip(of_files, of_device, strict=True):
        assert one.companions.keys() == other.companions.keys()
        assert bits(one.companions.values()) == bits(other.companions.values())


@pytest.mark.parametrize("is_saved_on_device", [False, True])
def test_a_state_goes_on_from_the_other(collection, on_device, is_saved_on_device):
    datasets = both(collection, on_device)
    saving, going_on = datasets[:: -1 if is_saved_on_device else 1]
    expected = bits(datasets[0].peek(len(datasets[0])))
    begun = bits(islice(saving, 3))
    going_on.load_state_dict(saving.state_dict())
    assert begun + bits(going_on) == expected


def test_loaders(collection, on_device):
    of_files, of_device = both(collection, on_device, batch_transform=lambda each: each.X)
    for one, other in zip(of_files.loader(), of_device.loader(), strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())
    mixed = [InterleavedDatasets([each, each]) for each in both(collection, on_device)]
    assert bits(mixed[0].loader()) == bits(mixed[1].loader())
    statistics = of_device.statistics()
    assert statistics.n_cells == N


def test_what_is_on_a_device_is_not_pinned(on_device):
    minibatch = CellDataset(on_device, Streaming(), 8, dense=True, seed=0).peek(1)[0].to("meta")
    assert minibatch.pin_memory().X is minibatch.X


IN_MEMORY = r"needs cells in memory, but they are on cpu; change minibatches in `batch_transform`"


def test_what_extensions_do_in_memory_is_refused(on_device):
    X = on_device.of_element("X")
    tokenizers = pytest.importorskip("cellfeed.tokenizers")
    genes = tokenizers.RankTokens([*map(str, range(N_GENES)), "<pad>", "<cls>", "<eos>"])
    with pytest.raises(ParameterError, match=IN_MEMORY):
        CellDataset(X, Streaming(), 8, transform=genes)
    scdataset = pytest.importorskip("cellfeed.scdataset")
    with pytest.raises(ParameterError, match=IN_MEMORY):
        scdataset.scDataset(X, Streaming(), 8, batch_callback=lambda fetched, rows: fetched[rows])


def test_what_needs_cells_in_memory_is_refused(collection, on_device):
    X = on_device.of_element("X")
    for options in (
        {"fetch_transform": copy.copy},
        {"as_torch": False},
    ):
        with pytest.raises(ParameterError, match=IN_MEMORY):
            CellDataset(X, Streaming(), 8, **options)
    with pytest.raises(ParameterError, match=r"on cpu stays in its process; load"):
        pickle.dumps(X)
    with pytest.raises(ParameterError, match=r"^`device` must be .*device='nowhere'.*leave it out"):
        collection.load(device="nowhere")
    assert "MB on cpu" in repr(on_device)
    assert on_device.device == torch.device("cpu")
    assert collection.device is None


@pytest.mark.process
def test_workers_are_refused(on_device):
    dataset = CellDataset(on_device, Streaming(), 8)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    told = "`num_workers` must be 0 if cells are on cpu"
    with pytest.raises(Exception, match=told):
        list(loader)
    for each in (dataset, InterleavedDatasets([dataset])):
        with pytest.raises(ParameterError, match=f"{told}.*got 2; write"):
            list(each.loader(2, multiprocessing_context="fork"))


@pytest.mark.process
def test_ranks_have_cells_of_their_own(plates, tmp_path):
    ranks = torchrun(
        tmp_path,
        2,
        f"paths = {[*map(str, plates)]!r}",
        """
        from cellfeed import open_collection

        dist.init_process_group("gloo")
        collection = open_collection(paths)
        loaded = collection.load(device="cpu")
        for name, given in (("files", collection), ("device", loaded)):
            dataset = CellDataset(given, BlockShuffling(4), 8, seed=0)
            found[name] = [[m.rows.tolist(), m.X.to_dense().tolist()] for m in dataset]
        own = np.arange(rank, len(collection), 2)
        some = collection.load(own, device="cpu")
        strategy = BlockShuffling(4, indices=own)
        dataset = CellDataset(some, strategy, 8, seed=0, rank=0, world_size=1)
        found["own"] = sorted(sum((m.rows.tolist() for m in dataset), []))
        """,
    )
    n_cells = len(open_collection(plates))
    for rank, found in enumerate(ranks):
        assert found["files"] == found["device"]
        assert found["own"] == [*range(rank, n_cells, 2)]


def test_memory_is_freed(collection):
    before = memory_files()
    assert collection.of_element("X").load(device="cpu").loaded_bytes
    assert memory_files() == before


def test_what_does_not_fit_on_the_device_is_refused_before_it_is_read(collection, monkeypatch):
    some = collection.of_element("layers/int64")
    needed = some.load(device="cpu").loaded_bytes + N * (1 + 1 + 4 + 8 + 1)
    for available in (needed - 1, needed):
        device = SimpleNamespace(mem_get_info=lambda _, n=available: (n, n), empty_cache=int)
        monkeypatch.setattr(torch, "get_device_module", lambda _, device=device: device)
        if available == needed:
            some.load(device="cpu")
            continue
        monkeypatch.setattr(_loaded, "fetches_of", None)
        told = rf"^these cells take {needed:,} bytes on cpu, but {available:,} are available there"
        with pytest.raises(ParameterError, match=told):
            some.load(device="cpu")
        monkeypatch.undo()
