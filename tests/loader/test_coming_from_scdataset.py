"""What a training written for scDataset 0.3 finds here after its imports were changed.

Names, parameters and their order are those of scDataset; what differs on purpose says so.
"""

import inspect
from functools import partial
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from torch.utils.data import DataLoader, IterableDataset

import cellfeed
from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    ClassBalancedSampling,
    MultiIndexable,
    ParameterError,
    Streaming,
    adata_to_mindex,
    sampling,
    scdataset,
    suggest_parameters,
)

N = 400
# As scDataset 0.3.0 has them, with their defaults; `...` where there is none.
CALLBACKS = dict.fromkeys(
    ["fetch_callback", "fetch_transform", "batch_callback", "batch_transform"]
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "CellDataset": {"strategy": ..., "batch_size": ..., "fetch_factor": 16, "drop_last": False}
    | CALLBACKS
    | {"rank": None, "world_size": None, "seed": None},
    "Streaming": {"indices": None, "shuffle": False},
    "BlockShuffling": {"block_size": 8, "indices": None, "drop_last": False},
    "BlockWeightedSampling": {"block_size": 8, "indices": None, "weights": None}
    | {"total_size": None, "replace": True, "sampling_size": None},
    "ClassBalancedSampling": {"labels": ..., "block_size": 8, "indices": None}
    | {"total_size": None, "replace": True, "sampling_size": None},
    "estimate_sample_size": {"n_samples": 16} | CALLBACKS,
    "suggest_parameters": {"batch_size": ..., "target_ram_fraction": 0.2, "max_workers": 16}
    | {"verbose": True}
    | CALLBACKS,
    "adata_to_mindex": {"batch": ..., "columns": None},
    "hf_tahoe_to_tensor": {"batch": ..., "num_genes": 62713},
    "MultiIndexable": {"names": None, "unstructured": None},
}


@pytest.fixture
def data():
    """Row i holds i and some noise."""
    noise = np.random.default_rng(0).normal(size=(N, 9))
    return np.column_stack([np.arange(N), noise])


@pytest.fixture
def labels():
    return np.repeat(["A", "B", "C"], [280, 80, 40])


def rows_in(batches):
    return np.concatenate([batch[:, 0] for batch in batches]).astype(int)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_their_names_order_and_defaults(name):
    here = inspect.signature(getattr(cellfeed, name)).parameters
    assert {each: here[each].default for each in PARAMETERS[name]} == {
        each: inspect.Parameter.empty if default is ... else default
        for each, default in PARAMETERS[name].items()
    }
    assert [each for each in here if each in PARAMETERS[name]] == list(PARAMETERS[name])


