"""What a training written for scDataset 0.3 finds here after its imports were changed.

Names, parameters and their order are those of scDataset; what differs on purpose says so.
"""

import inspect
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ParameterError,
    Streaming,
    scdataset,
)
from cellfeed.scdataset import MultiIndexable

N = 400
IN_PROCESS_AND_WITH_WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]
# As scDataset 0.3.0 has them, with their defaults; `...` where there is none.
CALLBACKS = dict.fromkeys(
    ["fetch_callback", "fetch_transform", "batch_callback", "batch_transform"]
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "scDataset": {"data_collection": ..., "strategy": ..., "batch_size": ..., "fetch_factor": 16}
    | {"drop_last": False}
    | CALLBACKS
    | {"rank": None, "world_size": None, "seed": None},
    "Streaming": {"indices": None, "shuffle": False},
    "BlockShuffling": {"block_size": 8, "indices": None, "drop_last": False},
    "BlockWeightedSampling": {"block_size": 8, "indices": None, "weights": None}
    | {"total_size": None, "replace": True, "sampling_size": None},
    "ClassBalancedSampling": {"labels": ..., "block_size": 8, "indices": None}
    | {"total_size": None, "replace": True, "sampling_size": None},
    "adata_to_mindex": {"batch": ..., "columns": None},
    "hf_tahoe_to_tensor": {"batch": ..., "num_genes": 62713},
    "MultiIndexable": {"names": None, "unstructured": None},
}


@pytest.fixture
def data():
    """Row i holds i and some noise."""
    noise = np.random.default_rng(0).normal(size=(N, 9))
    return np.column_stack([np.arange(N), noise])


def rows_in(batches):
    return np.concatenate([batch[:, 0] for batch in batches]).astype(int)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_their_names_order_and_defaults(name):
    here = inspect.signature(getattr(scdataset, name)).parameters
    assert {each: here[each].default for each in PARAMETERS[name]} == {
        each: inspect.Parameter.empty if default is ... else default
        for each, default in PARAMETERS[name].items()
    }
    assert [each for each in here if each in PARAMETERS[name]] == list(PARAMETERS[name])


@pytest.mark.parametrize("name", ["estimate_sample_size", "suggest_parameters"])
def test_what_is_measured_instead_is_said(name):
    with pytest.raises(ImportError, match=rf"has no `{name}`, .*: run `autotune`$"):
        getattr(scdataset, name)
    assert not hasattr(scdataset, "other")


def test_datasets_have_its_attributes(data):
    strategy = BlockShuffling(block_size=8)
    dataset = scdataset.scDataset(data, strategy, 32, 4, True)
    assert isinstance(dataset, IterableDataset)
    assert dataset.collection is data
    assert dataset.strategy is strategy
    assert (dataset.batch_size, dataset.fetch_factor, dataset.fetch_size) == (32, 4, 128)
    assert (dataset.drop_last, dataset.rank, dataset.world_size) == (True, 0, 1)


def test_a_store_whose_shape_is_a_method(data):
    """As that of BioNeMo, which a ``fetch_callback`` reads."""

    class Store:
        def __len__(self):
            return N

        def shape(self):
            return [(N, 10)]

    dataset = scdataset.scDataset(
        Store(), Streaming(), 100, fetch_callback=lambda _, rows: data[rows]
    )
    assert rows_in(dataset).tolist() == list(range(N))


@pytest.mark.parametrize("num_workers", IN_PROCESS_AND_WITH_WORKERS)
def test_modalities_stay_aligned(data, num_workers):
    multi = MultiIndexable(genes=data, cell=np.arange(N), unstructured={"names": ["g0", "g1"]})
    dataset = CellDataset(multi, BlockShuffling(4), batch_size=50, fetch_factor=2)
    for batch in DataLoader(dataset, batch_size=None, num_workers=num_workers):
        genes, cell = batch
        assert batch.unstructured_keys == ["names"]
        assert batch["genes"] is genes
        assert np.array_equal(genes[:, 0], cell)


