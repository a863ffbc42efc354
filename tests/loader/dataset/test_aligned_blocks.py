"""Blocks that begin where chunks do, read from files: which cells come, and how often chunks do."""

import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.loader.matrices import rows_of

from cellfeed import BlockShuffling, CellDataset, Collection, StateError, open_collection
from cellfeed.stages import FetchStages

N_GENES = 60
ALIGNED = BlockShuffling(5, align="chunks")


def cells(n_cells: int, seed: int, mean: float) -> sp.csr_matrix:
    """Sparse cells, some of which have no value."""
    counts = np.random.default_rng(seed).poisson(mean, (n_cells, N_GENES)).astype(np.float32)
    counts[10::11] = 0
    return sp.csr_matrix(counts)


@pytest.fixture(scope="module")
def folder(write_h5ad: Any, new_folder: Callable[[], Path]) -> dict[str, list[Path]]:
    """Files whose chunks differ in size, from parts of a cell to many cells."""

    def chunked(matrix: Any, data: int, indices: int) -> Path:
        path: Path = write_h5ad(matrix, chunks={"X/data": data, "X/indices": indices})
        return path

    def dense(matrix: Any, *chunk: int) -> Path:
        path: Path = write_h5ad(matrix.toarray(), chunks={"X": chunk})
        return path

    store = new_folder() / "cells.zarr"
    with warnings.catch_warnings(), ad.settings.override(zarr_write_format=3):
        warnings.simplefilter("ignore")  # what zarr and anndata say when stores are written
        ad.AnnData(cells(45, 7, 0.5)).write_zarr(store)
        root: Any = zarr.open_group(store, mode="r+", use_consolidated=False)
        for name in ("X/data", "X/indices"):
            values = np.asarray(root[name][:])
            del root[name]
            root.create_array(name, data=values, chunks=(120,), shards=(480,))
        zarr.consolidate_metadata(store)
    return {
        "sparse": [
            chunked(cells(80, 0, 0.6), 200, 200),
            chunked(cells(1, 1, 0.6), 10, 10),
            chunked(cells(47, 2, 0.3), 13, 13),
            chunked(cells(60, 3, 0.6), 150, 90),
        ],
        "dense": [dense(cells(70, 4, 0.5), 7, 60), dense(cells(33, 5, 0.5), 16, 11)],
        "zarr": [store],
        "mixed": [chunked(cells(50, 6, 0.6), 300, 300), write_h5ad(cells(40, 8, 0.6))],
    }


@pytest.fixture(scope="module")
def opened(folder) -> dict[str, Collection]:
    return {name: open_collection(paths) for name, paths in folder.items()}


@pytest.fixture(scope="module")
def expected(folder, in_memory) -> dict[str, NDArray[np.float32]]:
    made = {name: in_memory(paths) for name, paths in folder.items() if name != "zarr"}
    return made | {"zarr": ad.read_zarr(folder["zarr"][0]).X.toarray()}


@pytest.mark.slow
@given(data=st.data())
@pytest.mark.parametrize("kind", ["sparse", "dense", "zarr", "mixed"])
def test_each_cell_comes_once_an_epoch(opened, expected, kind, data):
    n = len(opened[kind])
    some = st.sets(st.integers(0, n - 1), min_size=1).map(sorted)
    indices = data.draw(st.none() | some)
    strategy = BlockShuffling(data.draw(st.integers(1, 30)), indices, align="chunks")
    n_ranks, epoch = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    sizes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    found = Counter[int]()
    lengths = set()
    for rank in range(n_ranks):
        dataset = CellDataset(
            opened[kind], strategy, *sizes, rank=rank, world_size=n_ranks, seed=epoch
        )
        rows = rows_of(iter(dataset), expected[kind])
        lengths.add(len(rows))
        found.update(rows)
    assert len(lengths) == 1
    assert set(found) == set(range(n) if indices is None else indices)
    assert found.total() - len(found) < n_ranks


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_deliver_the_same(opened, expected, context):
    dataset = CellDataset(opened["sparse"], ALIGNED, 8, 2, seed=3)
    alone = rows_of(iter(dataset), expected["sparse"])
    dataset.set_epoch(0)
    loader = dataset.loader(num_workers=2, multiprocessing_context=context)
    assert sorted(rows_of(iter(loader), expected["sparse"])) == sorted(alone)


@pytest.mark.parametrize("n_before", [1, 5, 11])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_run_goes_on_where_it_was_stopped(opened, expected, n_before, n_ranks):
    def dataset(rank: int, world_size: int) -> CellDataset:
        return CellDataset(
            opened["sparse"], ALIGNED, 8, 2, rank=rank, world_size=world_size, seed=4
        )

    stopped = dataset(0, 1)
    minibatches = iter(stopped)
    done = rows_of((next(minibatches) for _ in range(n_before)), expected["sparse"])
    state = stopped.state_dict()
    rest = rows_of(minibatches, expected["sparse"])
    found = []
    for rank in range(n_ranks):
        resumed = dataset(rank, n_ranks)
        resumed.load_state_dict(state)
        found.append(rows_of(iter(resumed), expected["sparse"]))
    if n_ranks == 1:
        assert found == [rest]
    assert {row for rows in found for row in rows} == set(rest)
    assert sorted(done + rest) == list(range(len(opened["sparse"])))