class TestCellDataset:
    def test_it_has_the_attributes(self, data):
        strategy = BlockShuffling(block_size=8)
        dataset = CellDataset(data, strategy, 32, 4, True)
        assert isinstance(dataset, IterableDataset)
        assert dataset.collection is data
        assert dataset.strategy is strategy
        assert (dataset.batch_size, dataset.fetch_factor, dataset.fetch_size) == (32, 4, 128)
        assert (dataset.drop_last, dataset.rank, dataset.world_size) == (True, 0, 1)

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("n", [64, 100, 399, 400])
    @pytest.mark.parametrize("world_size", [1, 3])
    def test_its_length_is_what_comes(self, data, n, drop_last, world_size):
        for rank in range(world_size):
            dataset = CellDataset(
                data[:n],
                BlockShuffling(),
                16,
                2,
                drop_last,
                rank=rank,
                world_size=world_size,
                seed=42,
            )
            assert len(list(dataset)) == len(dataset) > 0

    def test_functions_come_in_this_order(self, data):
        called = []

        def noted(name, result):
            called.append(name)
            return result

        dataset = CellDataset(
            data,
            Streaming(),
            100,
            2,
            fetch_callback=lambda collection, indices: noted("fetch", collection[indices]),
            fetch_transform=lambda fetched: noted("fetch_transform", fetched * 2),
            batch_callback=lambda fetched, indices: noted("batch", fetched[indices]),
            batch_transform=lambda batch: noted("batch_transform", batch + 1),
        )
        assert np.array_equal(np.vstack(list(dataset)), data * 2 + 1)
        assert called == ["fetch", "fetch_transform", *["batch", "batch_transform"] * 2] * 2

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_in_a_dataloader_each_cell_comes_once(self, data, num_workers):
        dataset = CellDataset(data, BlockShuffling(block_size=8), 32, 2, seed=42)
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
        first, second = rows_in(loader), rows_in(loader)
        assert sorted(first) == sorted(second) == list(range(N))
        assert first.tolist() != second.tolist()  # scDataset repeats epochs with worker processes

    def test_a_store_whose_shape_is_a_method(self, data):
        """As that of BioNeMo, which a ``fetch_callback`` reads."""

        class Store:
            def __len__(self):
                return N

            def shape(self):
                return [(N, 10)]

        dataset = CellDataset(Store(), Streaming(), 100, fetch_callback=lambda _, rows: data[rows])
        assert rows_in(dataset).tolist() == list(range(N))

    def test_a_seed_fixes_all_epochs(self, data):
        runs = [CellDataset(data, BlockShuffling(), 32, seed=42) for _ in range(2)]
        epochs = [[rows_in(run).tolist() for _ in range(3)] for run in runs]
        assert epochs[0] == epochs[1]
        assert epochs[0][0] != epochs[0][1]
        other = CellDataset(data, BlockShuffling(), 32, seed=43)
        assert rows_in(other).tolist() != epochs[0][0]

    @pytest.mark.parametrize("world_size", [2, 8])
    def test_ranks_have_equally_many(self, data, world_size):
        """In scDataset, some have more than others, and some may have none."""
        ranks = [
            list(CellDataset(data, Streaming(), 64, 1, rank=rank, world_size=world_size, seed=42))
            for rank in range(world_size)
        ]
        assert len({tuple(map(len, batches)) for batches in ranks}) == 1
        assert set(np.concatenate([rows_in(batches) for batches in ranks])) == set(range(N))

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"batch_size": 0}, "batch_size=0"),
            ({"fetch_factor": -1}, "fetch_factor=-1"),
            ({"strategy": "random"}, "must be a SamplingStrategy"),
            ({"batch_size": 500, "drop_last": True}, "none of .* rows is left"),
        ],
    )
    def test_what_cannot_be_is_refused(self, data, parameters, message):
        with pytest.raises(ParameterError, match=message):
            CellDataset(data, **{"strategy": Streaming(), "batch_size": 8} | parameters)
        assert issubclass(ParameterError, ValueError)


class TestStrategies:
    def epoch(self, strategy, data, **options):
        return rows_in(CellDataset(data, strategy, 50, 2, seed=42, **options))

    def test_streaming(self, data):
        assert self.epoch(Streaming(), data).tolist() == list(range(N))
        with pytest.warns(UserWarning, match="sorted"):
            strategy = Streaming(indices=[30, 10, 40, 20])
        assert self.epoch(strategy, data).tolist() == [10, 20, 30, 40]
        shuffled = self.epoch(Streaming(shuffle=True), data)
        assert shuffled.tolist() != list(range(N))
        assert sorted(shuffled[:100]) == list(range(100))  # within a fetch

    def test_blocks_are_contiguous_in_the_indices(self, data):
        indices = np.arange(0, N, 4)
        dataset = CellDataset(data, BlockShuffling(5, indices), 10, 2, seed=42)
        fetch = dataset.plan(epoch=0).fetch(0)
        blocks = np.searchsorted(indices, fetch.rows).reshape(-1, 5)
        assert np.array_equal(blocks, blocks[:, :1] + np.arange(5))
        assert set(self.epoch(BlockShuffling(5, indices), data)) == set(indices)

    def test_weights(self, data):
        weights = np.where(np.arange(N) < 200, 0.99, 0.01)
        rows = self.epoch(BlockWeightedSampling(4, weights=weights, total_size=1000), data)
        assert rows.size == 1000
        assert np.count_nonzero(rows < 200) in (989, 990, 991)

    @pytest.mark.parametrize(("of_all", "ratio"), [(True, 9), (False, 1)])
    def test_weights_of_all_cells_or_of_the_indices(self, data, of_all, ratio):
        indices = np.r_[:5, 390:395]
        weights = np.where(np.arange(N) < 390, 1.0, 9.0) if of_all else np.ones(10)
        strategy = BlockWeightedSampling(4, indices, weights, total_size=1000)
        rows = self.epoch(strategy, data)
        heavy = np.count_nonzero(rows >= 390)
        assert heavy / (1000 - heavy) == pytest.approx(ratio, rel=0.02)

    def test_without_replacement(self, data):
        strategy = BlockWeightedSampling(4, weights=np.ones(N), total_size=200, replace=False)
        assert np.unique(self.epoch(strategy, data)).size == 200

    def test_classes_come_equally_often(self, data, labels):
        strategy = ClassBalancedSampling(labels, block_size=4, total_size=300)
        drawn = labels[self.epoch(strategy, data)]
        assert all(99 <= count <= 101 for count in np.unique(drawn, return_counts=True)[1])

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: BlockWeightedSampling(4, weights=np.ones(50)), r"`weights`.* but got 50"),
            (
                lambda: BlockWeightedSampling(4, range(5), np.ones(7)),
                r"row of the collection \(400\), or for each of `indices` \(5\), but got 7",
            ),
            (lambda: ClassBalancedSampling([]), "`labels` must be one-dimensional"),
            (
                lambda: ClassBalancedSampling([0, 1, 2], indices=range(5)),
                "or for each of `indices`",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, data, make, message):
        with pytest.raises(ParameterError, match=message):
            self.epoch(make(), data)