README = """
import numpy as np
from LIBRARY import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    MultiIndexable,
    Streaming,
    scDataset,
)
from torch.utils.data import DataLoader

seen = {}

strategy = Streaming()
dataset = scDataset(data, strategy, batch_size=64)
loader = DataLoader(dataset, batch_size=None)  # scDataset handles batching internally
seen["loader"] = [batch for batch in loader]

strategy = Streaming(shuffle=True)
dataset = scDataset(data, strategy, batch_size=64, fetch_factor=8)
seen["buffer"] = list(dataset)

train_indices = [0, 2, 4, 6, 8]
strategy = Streaming(indices=train_indices)
seen["subset"] = list(scDataset(data, strategy, batch_size=64))

strategy = BlockShuffling(block_size=8)
seen["blocks"] = list(scDataset(data, strategy, batch_size=64))
strategy = BlockShuffling(block_size=8, indices=train_indices)
seen["blocks of a subset"] = list(scDataset(data, strategy, batch_size=64))

strategy = BlockWeightedSampling(total_size=1000, block_size=16)
seen["equal weights"] = list(scDataset(data, strategy, batch_size=64))
sample_weights = np.arange(len(data))
strategy = BlockWeightedSampling(weights=sample_weights, total_size=500, block_size=16)
seen["weights"] = list(scDataset(data, strategy, batch_size=64))

cell_types = np.repeat(["T_cell", "B_cell", "NK_cell"], [len(data) - 30, 20, 10])
strategy = ClassBalancedSampling(cell_types, total_size=800)
seen["classes"] = list(scDataset(data, strategy, batch_size=64))

multi_data = MultiIndexable(genes=data, proteins=data[:, :2], metadata=data[:, :1])
dataset = scDataset(multi_data, Streaming(), batch_size=64)
seen["modalities"] = [batch["genes"] for batch in dataset if len(batch["proteins"])]


def fetch_transform(chunk):
    return chunk.toarray() if hasattr(chunk, "toarray") else chunk


def batch_transform(batch):
    import torch

    return torch.from_numpy(batch).float()


dataset = scDataset(
    data, Streaming(), batch_size=64,
    fetch_transform=fetch_transform, batch_transform=batch_transform,
)
seen["transforms"] = list(dataset)

train_indices = np.arange(0, 320)
val_indices = np.arange(320, 400)
train_dataset = scDataset(
    data, BlockShuffling(block_size=32, indices=train_indices), batch_size=64, fetch_factor=8
)
train_loader = DataLoader(train_dataset, batch_size=None, WORKERS)
val_dataset = scDataset(data, Streaming(indices=val_indices), batch_size=64, fetch_factor=8)
val_loader = DataLoader(val_dataset, batch_size=None, WORKERS)
for epoch in range(2):
    seen[f"train {epoch}"] = [batch for batch in train_loader]
    seen[f"validate {epoch}"] = [batch for batch in val_loader]
"""


def run_readme(library: str, data: Any, num_workers: int = 0) -> dict[str, list[Any]]:
    """Run the examples of scDataset's README, and return their minibatches."""
    there: dict[str, Any] = {"data": data}
    workers = f"num_workers={num_workers}" + ", prefetch_factor=9" * bool(num_workers)
    exec(README.replace("LIBRARY", library).replace("WORKERS", workers), there)
    seen: dict[str, list[Any]] = there["seen"]
    return seen


