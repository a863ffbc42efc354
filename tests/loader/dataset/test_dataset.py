import copy
import operator
import pickle
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from anndata.experimental import AnnCollection
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    Minibatch,
    MultiIndexable,
    ParameterError,
    Streaming,
    open_collection,
)

N_ROWS = 50


@pytest.fixture
def table() -> np.ndarray:
    """Row i holds i, i + 1/4 and i + 1/2."""
    return np.arange(N_ROWS, dtype=np.float32)[:, None] + np.array([0, 0.25, 0.5], np.float32)


@pytest.fixture
def adata(table) -> ad.AnnData:
    obs = pd.DataFrame(
        {"number": np.arange(N_ROWS), "label": pd.Categorical(["a", "b"] * (N_ROWS // 2))},
        index=[f"cell{i}" for i in range(N_ROWS)],
    )
    return ad.AnnData(sp.csr_matrix(table), obs=obs)


class RowsOfText:
    """Like a list, of text, that takes an array of row numbers."""

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, rows):
        return np.array([f"row {row}" for row in rows])


def numbers_in(batch: Any) -> list[int]:
    """Which rows of the fixture ``table`` a minibatch has, and that its parts are aligned."""
    if isinstance(batch, torch.Tensor):
        return numbers_in(batch.numpy())
    if isinstance(batch, MultiIndexable):
        first, *others = [numbers_in(part) for part in batch]
        assert all(numbers == first for numbers in others)
        return first
    if isinstance(batch, ad.AnnData):
        assert numbers_in(batch.X) == batch.obs["number"].tolist()
        return numbers_in(batch.X)
    if isinstance(batch, sp.csr_array | sp.csr_matrix):
        return numbers_in(batch.toarray())
    if batch.ndim == 2:
        assert np.array_equal(batch - batch[:, :1], np.tile([0, 0.25, 0.5], (len(batch), 1)))
        batch = batch[:, 0]
    if batch.dtype.kind == "U":
        batch = [text.removeprefix("row ") for text in batch]
    return [int(value) for value in batch]


@pytest.fixture
def indexable(request, table, adata, tmp_path):
    def backed(halves: bool = False):
        parts = [adata[:20], adata[20:]] if halves else [adata]
        for number, part in enumerate(parts):
            part.copy().write_h5ad(tmp_path / f"{number}.h5ad")
        opened = [ad.read_h5ad(tmp_path / f"{n}.h5ad", backed="r") for n in range(len(parts))]
        return opened if halves else opened[0]

    def memory_map():
        table.tofile(tmp_path / "table")
        return np.memmap(tmp_path / "table", dtype=np.float32, mode="r", shape=table.shape)

    make = {
        "ndarray": lambda: table,
        "one-dimensional": lambda: np.arange(N_ROWS),
        "memmap": memory_map,
        "csr_matrix": lambda: sp.csr_matrix(table),
        "csr_array": lambda: sp.csr_array(table),
        "AnnData": lambda: adata,
        "backed AnnData": backed,
        "AnnCollection": lambda: AnnCollection([adata[:20].copy(), adata[20:].copy()]),
        "AnnCollection of backed": lambda: AnnCollection(backed(halves=True)),
        "MultiIndexable": lambda: MultiIndexable(a=adata, x=table, y=np.arange(N_ROWS)),
        "MultiIndexable of backed": lambda: MultiIndexable(backed(), np.arange(N_ROWS)),
        "like a list": RowsOfText,
        "tensor": lambda: torch.from_numpy(table),
    }
    return make[request.param]()


INDEXABLES = [
    "ndarray",
    "one-dimensional",
    "memmap",
    "csr_matrix",
    "csr_array",
    "AnnData",
    "backed AnnData",
    "AnnCollection",
    "AnnCollection of backed",
    "MultiIndexable",
    "MultiIndexable of backed",
    "like a list",
    "tensor",
]


class TestSources:
    @pytest.mark.parametrize("indexable", INDEXABLES, indirect=True)
    def test_minibatches_follow_the_plan(self, indexable):
        dataset = CellDataset(indexable, BlockShuffling(4), 8, 3, seed=1)
        plan = dataset.plan(epoch=0)
        batches = [numbers_in(batch) for batch in dataset]
        expected = np.concatenate([plan.delivered_rows(n)[0] for n in range(plan.n_fetches)])
        assert [number for batch in batches for number in batch] == expected.tolist()
        assert list(map(len, batches)) == [8] * 6 + [2]
        assert len(dataset) == 7

    @settings(max_examples=20)
    @given(
        st.integers(1, 70),
        st.integers(1, 20),
        st.integers(1, 5),
        st.booleans(),
        st.integers(1, 3),
    )
    def test_a_collection_gives_cells_with_their_obs(
        self, plates, in_memory, block_size, batch_size, fetch_factor, drop_last, world_size
    ):
        collection = open_collection(plates, obs=["cell_type", "number"])
        X, cell_types = in_memory(plates), collection[:].obs["cell_type"]
        seen = []
        for rank in range(world_size):
            dataset = CellDataset(
                collection,
                BlockShuffling(block_size),
                batch_size,
                fetch_factor,
                drop_last,
                rank=rank,
                world_size=world_size,
                seed=2,
            )
            batches = list(dataset)
            assert len(batches) == len(dataset)
            for batch in batches:
                assert isinstance(batch, Minibatch)
                rows = batch.rows.numpy()
                assert np.array_equal(batch.X.to_dense().numpy(), X[rows])
                assert np.array_equal(batch.obs["cell_type"].numpy(), cell_types[rows])
                assert np.array_equal(batch.obs["number"].numpy(), rows)
                seen += rows.tolist()
        n_rows = len(collection)
        if drop_last:
            assert len(set(seen)) == len(seen) > n_rows - world_size * batch_size
        else:
            assert len(set(seen)) == n_rows > len(seen) - world_size

    def test_minibatches_outlive_their_fetch(self, plates, in_memory):
        """The buffers of a fetch are used again, minibatches must not lie in them."""
        expected = in_memory(plates)
        for dense in (False, True):
            dataset = CellDataset(
                open_collection(plates), BlockShuffling(2), 4, 2, seed=0, dense=dense
            )
            for batch in list(dataset):
                assert np.array_equal(batch.X.to_dense(), expected[batch.rows])

    def test_two_iterations_at_once_do_not_disturb_each_other(self, plates, in_memory):
        dataset = CellDataset(open_collection(plates), BlockShuffling(2), 4, 2, seed=0)
        pairs, expected = list(zip(dataset, dataset, strict=True)), in_memory(plates)
        for side in range(2):
            batches = [pair[side] for pair in pairs]
            for batch in batches:
                assert np.array_equal(batch.X.to_dense(), expected[batch.rows])
            rows = torch.cat([batch.rows for batch in batches])
            assert sorted(rows.tolist()) == list(range(63))


class TestCallbacks:
    @pytest.fixture
    def calls(self) -> list[tuple[Any, ...]]:
        return []

    def test_are_called_in_order_with_their_arguments(self, calls):
        collection = RowsOfText()

        def fetch_callback(*arguments):
            calls.append(("fetch_callback", *arguments))
            return "fetched"

        def fetch_transform(*arguments):
            calls.append(("fetch_transform", *arguments))
            return "transformed"

        def batch_callback(*arguments):
            calls.append(("batch_callback", *arguments))
            return "batch"

        def batch_transform(*arguments):
            calls.append(("batch_transform", *arguments))
            return f"result {len(calls)}"

        dataset = CellDataset(
            collection,
            BlockShuffling(2),
            batch_size=20,
            fetch_factor=2,
            fetch_callback=fetch_callback,
            fetch_transform=fetch_transform,
            batch_callback=batch_callback,
            batch_transform=batch_transform,
            seed=0,
        )
        assert list(dataset) == ["result 4", "result 6", "result 10"]
        expected: list[tuple[Any, ...]] = []
        plan = dataset.plan(epoch=0)
        for fetch in map(plan.fetch, range(plan.n_fetches)):
            expected += [
                ("fetch_callback", collection, fetch.rows),
                ("fetch_transform", "fetched"),
            ]
            for start in range(0, len(fetch.order), 20):
                expected += [
                    ("batch_callback", "transformed", fetch.order[start : start + 20]),
                    ("batch_transform", "batch"),
                ]
        for call, wanted in zip(calls, expected, strict=True):
            for argument, wanted_argument in zip(call, wanted, strict=True):
                assert argument is wanted_argument or np.array_equal(argument, wanted_argument)

    def test_each_alone(self, table):
        def double(values):
            return 2 * values

        alone: dict[str, Any] = {
            "fetch_callback": lambda collection, rows: 2 * collection[rows],
            "fetch_transform": double,
            "batch_callback": lambda fetched, indices: 2 * fetched[indices],
            "batch_transform": double,
        }
        plain = list(CellDataset(table, BlockShuffling(4), 8, 2, seed=0))
        for name, callback in alone.items():
            changed = CellDataset(table, BlockShuffling(4), 8, 2, seed=0, **{name: callback})
            assert np.array_equal(np.concatenate(list(changed)), 2 * np.concatenate(plain)), name

    def test_over_a_collection(self, plates, in_memory, calls):
        """A whole fetch comes as cells in NumPy, a minibatch as tensors."""

        def fetch_transform(cells):
            calls.append(("fetch", type(cells), len(cells)))
            return Cells({"X": cells.X * 2}, {"twice": 2 * cells.obs["number"]}, cells.rows)

        def batch_transform(batch):
            calls.append(("batch", type(batch), len(batch)))
            return batch

        dataset = CellDataset(
            open_collection(plates, obs=["number"]),
            Streaming(),
            40,
            1,
            fetch_transform=fetch_transform,
            batch_transform=batch_transform,
        )
        batches = list(dataset)
        assert calls == [
            ("fetch", Cells, 40),
            ("batch", Minibatch, 40),
            ("fetch", Cells, 23),
            ("batch", Minibatch, 23),
        ]
        for batch in batches:
            assert np.array_equal(batch.X.to_dense(), 2 * in_memory(plates)[batch.rows])
            assert np.array_equal(batch.obs["twice"], 2 * batch.rows)

    def test_a_fetch_callback_over_a_collection_replaces_the_reader(self, plates, in_memory):
        dataset = CellDataset(
            open_collection(plates),
            BlockShuffling(4),
            10,
            2,
            seed=0,
            fetch_callback=lambda collection, rows: collection[rows],
        )
        for batch in dataset:
            assert np.array_equal(batch.X.to_dense(), in_memory(plates)[batch.rows])

    def test_what_a_fetch_callback_reads_of_a_collection_is_made_dense(self, plates, in_memory):
        collection, expected = open_collection(plates), in_memory(plates)
        dataset = CellDataset(
            collection, BlockShuffling(4), 10, 2, fetch_callback=operator.getitem, dense=True
        )
        for batch in dataset:
            assert np.array_equal(batch.X.numpy(), expected[batch.rows])


class TestCopies:
    @pytest.mark.parametrize(
        "copy_", [copy.copy, copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))]
    )
    def test_deliver_the_same(self, plates, copy_):
        dataset = CellDataset(open_collection(plates), BlockShuffling(4), 10, 2)
        next(iter(dataset))
        duplicate = copy_(dataset)
        from_copy = [batch.rows.tolist() for batch in duplicate]
        dataset.set_epoch(1)
        assert [batch.rows.tolist() for batch in dataset] == from_copy


