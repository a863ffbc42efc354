"""Minibatches hold the cells of the plan, and controls: however made, whichever process reads."""

import pickle
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.dataset.stopped import in_parts
from tests.loader.matrices import dense
from tests.loader.read_options import parameters_of
from torch.utils.data import DataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    ColumnError,
    InterleavedDatasets,
    Minibatch,
    ParameterError,
    StateError,
    Streaming,
    open_collection,
)
from cellfeed.stages import FetchStages
from cellfeed.transforms import Log1p

MatchedControls = pytest.importorskip("cellfeed.perturbation").MatchedControls
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
N, N_GENES, K = 240, 900, 2


def same(value):
    return value


STRATEGIES = {
    "cells": BlockShuffling(4),
    "cells and controls": MatchedControls(BlockShuffling(4), "drug", "DMSO", "plate", k=K),
}
IN_THREADS = {"batch_transform": same, "transform_threads": 3}
WAYS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"dense": True},
    "float64": {"dtype": "float64"},
    "float16": {"dense": True, "dtype": "float16"},
    "NumPy": {"as_torch": False},
    "dense, NumPy": {"as_torch": False, "dense": True},
    "transformed": {"transform": Log1p()},
    "by a function of fetches": {"fetch_transform": same},
    "dense, by a function of fetches": {"fetch_transform": same, "dense": True},
    "by a function": {"batch_transform": same},
    "by a function in threads": IN_THREADS,
    "dense, by a function in threads": {"dense": True, **IN_THREADS},
    "ahead": {"prefetch": 3},
}


@pytest.fixture(scope="module")
def adata():
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "drug": pd.Categorical(rng.choice(["DMSO", "a", "b"], N, p=[0.2, 0.4, 0.4])),
            "plate": pd.Categorical(np.repeat(["p", "q", "r"], N // 3)),
            "number": np.arange(N, dtype=np.float64),
        },
        index=[f"cell {k}" for k in range(N)],
    )
    X = sp.csr_matrix(rng.poisson(0.3, (N, N_GENES)).astype(np.float32))
    genes = pd.DataFrame(index=[f"g{k}" for k in range(N_GENES)])
    return ad.AnnData(X, obs, genes, obsm={"X_pca": rng.random((N, 3), np.float32)})