def test_a_state_is_of_these_chunks(opened, folder):
    state = CellDataset(opened["sparse"], ALIGNED, 8, seed=0).state_dict()
    for strategy in (BlockShuffling(5), BlockShuffling(6, align="chunks")):
        with pytest.raises(StateError, match=r"align|block_size"):
            CellDataset(opened["sparse"], strategy, 8).load_state_dict(state)
    again = open_collection(folder["sparse"])
    resumed = CellDataset(again, ALIGNED, 8)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state


def test_a_strategy_is_bound_anew_to_another_collection(write_h5ad):
    X = sp.csr_matrix(np.ones((60, 5), np.float32))
    small, large = (
        open_collection(write_h5ad(X, chunks={"X/data": size, "X/indices": size}))
        for size in (10, 100)
    )
    strategy = BlockShuffling(2, align="chunks").bound_to(small)
    assert strategy.bound_to(small) is strategy
    assert strategy.block_sizes(60).mean == 2
    assert strategy.bound_to(large).block_sizes(60).mean == 20


def amplification(
    dataset: CellDataset, indptr: NDArray[np.int64], chunk: int
) -> tuple[float, float]:
    """Return how many elements are read for each that is delivered, by fetches.

    Of whole chunks, and of parts of them up to the last element that is wanted.
    """
    plan = dataset.plan(epoch=0)
    n_chunks, in_heads, n_elements = 0, 0, 0
    with FetchStages(dataset.collection, dataset.batch_size) as stages:
        for number in range(plan.n_fetches):
            fetch = plan.fetch(number)
            wanted = np.concatenate([np.arange(indptr[row], indptr[row + 1]) for row in fetch.rows])
            chunks, last = np.unique(wanted[::-1] // chunk, return_index=True)
            n_chunks += chunks.size
            in_heads += int((wanted[::-1][last] % chunk + 1).sum())
            n_elements += wanted.size
            volume = stages.volume(stages.plan(fetch))
            assert volume is not None
            assert volume.n_chunks == 2 * chunks.size  # of values, and of column indices
    return n_chunks * chunk / n_elements, in_heads / n_elements


@pytest.fixture(scope="module")
def many(write_h5ad) -> tuple[Collection, NDArray[np.int64]]:
    """6,000 cells of some 100 values each, of which 10 begin in each chunk."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(60, 140, 6_000)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.concatenate([np.sort(rng.permutation(300)[:n]) for n in lengths])
    values = rng.integers(1, 9, indices.size).astype(np.float32)
    X = sp.csr_matrix((values, indices, indptr), (6_000, 300))
    path = write_h5ad(X, chunks={"X/data": 1_000, "X/indices": 1_000})
    return open_collection(path), indptr


@pytest.mark.parametrize("block_size", [10, 16, 25, 64])
def test_each_chunk_is_read_about_once_an_epoch(many, block_size):
    collection, indptr = many
    (whole, heads), (whole_aligned, heads_aligned) = (
        amplification(
            CellDataset(collection, BlockShuffling(block_size, align=align), 64, 16, seed=0),
            indptr,
            1_000,
        )
        for align in (None, "chunks")
    )
    assert heads_aligned <= 1.08
    # A block that is not aligned begins inside of a chunk, which is read from its head.
    assert heads - 1 > 4 * (heads_aligned - 1)
    assert whole_aligned < 1.02 * whole  # as the last cell goes on in another


@pytest.mark.parametrize("block_size", [3, 10, 25])
def test_each_chunk_of_dense_rows_is_read_once_an_epoch(write_h5ad, block_size):
    path = write_h5ad(np.ones((1_005, 4), np.float32), chunks={"X": (10, 4)})
    collection = open_collection(path)
    dataset = CellDataset(collection, BlockShuffling(block_size, align="chunks"), 15, 5, seed=0)
    plan = dataset.plan(epoch=0)
    with FetchStages(collection, 15) as stages:
        fetches = [plan.fetch(number) for number in range(plan.n_fetches)]
        volumes = [stages.volume(stages.plan(each)) for each in fetches]
    n_read = sum(each.n_chunks for each in volumes if each is not None)
    assert 101 <= n_read < 101 + plan.n_fetches  # once more where a fetch ends inside of a block


@pytest.mark.parametrize("is_stored", [False, True])
def test_without_chunks_the_order_is_that_of_blocks_that_are_not_aligned(write_h5ad, is_stored):
    """As any row may begin a block."""
    matrix = cells(64, 0, 0.5)
    collection = open_collection(write_h5ad(matrix) if is_stored else ad.AnnData(matrix))
    unaligned, aligned = (
        CellDataset(collection, BlockShuffling(5, align=align), 8, 2, seed=0)
        for align in (None, "chunks")
    )
    assert unaligned.state_dict() == aligned.state_dict()
    for one, other in zip(unaligned, aligned, strict=True):
        assert one.rows.tolist() == other.rows.tolist()


def test_row_pointers_are_not_pickled_with_the_strategy(many):
    collection, _ = many
    strategy = ALIGNED.bound_to(collection)
    assert len(pickle.dumps(strategy)) < 4_000
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.block_sizes(6_000) == strategy.block_sizes(6_000)