class TestModalities:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_they_stay_aligned(self, data, num_workers):
        multi = MultiIndexable(genes=data, cell=np.arange(N), unstructured={"names": ["g0", "g1"]})
        dataset = CellDataset(multi, BlockShuffling(4), batch_size=50, fetch_factor=2)
        for batch in DataLoader(dataset, batch_size=None, num_workers=num_workers):
            genes, cell = batch
            assert batch.unstructured_keys == ["names"]
            assert batch["genes"] is genes
            assert np.array_equal(genes[:, 0], cell)

    def test_anndata_with_columns(self, data, labels):
        obs = pd.DataFrame({"label": labels}, index=[f"cell{i}" for i in range(N)])
        adata = ad.AnnData(sp.csr_matrix(data), obs=obs)
        transform = partial(adata_to_mindex, columns=["label"])
        for batch in CellDataset(adata, BlockShuffling(4), 50, 2, fetch_transform=transform):
            rows = batch["X"][:, 0].astype(int)
            assert np.array_equal(batch["X"], data[rows])
            assert np.array_equal(batch["label"], labels[rows])


def test_suggested_parameters_are_taken(data):
    params = suggest_parameters(data, batch_size=64, max_workers=1, verbose=False)
    dataset = CellDataset(
        data,
        BlockShuffling(block_size=params["block_size_balanced"]),
        batch_size=64,
        fetch_factor=params["fetch_factor"],
    )
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=params["num_workers"],
        prefetch_factor=params["prefetch_factor"],
    )
    assert sorted(rows_in(loader)) == list(range(N))


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
train_loader = DataLoader(train_dataset, batch_size=None, num_workers=2, prefetch_factor=9)
val_dataset = scDataset(data, Streaming(indices=val_indices), batch_size=64, fetch_factor=8)
val_loader = DataLoader(val_dataset, batch_size=None, num_workers=2, prefetch_factor=9)
for epoch in range(2):
    seen[f"train {epoch}"] = [batch for batch in train_loader]
    seen[f"validate {epoch}"] = [batch for batch in val_loader]
"""


def run_readme(library: str, data: Any) -> dict[str, list[Any]]:
    """Run the examples of scDataset's README, and return their minibatches."""
    there: dict[str, Any] = {"data": data}
    exec(README.replace("LIBRARY", library), there)
    seen: dict[str, list[Any]] = there["seen"]
    return seen


class TestAfterOneChangedImport:
    """What is written for scDataset and imports `cellfeed.scdataset` in its place."""

    def test_the_readme_runs(self, data):
        seen = run_readme("cellfeed.scdataset", data)
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
        if not isinstance(strategy, sampling.BlockWeightedSampling):
            assert visited.size == n

    def test_weights_sum_to_one(self):
        weighted = scdataset.BlockWeightedSampling(weights=[1, 1, 2])
        assert np.asarray(weighted.weights).tolist() == [0.25, 0.25, 0.5]
        balanced = scdataset.ClassBalancedSampling(np.array(["a", "a", "b", None]))
        assert np.asarray(balanced.weights).tolist() == [0.25, 0.25, 0.5, 0]

    @pytest.mark.parametrize("num_workers", [0, 2])
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