@pytest.fixture(scope="module")
def folder(adata, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    for plate in ("p", "q", "r"):
        part = adata[adata.obs["plate"] == plate]
        part.write_h5ad(folder / f"{plate}.h5ad", compression="gzip")
    return folder


@pytest.fixture(scope="module")
def collection(folder):
    elements = ["X", "obsm/X_pca"]
    return open_collection(
        folder, obs=["drug", "plate", "number"], elements=elements, obs_names=True
    )


def dataset_of(collection, strategy="cells", **options):
    """Over a strategy, which may be given by its name."""
    sizes = {"batch_size": 32, "fetch_factor": 3, "seed": 0, "num_threads": 2}
    return CellDataset(
        collection, STRATEGIES.get(strategy, strategy), **parameters_of(sizes | options)
    )


def check(minibatch, adata, options):
    """Compare a minibatch, and its controls, with the cells in memory; return their rows."""
    controls = minibatch.controls
    for cells in (minibatch, controls) if controls is not None else (minibatch,):
        rows, X = np.asarray(cells.rows), cells.X
        dtype = options.get("dtype", "float32")
        expected = adata.X[rows].toarray().astype(dtype)
        if options.get("as_torch", True):
            assert type(cells) is Minibatch
            is_dense = X.layout == torch.strided
            assert X.is_contiguous() if is_dense else X.layout == torch.sparse_csr
        else:
            assert type(cells) is Cells
            is_dense = isinstance(X, np.ndarray)
            assert is_dense or isinstance(X, sp.csr_array)
        assert is_dense == options.get("dense", False)
        assert dense(X).dtype == expected.dtype
        if "transform" in options:
            np.testing.assert_allclose(dense(X), np.log1p(expected), rtol=1e-6)
        else:
            assert np.array_equal(dense(X), expected)
        assert np.array_equal(cells["obsm/X_pca"], adata.obsm["X_pca"][rows].astype(dtype))
        assert cells.obs_names.dtype == object
        assert cells.obs_names.tolist() == adata.obs_names[rows].tolist()
        assert np.array_equal(cells.obs["number"], rows)
        assert np.array_equal(cells.obs["drug"], adata.obs["drug"].cat.codes.iloc[rows])
    rows = np.asarray(minibatch.rows)[:, None]
    if controls is not None:
        assert controls.controls is None
        own = np.asarray(controls.rows).reshape(-1, K)
        drug, plate = adata.obs["drug"].to_numpy(), adata.obs["plate"].to_numpy()
        assert (drug[own] == "DMSO").all()
        assert (drug[rows] != "DMSO").all()
        assert (plate[own] == plate[rows]).all()
        rows = np.hstack([rows, own])
    return rows.tolist()


def planned(dataset, epoch=0):
    """The minibatches of an epoch: rows, each followed by those of its controls."""
    plan, found = dataset.plan(epoch=epoch), list[list[list[int]]]()
    for fetch in map(plan.fetch, range(plan.n_fetches)):
        rows = fetch.rows[fetch.order][:, None]
        if fetch.companions is not None:
            rows = np.hstack([rows, fetch.rows[fetch.companions]])
        found += [rows[k : k + 32].tolist() for k in range(0, len(rows), 32)]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_in_this_process(collection, adata, way, strategy):
    """Also where a state of another way is loaded, of which none knows."""
    options = WAYS[way]
    dataset = dataset_of(collection, strategy, **options)
    kept = list(dataset)  # which do not lie in buffers that are used again
    found = [check(each, adata, options) for each in kept]
    assert found == planned(dataset)
    assert [check(each, adata, options) for each in dataset.loader()] == planned(dataset, 1)
    treated = adata.obs["drug"] != "DMSO" if strategy != "cells" else np.ones(N, bool)
    assert sorted(row for each in found for row, *_ in each) == np.flatnonzero(treated).tolist()
    transform = options.get("transform")  # which a state knows
    stopped = dataset_of(collection, strategy, transform=transform)
    iterator = iter(stopped)
    for _ in range(2):
        next(iterator)
    dataset.load_state_dict(stopped.state_dict())
    assert [check(each, adata, options) for each in dataset] == found[2:]


@pytest.mark.process
@pytest.mark.parametrize(
    ("way", "strategy", "context"),
    [
        pytest.param("sparse", "cells", "fork", marks=pytest.mark.smoke),
        ("dense", "cells", "fork"),
        *((way, "cells and controls", "fork") for way in WAYS),
        ("dense", "cells and controls", "forkserver"),
        pytest.param("sparse", "cells and controls", "spawn", marks=pytest.mark.slow),
    ],
)
def test_from_workers(collection, adata, way, strategy, context):
    """What is kept does not change, and they go on where they were stopped."""
    options = WAYS[way]
    dataset = dataset_of(collection, strategy, **options)
    n = 1 if context == "spawn" else 2  # each of which imports for itself
    loader = dataset.loader(n, multiprocessing_context=context)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(2)]
    state = loader.state_dict()
    kept += iterator
    del iterator
    found = [check(each, adata, options) for each in kept]
    assert sorted(found) == sorted(planned(dataset))
    if context != "spawn":  # which takes seconds
        loader.load_state_dict(state)
        assert [check(each, adata, options) for each in loader] == found[2:]


@pytest.mark.process
def test_from_another_data_loader(collection, adata):
    dataset = dataset_of(collection)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        found = [check(each, adata, {}) for each in loader]
        assert sorted(found) == sorted(planned(dataset, epoch))


@pytest.mark.process
def test_of_several_datasets(collection, adata):
    parts = [dataset_of(collection, dense=dense) for dense in (False, True)]
    for loader in (InterleavedDatasets(parts), InterleavedDatasets(parts).loader(2)):
        found = {False: list[Any](), True: list[Any]()}
        for each in loader:
            is_dense = each.X.layout == torch.strided
            found[is_dense].append(check(each, adata, {"dense": is_dense}))
        for of_one in found.values():
            assert sorted(row for each in of_one for (row,) in each) == [*range(N)]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_arrays_come_as_they_are(workers):
    dataset = CellDataset(np.arange(64), Streaming(), 8, 2, as_torch=False)
    for loader in (dataset.loader(workers), InterleavedDatasets([dataset]).loader(workers)):
        minibatches = list(loader)
        assert all(type(each) is np.ndarray for each in minibatches)
        assert sorted(np.concatenate(minibatches).tolist()) == list(range(64))


def test_values_that_torch_does_not_have(tmp_path):
    values = np.arange(40, dtype=np.longdouble).reshape(8, 5)
    ad.AnnData(values).write_h5ad(tmp_path / "long.h5ad")
    collection = open_collection(tmp_path / "long.h5ad")
    dataset = CellDataset(collection, Streaming(), 4, 2, as_torch=False)
    assert np.array_equal(np.concatenate([cells.X for cells in dataset]), values)