class TestSeeds:
    def test_are_drawn_anew_if_none_is_given(self, table):
        seeds = {CellDataset(table, BlockShuffling(4), 8).seed for _ in range(5)}
        assert len(seeds) == 5

    def test_must_be_given_for_several_ranks(self, table):
        with pytest.raises(ParameterError, match=r"`seed` must be given with world_size=2, .*; or"):
            CellDataset(table, BlockShuffling(4), 8, rank=0, world_size=2)


BAD_PARAMETERS = [
    *(
        ({name: value}, f"`{name}")
        for name in ("batch_size", "fetch_factor")
        for value in (0, -1, 2.0, float("nan"), True, np.True_, "2", None, np.array([2]))
    ),
    *(({"seed": value}, "`seed` must be an integer") for value in (0.5, float("nan"), True, "1")),
    ({"fetch_factor": 10**30}, r"`batch_size \* fetch_factor \* world_size <= 2\*\*62` must hold"),
    ({"batch_size": 2**59}, r"`batch_size \* fetch_factor \* world_size <= 2\*\*62` must hold"),
    *(
        ({name: "mean"}, f"`{name}` must be a function, but got 'mean'")
        for name in ("fetch_callback", "fetch_transform", "batch_callback", "batch_transform")
    ),
    ({"rank": 0}, "`rank` and `world_size` must be given together"),
    ({"world_size": 2}, "`rank` and `world_size` must be given together"),
    ({"rank": 0, "world_size": 0, "seed": 0}, "`world_size >= 1` must hold"),
    ({"rank": 2, "world_size": 2, "seed": 0}, "`0 <= rank < world_size` must hold"),
    ({"rank": -1, "world_size": 2, "seed": 0}, "`0 <= rank < world_size` must hold"),
    ({"rank": 0.5, "world_size": 2, "seed": 0}, "`rank` must be an integer"),
    ({"rank": 0, "world_size": 2.0, "seed": 0}, "`world_size` must be an integer"),
    ({"strategy": "blocks"}, "`strategy` must be a SamplingStrategy, but got 'blocks'"),
    ({"strategy": BlockShuffling}, "`strategy` must be a SamplingStrategy"),
    ({"strategy": Streaming(indices=[N_ROWS])}, f"`indices < {N_ROWS}`"),
    ({"collection": np.empty((0, 3))}, "the collection has no rows"),
    ({"collection": sp.csr_matrix((0, 3))}, "the collection has no rows"),
    ({"collection": None}, "an indexable must have a length, but got None; give it `__len__` or"),
    ({"collection": 5}, "an indexable must have a length, but got one of type int; give it"),
    ({"collection": np.array(5)}, "must have a length, but got one of type ndarray; give it"),
    ({"collection": (row for row in range(9))}, "must have a length, .* of type generator; give"),
    *(
        (
            {"collection": collection},
            f"a {kind} cannot be indexed by an array of row numbers; make it",
        )
        for kind, collection in {
            "list": [1, 2, 3],
            "tuple": (1, 2, 3),
            "range": range(9),
            "dict": {0: 1},
            "set": {1, 2},
            "DataFrame": pd.DataFrame({"a": [1, 2]}),
            "Series": pd.Series([1, 2], index=[1, 0]),
            "coo_matrix": sp.coo_matrix(np.eye(2)),
            "bsr_array": sp.bsr_array(np.eye(2)),
            "dia_array": sp.dia_array(np.eye(2)),
        }.items()
    ),
    (
        {"collection": MultiIndexable(np.arange(3), [1, 2, 3])},
        "a list cannot be indexed by an array",
    ),
]


