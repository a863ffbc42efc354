"""Copies whose cells keep their order, or lie together by group."""

from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.collection.stored import write as write_adata
from tests.loader.matrices import dense, random_csr
from tests.loader.preshuffling.test_preshuffle import parts_of

from cellfeed import CellDataset, GroupedSampling, open_collection, preshuffle

pytestmark = pytest.mark.usefixtures("zarr_in_this_thread")


@pytest.mark.parametrize(
    ("kind", "dtype", "suffix"),
    [
        (sp.csr_matrix, "int64", ".h5ad"),
        (sp.csr_matrix, "bool", ".zarr"),
        (np.asarray, "float32", ".h5ad"),
    ],
)
def test_cells_keep_their_order(tmp_path, out, kind, dtype, suffix):
    """With explicit zeros, their names, and where they are from."""
    rng = np.random.default_rng(3)
    X = sp.csr_matrix(random_csr((120, 70), 0.3, rng, np.float64))
    X.data = rng.integers(0, 120, X.nnz).astype(dtype)
    given = X.toarray() if kind is np.asarray else X
    names = [[f"{name}{i}" for i in range(n)] for name, n in zip("cg", X.shape, strict=True)]
    adata = ad.AnnData(given, *(pd.DataFrame(index=each) for each in names))
    done = preshuffle(
        write_adata(adata, tmp_path / f"in{suffix}"), out, in_order=True, memory=50_000
    )
    assert done.n_parts > 1
    parts = parts_of(out)
    if kind is np.asarray:
        np.testing.assert_array_equal(np.vstack([part.X for part in parts]), given)
    else:
        found = sp.vstack([part.X for part in parts], format="csr")
        assert found.dtype == X.dtype
        np.testing.assert_array_equal(found.indptr, X.indptr)
        np.testing.assert_array_equal(found.indices, X.indices)
        assert found.data.tobytes() == X.data.tobytes()
    obs = pd.concat([part.obs for part in parts])
    assert list(obs.index) == names[0]
    assert obs["source_row"].tolist() == list(range(120))


def test_damaged_input_is_one_line(out, tmp_path):
    path, X = tmp_path / "in.h5ad", sp.random(400, 90, 0.3, "csr", np.float32)
    ad.AnnData(X).write_h5ad(path, compression="gzip")
    with h5py.File(path, "r+") as file:
        offset = file["X/indices"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 40)
    result = commands.cellfeed("preshuffle", "--in-order", path, out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1


def test_command_keeps_all_elements(out, tmp_path):
    X = sp.csr_matrix(np.random.default_rng(1).poisson(0.4, (400, 90)).astype(np.float32))
    adata = ad.AnnData(X, layers={"counts": 2 * X}, obsm={"pca": np.eye(400)[:, :3]})
    path = tmp_path / "in.h5ad"
    adata.write_h5ad(path)
    result = commands.cellfeed("preshuffle", "--in-order", path, out, "--elements", "all")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{out}: 400 cells in 1 part ")
    (part,) = parts_of(out)
    np.testing.assert_array_equal(dense(part.X), dense(X))
    np.testing.assert_array_equal(dense(part.layers["counts"]), dense(2 * X))
    np.testing.assert_array_equal(part.obsm["pca"], np.eye(400)[:, :3])


# Cells that lie together by group

N_CELLS = 3_000
DRUGS = ["d3", "d1", "d2", "d0"]  # in another order than that of their names


@pytest.fixture(scope="module")
def drugs(new_folder):
    rng = np.random.default_rng(0)
    drug = pd.Categorical.from_codes(
        rng.integers(-1, 4, N_CELLS).tolist(), categories=pd.Index(DRUGS)
    )
    obs = pd.DataFrame({"drug": drug, "dose": rng.integers(0, 3, N_CELLS)})
    obs.index = [f"c{number}" for number in range(N_CELLS)]
    X = sp.csr_matrix(rng.poisson(0.4, (N_CELLS, 30)).astype(np.float32))
    return write_adata(ad.AnnData(X, obs), new_folder() / "cells.h5ad")


OPTIONS: dict[str, Any] = {"memory": 800_000, "block_size": 1, "cells_per_chunk": 8}


@pytest.fixture(scope="module")
def grouped(drugs, new_folder):
    out = new_folder() / "grouped.zarr"
    assert preshuffle(drugs, out, group_by=["drug", "dose"], **OPTIONS).n_parts > 1
    return out


def test_parts_are_sorted_by_group_and_shuffled_within(drugs, grouped):
    truth, seen = ad.read_h5ad(drugs), list[int]()
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


@pytest.mark.slow
def test_sets_of_one_group_are_read_from_few_chunks(drugs, grouped, tmp_path):
    preshuffle(drugs, tmp_path / "shuffled.zarr", **OPTIONS)
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


@pytest.mark.slow
def test_appended_cells_are_grouped(drugs, grouped, tmp_path):
    adata = ad.read_h5ad(drugs)[:500].copy()
    adata.obs_names = [f"new {number}" for number in range(500)]
    adata.obs["drug"] = pd.Categorical(["new"] * 250 + ["d1"] * 250)
    more, out = write_adata(adata, tmp_path / "more.h5ad"), tmp_path / "out.zarr"
    preshuffle(drugs, out, group_by="drug", **OPTIONS)
    preshuffle(more, out, group_by="drug", append=True, mix=1, **OPTIONS)
    newest = ad.read_zarr(max(out.glob("dataset_*"), key=lambda each: int(each.name[8:])))
    codes = newest.obs["drug"].cat.codes.to_numpy().astype(int)
    assert list(newest.obs["drug"].cat.categories) == [*DRUGS, "new"]
    assert (np.diff(np.where(codes < 0, 9, codes)) >= 0).all()


@pytest.mark.slow
def test_command_groups(drugs, grouped, tmp_path):
    out = tmp_path / "out.zarr"
    options = "--group-by", "drug,dose", "--memory", 800_000, "--block-size", 1
    result = commands.cellfeed("preshuffle", drugs, out, *options, "--cells-per-chunk", 8)
    assert result.exit_code == 0, result.output
    for one, other in zip(parts_of(out), parts_of(grouped), strict=True):
        assert list(one.obs_names) == list(other.obs_names)
    refused = commands.cellfeed("preshuffle", drugs, out, *options, "--in-order")
    assert refused.exit_code == 2