def test_copies_on_devices_and_in_pickles(collection, adata):
    minibatch = next(iter(dataset_of(collection, "cells and controls")))
    rows = check(minibatch, adata, {})
    for each in (minibatch.to("cpu"), pickle.loads(pickle.dumps(minibatch))):
        assert check(each, adata, {}) == rows
    assert check(minibatch.to("cpu", dense=True), adata, {"dense": True}) == rows
    assert minibatch.to("meta").controls.obs["drug"].device.type == "meta"


class TestNamesOfCells:
    def test_in_any_order(self, collection, adata):
        rows = np.random.default_rng(1).integers(0, N, 50)
        for some in (rows, rows[:0]):
            names = collection[some].obs_names
            assert names.tolist() == adata.obs_names[some].tolist()

    def test_are_no_part_of_a_state(self, folder):
        with_names, without = (
            dataset_of(open_collection(folder, obs_names=each)) for each in (True, False)
        )
        assert with_names.state_dict() == without.state_dict()
        assert next(iter(without)).obs_names is None

    def test_are_wanted_or_not(self, folder):
        with pytest.raises(ParameterError, match=r"`obs_names` must be True or False.*in `obs`$"):
            open_collection(folder, obs_names=["plate"])  # type: ignore[arg-type]


class TestControls:
    @pytest.mark.slow
    @settings(max_examples=5)
    @given(data=st.data())
    def test_stopped_and_resumed_on_other_ranks_and_workers(self, collection, adata, data):
        """Each cell once, with the controls that it has without a stop."""

        def dataset(rank=0, n_ranks=1):
            ranks = {"rank": rank, "world_size": n_ranks}
            return dataset_of(collection, "cells and controls", batch_size=8, **ranks)

        def rows_of(minibatches):
            return [tuple(row) for each in minibatches for row in check(each, adata, {})]

        expected = rows_of(dataset())
        found, n_added = in_parts(data.draw, dataset, most=25)
        seen = rows_of(found)
        assert {*seen} == {*expected}
        assert len(seen) - len(expected) <= n_added

    def test_count_in_memory_and_statistics(self, collection):
        dataset = dataset_of(collection, "cells and controls")
        n_rows = min(2 * dataset.fetch_size, dataset.strategy.n_positions(len(collection)))
        expected = n_rows * (1 + K) * collection.mean_row_bytes()
        assert dataset.buffer_bytes == pytest.approx(expected, abs=1)
        n = sum(len(each) for each in dataset)
        assert dataset.statistics().n_cells == n

    def test_are_read_by_stages_after_their_minibatch(self, collection):
        plan = dataset_of(collection, "cells and controls", batch_size=8).plan(epoch=0)
        with FetchStages(collection, batch_size=8) as stages:
            groups = stages.to_minibatches(stages.read(stages.plan(plan.fetch(0))))
        assert [len(each) for each in groups] == [8, 8 * K] * 3

    def test_of_blocks_are_neighbours(self, collection, adata):
        """A fetch reads fewer runs of controls than with single ones."""

        def n_runs(block_size):
            strategy = MatchedControls(
                BlockShuffling(16), "drug", "DMSO", "plate", control_block_size=block_size
            )
            dataset = dataset_of(collection, strategy, batch_size=8, fetch_factor=8)
            fetch = dataset.plan(epoch=0).fetch(0)
            controls = np.flatnonzero(adata.obs["drug"] == "DMSO")
            places = np.searchsorted(controls, np.unique(fetch.rows[fetch.companions]))
            return np.count_nonzero(np.diff(places) > 1) + 1

        assert n_runs(16) < n_runs(1) / 2

    def test_refused(self, collection):
        blocks = BlockShuffling(4)
        strategy = MatchedControls(blocks, ["x", "y"] * (N // 2), "x")
        told = r"^controls and neighbours come beside .*got a ndarray; open it"
        with pytest.raises(ParameterError, match=told):
            CellDataset(np.zeros((N, 3)), strategy, 8)
        own = {"strategy": "cells and controls"}
        told = r"^`fetch_transform` must return Cells .* is ndarray"
        with pytest.raises(ParameterError, match=told):
            next(
                iter(dataset_of(collection, **own, fetch_transform=lambda cells: cells.obs["drug"]))
            )
        with pytest.raises(ColumnError, match=r"^`within`: obs has no column 'dose'"):
            dataset_of(collection, MatchedControls(blocks, "drug", "DMSO", ["dose"]))
        with pytest.raises(ParameterError, match="not read yet"):
            MatchedControls(blocks, "drug", "DMSO").n_positions(N)
        other = dataset_of(collection, MatchedControls(blocks, "drug", "DMSO", "plate"))
        with pytest.raises(StateError, match="k=1 there, k=2 here"):
            dataset_of(collection, **own).load_state_dict(other.state_dict())
