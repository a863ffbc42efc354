"""Datasets of any indexable: their minibatches, their callbacks, and what they refuse."""

import copy
import itertools
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from anndata.experimental import AnnCollection

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    Minibatch,
    ParameterError,
    ReadOptions,
    SamplingStrategy,
    Streaming,
    open_collection,
)
from cellfeed.sampling import EpochOrder
from cellfeed.transforms import Log1p

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


INDEXABLES: dict[str, Callable[[np.ndarray, ad.AnnData, Path], Any]] = {
    "ndarray": lambda table, adata, folder: table,
    "one-dimensional": lambda table, adata, folder: np.arange(N_ROWS),
    "memmap": lambda table, adata, folder: memory_map(table, folder),
    "csr_matrix": lambda table, adata, folder: sp.csr_matrix(table),
    "csr_array": lambda table, adata, folder: sp.csr_array(table),
    "AnnData": lambda table, adata, folder: adata,
    "backed AnnData": lambda table, adata, folder: backed(folder, adata)[0],
    "AnnCollection": lambda table, adata, folder: AnnCollection(
        [adata[:20].copy(), adata[20:].copy()]
    ),
    "AnnCollection of backed": lambda table, adata, folder: AnnCollection(
        backed(folder, adata[:20], adata[20:])
    ),
    "like a list": lambda table, adata, folder: RowsOfText(),
    "tensor": lambda table, adata, folder: torch.from_numpy(table),
}