@pytest.mark.parametrize(
    ("collection", "read"),
    [
        (range(100, 100 + N_ROWS), lambda values, rows: np.array([values[row] for row in rows])),
        (
            pd.DataFrame({"a": np.arange(100, 100 + N_ROWS)}),
            lambda table, rows: table["a"].iloc[rows].to_numpy(),
        ),
    ],
)
def test_anything_with_a_length_can_be_read_by_a_fetch_callback(collection, read):
    dataset = CellDataset(collection, BlockShuffling(4), 8, fetch_callback=read)
    assert sorted(np.concatenate(list(dataset))) == list(range(100, 100 + N_ROWS))


@pytest.mark.parametrize(("parameters", "problem"), BAD_PARAMETERS)
def test_bad_parameters(table, parameters, problem):
    defaults = {"collection": table, "strategy": BlockShuffling(4), "batch_size": 8}
    with pytest.raises(ParameterError, match=problem):
        CellDataset(**(defaults | parameters))


@pytest.mark.parametrize("epoch", [0.5, None, "1", True])
def test_bad_epoch(table, epoch):
    with pytest.raises(ParameterError, match="`epoch` must be an integer"):
        CellDataset(table, Streaming(), 8).set_epoch(epoch)


@pytest.mark.parametrize("path", ["plates.h5ad", Path("plates.h5ad")])
def test_a_path_is_not_a_collection(path):
    with pytest.raises(ParameterError, match="open it with `open_collection`"):
        CellDataset(path, Streaming(), 4)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(Streaming(), {"drop_last": True}), (BlockShuffling(16, drop_last=True), {})],
)
def test_an_epoch_without_minibatches_is_refused(strategy, options):
    with pytest.raises(ParameterError, match="none of 10 rows is left"):
        CellDataset(np.arange(10), strategy, 12, **options)


def test_cells_from_a_batch_callback_are_made_a_minibatch(plates):
    dataset = CellDataset(
        open_collection(plates),
        Streaming(),
        4,
        batch_callback=lambda cells, indices: cells[indices[::-1]],
    )
    assert next(iter(dataset)).rows.tolist() == [3, 2, 1, 0]