class TestAfterOneChangedImport:
    """What is written for scDataset and imports `cellfeed.scdataset` in its place."""

    @pytest.mark.parametrize("num_workers", IN_PROCESS_AND_WITH_WORKERS)
    def test_the_readme_runs(self, data, num_workers):
        seen = run_readme("cellfeed.scdataset", data, num_workers)
        everything = [*range(N)]
        expected = {
            "loader": everything, "buffer": everything, "modalities": everything,
            "transforms": everything, "blocks": everything, "subset": [0, 2, 4, 6, 8],
            "blocks of a subset": [0, 2, 4, 6, 8],
        }  # fmt: skip
        for epoch in range(2):
            expected |= {f"train {epoch}": everything[:320], f"validate {epoch}": everything[320:]}
        for name, rows in expected.items():
            assert sorted(rows_in(map(np.asarray, seen[name]))) == rows, name
        sizes = {"equal weights": 1000, "weights": 500, "classes": 800}
        assert {name: rows_in(seen[name]).size for name in sizes} == sizes
        # scDataset repeats epochs with worker processes.
        assert rows_in(seen["train 0"]).tolist() != rows_in(seen["train 1"]).tolist()

    def test_minibatches_have_the_kinds_and_sizes_of_scdataset(self, data):
        pytest.importorskip("scdataset", reason="scDataset is not installed")
        here, there = (run_readme(each, data) for each in ("cellfeed.scdataset", "scdataset"))
        assert here.keys() == there.keys()
        for name, expected in there.items():
            assert [(type(a), a.shape, a.dtype) for a in here[name]] == [
                (type(b), b.shape, b.dtype) for b in expected
            ]

    def test_the_collection_by_its_name(self, data):
        dataset = scdataset.scDataset(data_collection=data, strategy=Streaming(), batch_size=64)
        assert dataset.collection is data
        assert dataset.sort_before_fetch
        assert sorted(rows_in(dataset)) == [*range(N)]

    @pytest.mark.parametrize(
        ("strategy", "n"),
        [
            (scdataset.Streaming(), N),
            (scdataset.Streaming([3, 5]), 2),
            (scdataset.BlockShuffling(7), N),
            (scdataset.BlockShuffling(7, drop_last=True), N - N % 7),
            (scdataset.BlockWeightedSampling(weights=np.arange(N), total_size=90), 90),
            (scdataset.ClassBalancedSampling(np.arange(N) % 3), N),
        ],
    )
    def test_strategies_have_its_methods(self, data, strategy, n):
        assert isinstance(strategy, scdataset.SamplingStrategy)
        rows = strategy.get_indices(data, seed=1)
        assert strategy.get_len(data) == rows.size == n
        assert np.array_equal(rows, strategy.get_indices(data, seed=1))
        drawn, again = (strategy.get_indices(data, rng=np.random.default_rng(2)) for _ in "ab")
        assert np.array_equal(drawn, again)
        is_random = not isinstance(strategy, scdataset.Streaming)
        assert np.array_equal(drawn, rows) is not is_random
        assert strategy.get_indices(data).size == n
        visited = rows_in(scdataset.scDataset(data, strategy, 50, seed=0))
        if not isinstance(strategy, scdataset.BlockWeightedSampling):
            assert visited.size == n

    def test_weights_sum_to_one(self):
        weighted = scdataset.BlockWeightedSampling(weights=[1, 1, 2])
        assert np.asarray(weighted.weights).tolist() == [0.25, 0.25, 0.5]
        balanced = scdataset.ClassBalancedSampling(np.array(["a", "a", "b", None]))
        assert np.asarray(balanced.weights).tolist() == [0.25, 0.25, 0.5, 0]

    @pytest.mark.parametrize("num_workers", IN_PROCESS_AND_WITH_WORKERS)
    def test_a_strategy_of_ones_own(self, data, num_workers):
        dataset = scdataset.scDataset(data, OwnStrategy(np.arange(0, N, 2)), 16, 2, seed=0)
        loader = dataset.loader(num_workers=num_workers)
        first, second = (rows_in(map(np.asarray, loader)).tolist() for _ in "ab")
        assert sorted(first) == sorted(second) == [*range(0, N, 2)]
        assert first != second
        iterator = iter(loader)
        begun = [np.asarray(next(iterator)) for _ in range(3)]
        resumed = scdataset.scDataset(data, OwnStrategy(np.arange(0, N, 2)), 16, 2, seed=0)
        resumed_loader = resumed.loader(num_workers=num_workers)
        resumed_loader.load_state_dict(loader.state_dict())
        both = rows_in([*begun, *map(np.asarray, resumed_loader)])
        assert sorted(both) == [*range(0, N, 2)]

    def test_wrong_indices_are_refused(self, data):
        class Wrong(OwnStrategy):
            def get_indices(self, data_collection, seed=None, rng=None):
                return np.arange(len(data_collection)) + 1

        with pytest.raises(ParameterError, match=r"`Wrong.get_indices` must return 400 rows"):
            list(scdataset.scDataset(data, Wrong(), 16))


class OwnStrategy(scdataset.SamplingStrategy):
    """As one writes it for scDataset."""

    def __init__(self, indices=None):
        super().__init__(indices)
        self._shuffle_before_yield = True

    def get_len(self, data_collection):
        return len(data_collection) if self._indices is None else len(self._indices)

    def get_indices(self, data_collection, seed=None, rng=None):
        rows = np.arange(len(data_collection)) if self._indices is None else self._indices
        return self._get_rng(seed, rng).permutation(rows)