def backed(folder, *parts):
    paths = [folder / f"{number}.h5ad" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        part.copy().write_h5ad(path)
    return [ad.read_h5ad(path, backed="r") for path in paths]


def memory_map(table, folder):
    table.tofile(folder / "table")
    return np.memmap(folder / "table", dtype=np.float32, mode="r", shape=table.shape)


@pytest.fixture
def indexable(request, table, adata, tmp_path):
    return INDEXABLES[request.param](table, adata, tmp_path)


@pytest.mark.parametrize("indexable", INDEXABLES, indirect=True)
def test_memory_of_an_indexable_is_unknown(indexable):
    assert CellDataset(indexable, Streaming(), 4).buffer_bytes == 0


@pytest.mark.parametrize("indexable", INDEXABLES, indirect=True)
def test_minibatches_follow_the_plan(indexable):
    dataset = CellDataset(indexable, BlockShuffling(4), 8, 3, seed=1)
    plan = dataset.plan(epoch=0)
    batches = [numbers_in(batch) for batch in dataset]
    expected = np.concatenate([plan.delivered_rows(n)[0] for n in range(plan.n_fetches)])
    assert [number for batch in batches for number in batch] == expected.tolist()
    assert list(map(len, batches)) == [8] * 6 + [2]
    assert len(dataset) == 7


class TestCallbacks:
    @pytest.fixture
    def calls(self) -> list[tuple[Any, ...]]:
        return []

    def test_over_a_collection(self, plates, in_memory, calls):
        """A whole fetch comes as cells in NumPy, a minibatch as tensors."""

        def fetch_transform(cells):
            calls.append(("fetch", type(cells), len(cells)))
            return Cells({"X": cells.X * 2}, {"twice": 2 * cells.obs["number"]}, cells.rows)

        def batch_transform(batch):
            calls.append(("batch", type(batch), len(batch)))
            return batch

        dataset = CellDataset(
            *(open_collection(plates, obs=["number"]), Streaming(), 40, 1),
            fetch_transform=fetch_transform,
            batch_transform=batch_transform,
        )
        batches = list(dataset)
        kinds = [("fetch", Cells), ("batch", Minibatch)]
        assert calls == [(*kind, n) for n in (40, 23) for kind in kinds]
        for batch in batches:
            assert np.array_equal(batch.X.to_dense(), 2 * in_memory(plates)[batch.rows])
            assert np.array_equal(batch.obs["twice"], 2 * batch.rows)


class TestTransformThreads:
    def test_so_many_run_at_once(self, plates):
        """After the first, each waits for two others, which come only if three threads run it."""
        together, first = threading.Barrier(3, timeout=600), itertools.count()

        def meet(minibatch):
            if next(first):
                together.wait()
            return threading.current_thread().name

        collection = open_collection(plates)
        options: dict[str, Any] = {"batch_transform": meet, "transform_threads": 3}
        names = list(CellDataset(collection, BlockShuffling(4), 5, 2, **options))
        assert len(names) == 13
        assert len(set(names[1:])) == 3
        assert all(name.startswith("cellfeed-transform") for name in names)

    @pytest.mark.parametrize("is_collection", [False, True])
    def test_an_error_comes_in_its_place(self, plates, is_collection):
        def rows_of(minibatch):
            return (minibatch.rows if is_collection else minibatch).tolist()

        def refuse(minibatch):
            if 30 in rows_of(minibatch):
                raise ValueError("no thirty")
            return minibatch

        collection = open_collection(plates) if is_collection else np.arange(63)
        before = [*map(rows_of, CellDataset(collection, BlockShuffling(4), 5, 2, seed=0))]
        options: dict[str, Any] = {"batch_transform": refuse, "transform_threads": 2}
        refusing = CellDataset(collection, BlockShuffling(4), 5, 2, seed=0, **options)
        found: list[list[int]] = []
        with pytest.raises(ValueError, match="no thirty"):
            found.extend(map(rows_of, refusing))
        assert found == before[: next(k for k, rows in enumerate(before) if 30 in rows)]


@pytest.mark.parametrize("copy_", [copy.copy, copy.deepcopy])
def test_copies_deliver_the_same(plates, copy_):
    dataset = CellDataset(open_collection(plates), BlockShuffling(4), 10, 2)
    next(iter(dataset))
    duplicate = copy_(dataset)
    from_copy = [batch.rows.tolist() for batch in duplicate]
    dataset.set_epoch(1)
    assert [batch.rows.tolist() for batch in dataset] == from_copy


def test_seeds_are_drawn_anew_if_none_is_given(table):
    uses: list[Any] = [list, CellDataset.peek, CellDataset.state_dict]
    uses.append(lambda each: each.plan(epoch=0))
    datasets = [CellDataset(table, BlockShuffling(4), 8) for _ in uses]
    assert {each.seed for each in datasets} == {None}  # not fixed by looking at it
    for use, each in zip(uses, datasets, strict=True):
        use(each)
    assert len({each.seed for each in datasets} - {None}) == len(uses)


HOW_TO_READ = {
    "dense": True,
    "dtype": "float64",
    "transform": Log1p(),
    "read_options": ReadOptions(num_threads=2),
}
BAD_PARAMETERS = [
    *(
        ({name: value}, f"`{name}")
        for name in ("batch_size", "fetch_factor")
        for value in (0, -1, 2.0, float("nan"), True, np.True_, "2", None, np.array([2]))
    ),
    *(({"seed": value}, "`seed` must be an integer") for value in (0.5, float("nan"), True, "1")),
    ({"seed": -1}, "`seed >= 0` must hold, but got seed=-1"),
    ({"read_options": {"prefetch": 2}}, "`read_options`"),
    (
        {"fetch_factor": 10**30},
        r"`batch_size \* fetch_factor` of all streams must be at most",
    ),
    ({"batch_size": 2**59}, r"`batch_size \* fetch_factor` of all streams must be at most"),
    *(
        ({name: "mean"}, f"`{name}` must be a function, but got 'mean'")
        for name in ("fetch_transform", "batch_transform")
    ),
    *(
        (given, "`rank` and `world_size` must be given together, .*; give both, or neither")
        for given in ({"rank": 0}, {"world_size": 2})
    ),
    ({"batch_transform": len, "transform_threads": -1}, "`transform_threads >= 1` must hold"),
    ({"rank": 0, "world_size": 2}, "`seed` must be given with world_size=2, "),
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
        {"collection": [1, 2, 3]},
        "a list cannot be indexed by an array",
    ),
    *(
        ({"collection": path}, "open it with `open_collection`")
        for path in ("plates.h5ad", Path("plates.h5ad"))
    ),
    *(
        ({"collection": np.arange(10), "batch_size": 12} | given, "none of 10 rows is left")
        for given in (
            {"strategy": Streaming(), "drop_last": True},
            {"strategy": BlockShuffling(16, drop_last=True)},
        )
    ),
    # How files are read is of no effect where cellfeed does not read them.
    *(
        (
            {"collection": indexable, name: value},
            re.escape(f"got {name}={value!r} with an ") + f".* type {type(indexable).__name__};",
        )
        for name, value in HOW_TO_READ.items()
        for indexable in (
            np.ones((20, 3), np.float32),
            torch.ones(20, 3),
            sp.csr_matrix(np.ones((20, 3))),
            ad.AnnData(np.ones((20, 3))),
        )
    ),
    (
        {"dense": True, "dtype": np.float32, "transform": Log1p()},
        r"dense=True, dtype='float32', transform=Log1p\(\) with",
    ),
]


