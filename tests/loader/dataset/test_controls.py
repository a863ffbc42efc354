"""Minibatches with controls; test_delivered.py compares them with the plan."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.dataset.in_turns import in_parts
from tests.loader.matrices import dense

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    ColumnError,
    MatchedControls,
    ParameterError,
    StateError,
    open_collection,
)
from cellfeed.stages import FetchStages

N, N_GENES, K = 300, 30, 2
# `LoaderInTurns` starts workers in its own way.
pytestmark = pytest.mark.filterwarnings("ignore:ranks are not compared:UserWarning")


@pytest.fixture(scope="module")
def adata():
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "drug": rng.choice(["DMSO", "a", "b"], N, p=[0.2, 0.4, 0.4]),
            "plate": np.repeat(["p", "q", "r"], N // 3),
        },
        index=[f"cell {k}" for k in range(N)],
    ).astype("category")
    X = sp.csr_matrix(rng.poisson(0.5, (N, N_GENES)).astype(np.float32))
    genes = pd.DataFrame(index=[f"g{k}" for k in range(N_GENES)])
    return ad.AnnData(X, obs, genes, obsm={"X_pca": rng.random((N, 3))})


@pytest.fixture(scope="module")
def collection(adata, tmp_path_factory):
    folder = tmp_path_factory.mktemp("controls")
    for plate in ("p", "q", "r"):
        adata[adata.obs["plate"] == plate].write_h5ad(folder / f"{plate}.h5ad")
    return open_collection(
        folder, obs=["drug", "plate"], elements=["X", "obsm/X_pca"], obs_names=True
    )


def dataset_of(collection, strategy=None, **options):
    if strategy is None:
        strategy = MatchedControls(BlockShuffling(4), "drug", "DMSO", "plate", k=K)
    sizes = {"batch_size": 8, "fetch_factor": 3, "seed": 0, "num_threads": 2}
    return CellDataset(collection, strategy, **sizes | options)


def check(minibatch, adata):
    """Compare cells and controls with the truth; return their rows."""
    rows, of_cells = np.asarray(minibatch.rows), np.asarray(minibatch.controls.rows).reshape(-1, K)
    for cells in (minibatch, minibatch.controls):
        assert np.array_equal(dense(cells.X), adata.X[np.asarray(cells.rows)].toarray())
    obs = adata.obs.to_numpy()
    assert minibatch.controls.controls is None
    assert (obs[of_cells, 0] == "DMSO").all()
    assert (obs[rows, 0] != "DMSO").all()
    assert (obs[of_cells, 1] == obs[rows, 1][:, None]).all()
    return [(row, *each) for row, each in zip(rows.tolist(), of_cells.tolist(), strict=True)]


@pytest.mark.slow
@settings(max_examples=5)
@given(data=st.data())
def test_stopped_and_resumed_on_other_ranks_and_workers(collection, adata, data):
    """Each cell once, with the controls that it has without a stop."""
    expected = sorted(pair for each in dataset_of(collection) for pair in check(each, adata))
    found, n_added = in_parts(
        data.draw,
        lambda rank, ranks: dataset_of(collection, rank=rank, world_size=ranks),
        most=25,
    )
    seen = [pair for each in found for pair in check(each, adata)]
    assert {*seen} == {*expected}
    assert len(seen) - len(expected) <= n_added


def test_memory_and_statistics_count_controls(collection):
    dataset = dataset_of(collection)
    alone = CellDataset(collection, BlockShuffling(4), batch_size=8, fetch_factor=3, seed=0)
    assert dataset.buffer_bytes == pytest.approx((1 + K) * alone.buffer_bytes, abs=K + 1)
    n = sum(len(each) for each in dataset)
    assert dataset.statistics().n_cells == n


def test_stages_read_a_minibatch_and_then_its_controls(collection):
    plan = dataset_of(collection).plan(epoch=0)
    with FetchStages(collection, batch_size=8) as stages:
        groups = stages.to_minibatches(stages.read(stages.plan(plan.fetch(0))))
    assert [len(each) for each in groups] == [8, 8 * K] * 3


def test_blocks_of_controls_are_neighbours(collection):
    """A fetch reads fewer runs of controls than with single ones."""

    def n_runs(block_size):
        strategy = MatchedControls(
            BlockShuffling(16), "drug", "DMSO", "plate", control_block_size=block_size
        )
        dataset = dataset_of(collection, strategy, fetch_factor=8)
        controls = np.flatnonzero(
            collection.obs["drug"].codes == [*collection.obs["drug"].categories].index("DMSO")
        )
        fetch = dataset.plan(epoch=0).fetch(0)
        places = np.searchsorted(controls, np.unique(fetch.rows[fetch.others]))
        return np.count_nonzero(np.diff(places) > 1) + 1

    assert n_runs(16) < n_runs(1) / 2


def test_refused(collection):
    strategy = MatchedControls(BlockShuffling(4), ["x", "y"] * (N // 2), "x")
    with pytest.raises(
        ParameterError, match=r"^controls and neighbours come beside .*got a ndarray; open it"
    ):
        dataset_of(np.zeros((N, 3)), strategy, num_threads=None)
    with pytest.raises(ParameterError, match=r"^controls and neighbours come beside the cells of "):
        dataset_of(collection, batch_callback=lambda cells, rows: cells[rows])
    with pytest.raises(ParameterError, match=r"^`fetch_transform` must return Cells .* is ndarray"):
        next(iter(dataset_of(collection, fetch_transform=lambda cells: cells["obsm/X_pca"])))
    with pytest.raises(ColumnError, match="no obs column 'dose'"):
        dataset_of(collection, MatchedControls(BlockShuffling(4), "drug", "DMSO", ["dose"]))
    with pytest.raises(ParameterError, match="not read yet"):
        MatchedControls(BlockShuffling(4), "drug", "DMSO").n_positions(N)
    other = dataset_of(collection, MatchedControls(BlockShuffling(4), "drug", "DMSO", "plate"))
    with pytest.raises(StateError, match="k=1 there, k=2 here"):
        dataset_of(collection).load_state_dict(other.state_dict())
    assert isinstance(next(iter(dataset_of(collection, as_torch=False))).controls, Cells)
