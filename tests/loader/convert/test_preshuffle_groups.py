"""Stores whose cells lie together by group."""

from typing import Any, cast

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.convert.test_preshuffle import parts_of
from tests.loader.convert.test_preshuffle_elements import write
from tests.loader.matrices import dense

from cellfeed import CellDataset, GroupedSampling, ParameterError, open_collection, preshuffle

pytestmark = pytest.mark.usefixtures("zarr_in_this_thread")

N_CELLS = 3_000
DRUGS = ["d3", "d1", "d2", "d0"]  # in another order than that of their names


@pytest.fixture(scope="module")
def path(new_folder):
    rng = np.random.default_rng(0)
    drug = pd.Categorical.from_codes(
        rng.integers(-1, 4, N_CELLS).tolist(), categories=pd.Index(DRUGS)
    )
    obs = pd.DataFrame({"drug": drug, "dose": rng.integers(0, 3, N_CELLS)})
    obs.index = [f"c{number}" for number in range(N_CELLS)]
    X = sp.csr_matrix(rng.poisson(0.4, (N_CELLS, 30)).astype(np.float32))
    return write(ad.AnnData(X, obs), new_folder() / "cells.h5ad")


OPTIONS: dict[str, Any] = {"memory": 800_000, "block_size": 1, "cells_per_chunk": 8}


@pytest.fixture(scope="module")
def grouped(path, new_folder):
    out = new_folder() / "grouped.zarr"
    assert preshuffle(path, out, group_by=["drug", "dose"], **OPTIONS).n_parts > 1
    return out


def test_parts_are_sorted_by_group_and_shuffled_within(path, grouped):
    truth, seen = ad.read_h5ad(path), list[int]()
    for part in parts_of(grouped):
        codes = part.obs["drug"].cat.codes.to_numpy().astype(int)
        codes[codes < 0] = len(DRUGS)  # missing ones are the last
        keys = codes * 3 + part.obs["dose"].to_numpy()
        assert (np.diff(keys) >= 0).all()
        assert np.unique(keys).size == 15
        rows = part.obs["source_row"].to_numpy()
        within = np.diff(rows)[np.diff(keys) == 0]
        assert 0.4 < (within > 0).mean() < 0.6  # not in the order of the file
        assert list(part.obs_names) == [f"c{row}" for row in rows]
        np.testing.assert_array_equal(dense(part.X), dense(truth.X[rows]))
        seen += rows.tolist()
    assert sorted(seen) == list(range(N_CELLS))


def test_sets_of_one_group_are_read_from_few_chunks(path, grouped, tmp_path):
    preshuffle(path, tmp_path / "shuffled.zarr", **OPTIONS)
    n_chunks = []
    for store in (grouped, tmp_path / "shuffled.zarr"):
        collection = open_collection(store, obs=["drug", "dose"])
        strategy = GroupedSampling(("drug", "dose"), set_size=32, block_size=32)
        dataset = CellDataset(collection, strategy, batch_size=32, fetch_factor=1, seed=0)
        for minibatch in dataset:
            assert len(set(minibatch.obs["drug"].tolist())) == 1
            assert len(set(minibatch.obs["dose"].tolist())) == 1
        n_chunks.append(dataset.statistics().n_chunks)
    assert n_chunks[0] * 3 < n_chunks[1]


def test_appended_cells_are_grouped(path, grouped, tmp_path):
    adata = ad.read_h5ad(path)[:500].copy()
    adata.obs_names = [f"new {number}" for number in range(500)]
    adata.obs["drug"] = pd.Categorical(["new"] * 250 + ["d1"] * 250)
    more, out = write(adata, tmp_path / "more.h5ad"), tmp_path / "out.zarr"
    preshuffle(path, out, group_by="drug", **OPTIONS)
    preshuffle(more, out, group_by="drug", append=True, mix=1, **OPTIONS)
    newest = ad.read_zarr(max(out.glob("dataset_*"), key=lambda each: int(each.name[8:])))
    codes = newest.obs["drug"].cat.codes.to_numpy().astype(int)
    assert list(newest.obs["drug"].cat.categories) == [*DRUGS, "new"]
    assert (np.diff(np.where(codes < 0, 9, codes)) >= 0).all()


def test_refused(path, tmp_path):
    out = tmp_path / "out.zarr"
    with pytest.raises(ParameterError, match="`group_by` names 'none', but the columns of obs are"):
        preshuffle(path, out, group_by="none")
    with pytest.raises(ParameterError, match="`group_by` cannot be combined with `in_order`"):
        preshuffle(path, out, group_by="drug", in_order=True)
    with pytest.raises(ParameterError, match="`group_by` is empty"):
        preshuffle(path, out, group_by=[])
    with pytest.raises(
        ParameterError, match=r"`group_by` must be a list .* set, which has no order"
    ):
        preshuffle(path, out, group_by=cast("Any", {"drug"}))
    with pytest.raises(ParameterError, match=r"`paths` must be a list .* set, which has no order"):
        preshuffle({path}, out)
    assert not out.exists()


def test_command(path, grouped, tmp_path):
    out = tmp_path / "out.zarr"
    options = "--group-by", "drug,dose", "--memory", 800_000, "--block-size", 1
    result = commands.cellfeed("preshuffle", path, out, *options, "--cells-per-chunk", 8)
    assert result.exit_code == 0, result.output
    for one, other in zip(parts_of(out), parts_of(grouped), strict=True):
        assert list(one.obs_names) == list(other.obs_names)
    refused = commands.cellfeed("preshuffle", path, out, *options, "--in-order")
    assert refused.exit_code == 2
