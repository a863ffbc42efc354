"""The grid of block size and fetch factor over cells in any storage."""

import numpy as np
import pytest
from notebooks.figures import storage_throughputs
from notebooks.figures._storage_throughputs import _settings, _Storage

from cellfeed import CellfeedError, ParameterError, open_collection

N_ROWS, N_VARS = 640, 10


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    np.save(folder / "data.npy", np.arange(N_ROWS * N_VARS, dtype=np.float32))
    np.save(folder / "indices.npy", np.tile(np.arange(N_VARS), N_ROWS))
    np.save(folder / "indptr.npy", np.arange(N_ROWS + 1) * N_VARS)
    np.save(folder / "shape.npy", np.array([N_ROWS, N_VARS]))
    return open_collection(folder)


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


def test_fewer_cells_than_a_fetch(cells):
    with pytest.raises(ParameterError, match="to be timed: 1 whole fetch"):
        storage_throughputs(
            cells, files=cells.files, block_sizes=[1], fetch_factors=[64], batch_size=16, runs=1
        )


def test_reading_that_fails(cells, tmp_path):
    for path in cells.files:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    np.save(tmp_path / "indices.npy", np.full(N_ROWS * N_VARS, N_VARS))
    damaged = open_collection(tmp_path)
    with pytest.raises(CellfeedError, match="have a column index outside"):
        storage_throughputs(
            damaged, files=damaged.files, block_sizes=[1], fetch_factors=[1], batch_size=16, runs=1
        )
