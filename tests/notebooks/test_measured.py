"""What the notebooks measure and count, against the files: AnnLoader, storages, decompression."""

import anndata as ad
import h5py
import numpy as np
import pytest
import torch
from notebooks.figures import decoded_bytes_per_cell, storage_throughputs
from notebooks.figures._annloader import measure_annloader, open_annloader
from notebooks.figures._storage_throughputs import _settings, _Storage

from cellfeed import (
    BlockShuffling,
    CellfeedError,
    EpochPlan,
    ParameterError,
    Streaming,
    open_collection,
)

N_ROWS, N_VARS = 640, 10
N_CELLS, BATCH_SIZE = 4_500, 32


@pytest.mark.process
@pytest.mark.parametrize("shuffle", [True, False])
def test_annloader_is_measured(small_collection, shuffle):
    collection = open_collection(small_collection)
    measured = measure_annloader(collection, shuffle=shuffle, batch_size=BATCH_SIZE, seconds=0.1)
    assert measured.status == "timed"
    assert measured.failure == ""
    assert measured.cells_per_round == BATCH_SIZE
    assert measured.first_round_seconds is not None
    assert measured.first_minibatch_seconds is not None
    assert measured.first_round_seconds >= measured.first_minibatch_seconds


@pytest.mark.slow
def test_annloader_delivers_the_cells_in_order(small_collection):
    paths = open_collection(small_collection).files
    loader = open_annloader(paths, batch_size=BATCH_SIZE, shuffle=False, seed=0)
    X = [minibatch.X for minibatch in loader]
    assert {each.layout for each in X} == {torch.sparse_csr}
    delivered = np.concatenate([each.to_dense().numpy() for each in X])
    stored = np.concatenate([ad.read_h5ad(path).X.toarray() for path in paths])
    assert np.array_equal(delivered, stored[: len(stored) // BATCH_SIZE * BATCH_SIZE])


def plan_of(strategy, fetch_factor):
    return EpochPlan(
        strategy=strategy, n_rows=N_CELLS, batch_size=BATCH_SIZE, fetch_factor=fetch_factor
    )


def bytes_of_chunks(folder, plan, n_fetches):
    """Chunks up to the last element of a row in them, once for each fetch."""
    total = 0
    starts = np.arange(0, N_CELLS, 1_500)
    for number in range(n_fetches):
        rows = plan.delivered_rows(number, 1).ravel()
        for start, path in zip(starts, sorted(folder.glob("*.h5ad")), strict=True):
            here = rows[(rows >= start) & (rows < start + 1_500)] - start
            with h5py.File(path) as file:
                indptr = file["X/indptr"][:]
                elements = [np.arange(indptr[row], indptr[row + 1]) for row in here]
                for name in ("data", "indices"):
                    dataset = file["X"][name]
                    wanted = np.unique(np.concatenate([*elements, []]))
                    chunks, last = np.unique(wanted[::-1] // dataset.chunks[0], return_index=True)
                    ends = wanted[::-1][last] - chunks * dataset.chunks[0] + 1
                    total += int(ends.sum()) * dataset.dtype.itemsize
    return total


@pytest.mark.parametrize(
    ("strategy", "fetch_factor"),
    [(Streaming(), 1), (Streaming(), 8), (BlockShuffling(1), 2), (BlockShuffling(64), 4)],
)
def test_every_chunk_that_a_fetch_touches_counts_once(small_collection, strategy, fetch_factor):
    plan = plan_of(strategy, fetch_factor)
    found = decoded_bytes_per_cell(open_collection(small_collection), plan, n_cells=1_024)
    n_fetches = 1_024 // plan.fetch_size
    assert found == bytes_of_chunks(small_collection, plan, n_fetches) / 1_024


def test_an_epoch_without_a_whole_fetch_is_refused(small_collection):
    with pytest.raises(ParameterError, match="a fetch needs 6,400 cells, but there are 4,500"):
        decoded_bytes_per_cell(open_collection(small_collection), plan_of(Streaming(), 200))


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    np.save(folder / "data.npy", np.arange(N_ROWS * N_VARS, dtype=np.float32))
    np.save(folder / "indices.npy", np.tile(np.arange(N_VARS), N_ROWS))
    np.save(folder / "indptr.npy", np.arange(N_ROWS + 1) * N_VARS)
    np.save(folder / "shape.npy", np.array([N_ROWS, N_VARS]))
    return open_collection(folder)


@pytest.mark.process
def test_every_setting_is_measured(cells):
    table = storage_throughputs(
        cells, files=cells.files, block_sizes=[1, 16], fetch_factors=[1, 4], batch_size=16, runs=2,
        seconds=0.05,
    )  # fmt: skip
    settings = table[["strategy", "block_size", "fetch_factor"]].fillna(0).itertuples(index=False)
    assert set(map(tuple, settings)) == {
        *(("BlockShuffling", block, factor) for block in (1, 16) for factor in (1, 4)),
        ("Streaming", 0, 1), ("Streaming", 0, 4), ("random", 0, 0), ("stream", 0, 0),
    }  # fmt: skip
    assert (table["low"] <= table["cells_per_second"]).all()
    assert (table["cells_per_second"] <= table["high"]).all()
    assert set(table["cache"]) <= {"cold", "unknown"}


def first_values(X):
    """Return the first column of a SciPy array, or of a tensor."""
    return np.asarray(X.to_dense() if hasattr(X, "to_dense") else X.toarray())[:, 0]


@pytest.mark.slow
def test_loaders_deliver_whole_minibatches_of_all_cells_and_other_ones_with_another_seed(cells):
    orders = {}
    storage = _Storage(cells, None, files=cells.files, batch_size=16)
    for seed in (0, 1):
        for settings in _settings([16], [4], seed):
            first = [first_values(batch.X) // N_VARS for batch in storage.open(settings)]
            assert {each.shape for each in first} == {(16,)}
            assert sorted(np.concatenate(first)) == list(range(N_ROWS))
            orders[settings["strategy"], seed] = np.concatenate(first).tolist()
    assert orders["random", 0] != orders["random", 1]
    assert orders["BlockShuffling", 0] != orders["BlockShuffling", 1]
    assert orders["stream", 0] == orders["stream", 1] == list(range(N_ROWS))


def test_the_loader_of_torch_may_take_the_same_cells_from_elsewhere(cells):
    storage = _Storage(cells, np.arange(N_ROWS), files=cells.files, batch_size=16)
    opened = {each["strategy"]: storage.open(each) for each in _settings([16], [4], 0)}
    assert np.concatenate(list(opened["stream"])).tolist() == list(range(N_ROWS))
    assert next(iter(opened["Streaming"])).X.shape == (16, N_VARS)


@pytest.mark.process
def test_fewer_cells_than_a_fetch(cells):
    with pytest.raises(ParameterError, match="to be timed: 1 whole fetch"):
        storage_throughputs(
            cells, files=cells.files, block_sizes=[1], fetch_factors=[64], batch_size=16, runs=1
        )


@pytest.mark.process
def test_reading_that_fails(cells, tmp_path):
    for path in cells.files:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    np.save(tmp_path / "indices.npy", np.full(N_ROWS * N_VARS, N_VARS))
    damaged = open_collection(tmp_path)
    with pytest.raises(CellfeedError, match="have a column index outside"):
        storage_throughputs(
            damaged, files=damaged.files, block_sizes=[1], fetch_factors=[1], batch_size=16, runs=1
        )