@pytest.mark.parametrize(("parameters", "problem"), BAD_PARAMETERS)
def test_bad_parameters(table, parameters, problem):
    defaults = {"collection": table, "strategy": BlockShuffling(4), "batch_size": 8}
    with pytest.raises(ParameterError, match=problem):
        CellDataset(**(defaults | parameters))


@pytest.mark.parametrize("epoch", [0.5, None, "1", True])
def test_bad_epoch(table, epoch):
    with pytest.raises(ParameterError, match="`epoch` must be an integer"):
        CellDataset(table, Streaming(), 8).set_epoch(epoch)


@pytest.mark.parametrize(("batch_size", "fetch_factor"), [(8, 2), (10**6, 1), (1, 10**6)])
@pytest.mark.parametrize("is_dense", [False, True])
def test_fetches_that_do_not_fit(tmp_path, monkeypatch, batch_size, fetch_factor, is_dense):
    path = tmp_path / "wide.h5ad"
    ad.AnnData(sp.eye_array(100, 10_000, dtype=np.float32, format="csr")).write_h5ad(path)
    monkeypatch.setattr("cellfeed.dataset._parameters.usable_memory_bytes", lambda: 30_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CellDataset(
            open_collection(path), BlockShuffling(4), batch_size, fetch_factor, dense=is_dense
        )
    texts = [str(each.message) for each in caught]
    expected = r"fetches take about \d+ MB of memory, but 0 MB are available; choose a smaller .*"
    assert len(texts) == is_dense
    assert all(re.fullmatch(expected, text) for text in texts)


class Again(SamplingStrategy):
    """So many cells, all of them again and again."""

    shuffles_fetch = False

    def __init__(self, n: int) -> None:
        self.n = n

    def n_positions(self, n_rows: int) -> int:
        del n_rows
        return self.n

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        del epoch_key
        return lambda positions: positions % n_rows


def test_fetches_that_no_machine_holds_are_refused_before_anything_is_read(plates):
    """By what an epoch has: larger numbers than that are allowed, and mean the whole epoch."""
    collection = open_collection(plates)
    n = len(collection)
    dataset = CellDataset(collection, Streaming(), 10**9, 10**6)
    assert [len(each) for each in dataset] == [n]
    drawn = Again(10**11)
    expected = r"fetches take about [\d,]+ MB of memory, but this machine has [\d,]+ MB; choose a"
    for batch_size, fetch_factor in ((10**11, 1), (64, 10**9)):
        with pytest.raises(ParameterError, match=expected):
            CellDataset(collection, drawn, batch_size, fetch_factor)
    assert CellDataset(collection, drawn, 64, 2).fetch_size == 128


def test_read_options_of_another_type(plates):
    wrong: Any = {"prefetch": 2}
    with pytest.raises(ParameterError, match=r"`read_options` must be ReadOptions, but got \{"):
        CellDataset(open_collection(plates), Streaming(), 8, read_options=wrong)
