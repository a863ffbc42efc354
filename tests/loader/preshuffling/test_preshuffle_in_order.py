"""Matrices that are stored by gene, rewritten by cell: against SciPy's `tocsr`."""

import shlex
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import commands
from tests.loader.collection.stored import write as write_adata
from tests.loader.matrices import dense, random_csr
from tests.loader.preshuffling.test_preshuffle import parts_of

from cellfeed import (
    CellDataset,
    FormatError,
    GroupedSampling,
    MismatchError,
    open_collection,
    preshuffle,
)
from cellfeed.collection import Genes
from cellfeed.preshuffling._inputs import open_matrices

pytestmark = pytest.mark.usefixtures("zarr_in_this_thread")


def written(store: Path) -> Any:
    return sp.vstack([as_csr(part.X) for part in parts_of(store)], format="csr")


def as_csr(X: Any) -> Any:
    """With indices that SciPy makes, since stored ones have one byte or two."""
    return sp.csr_matrix((X.data, X.indices.astype(np.int32), X.indptr), shape=X.shape)


def check_same(found: Any, expected: Any) -> None:
    """Bit by bit, with explicit zeros."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(found.indices, expected.indices)
    assert found.data.tobytes() == expected.data.tobytes()


def write(X: Any, path: Path, **options: Any) -> Path:
    names = [
        [f"{name}{i}" for i in range(n)] for name, n in zip(("cell", "gene"), X.shape, strict=True)
    ]
    tables = [pd.DataFrame(index=each) for each in names]
    return write_adata(ad.AnnData(X, *tables), path, **options)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 30),
    n_cells=st.integers(1, 60),
    n_genes=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    dtype=st.sampled_from(["float32", "float64", "int32", "uint8", "int64", "bool"]),
    memory=st.sampled_from([1, 700, 6_000, 10**9]),
    is_skewed=st.booleans(),
)
def test_it_is_that_of_scipy(new_folder, seed, n_cells, n_genes, density, dtype, memory, is_skewed):
    """Whatever the number of blocks of genes."""
    rng = np.random.default_rng(seed)
    X = random_csr((n_cells, n_genes), density, rng, np.float64)
    X.data = rng.integers(0, 120, X.nnz).astype(dtype)  # some are zeros, and kept
    if is_skewed:  # nearly all elements are of few cells
        few = rng.random(n_cells) < 0.1
        X = sp.csr_matrix(sp.diags(few.astype(float)) @ X.astype(float)).astype(dtype)
    X.sort_indices()
    folder = new_folder()
    matrix = by_row(write(sp.csc_matrix(X), folder / "in.h5ad"), folder / "copy")
    matrix.rewrite(memory, lambda n: None)
    found = matrix.read_rows(np.array([[0, n_cells]]))
    check_same(as_csr(found.to_scipy()), sp.csc_matrix(X).tocsr())


def by_row(path: Path, folder: Path) -> Any:
    collection = open_matrices([path], ["X"], Genes(), folder)
    return collection.sources[0].elements["X"]


@pytest.fixture(scope="module")
def by_gene(new_folder):
    rng = np.random.default_rng(1)
    X = sp.csc_matrix(sp.csr_matrix(rng.poisson(0.4, (400, 90)).astype(np.float32)))
    return write(X, new_folder() / "in.h5ad", compression="gzip"), X.tocsr()


MEMORY = 60_000  # several blocks of genes, and parts


@pytest.mark.parametrize(
    ("kind", "dtype", "suffix"),
    [
        (sp.csc_matrix, "float32", ".h5ad"),
        pytest.param(sp.csc_matrix, "float64", ".zarr", marks=pytest.mark.slow),
        (sp.csc_matrix, "bool", ".zarr"),
        (sp.csr_matrix, "int64", ".h5ad"),
        (np.asarray, "float32", ".h5ad"),
    ],
)
def test_the_store_is_that_of_scipy(tmp_path, out, kind, dtype, suffix):
    """With cells in order, their names, and where they are from."""
    rng = np.random.default_rng(3)
    X = sp.csr_matrix(random_csr((120, 70), 0.3, rng, np.float64))
    X.data = rng.integers(0, 120, X.nnz).astype(dtype)
    given = X.toarray() if kind is np.asarray else kind(X)
    path = write(given, tmp_path / f"in{suffix}")
    done = preshuffle(path, out, in_order=True, memory=50_000)
    assert done.n_parts > 1
    if kind is np.asarray:
        np.testing.assert_array_equal(np.vstack([part.X for part in parts_of(out)]), given)
    else:
        check_same(written(out), sp.csc_matrix(X).tocsr())
    obs = pd.concat([part.obs for part in parts_of(out)])
    assert list(obs.index) == [f"cell{i}" for i in range(120)]
    assert obs["source_row"].tolist() == list(range(120))


@pytest.mark.slow
def test_it_is_shuffled_without_in_order(by_gene, out):
    path, X = by_gene
    preshuffle(path, out, memory=MEMORY, seed=2)
    rows = np.concatenate([part.obs["source_row"] for part in parts_of(out)])
    assert sorted(rows) == list(range(400))
    assert sorted(rows) != list(rows)
    check_same(written(out), X[rows])


@pytest.mark.parametrize("element", ["X", "layers/counts", "raw/X", "obsm/it"])
def test_the_command_that_refusals_name(element, tmp_path, monkeypatch):
    X: Any = sp.random(30, 8, density=0.4, format="csc", random_state=0, dtype=np.float32)
    names = pd.Index([f"cell{i}" for i in range(30)]), pd.Index([f"gene{i}" for i in range(8)])
    tables = dict(zip(("obs", "var"), (pd.DataFrame(index=each) for each in names), strict=True))
    of_file: dict[str, Any] = {
        "X": {"X": X},
        "layers/counts": {"X": X.tocsr(), "layers": {"counts": X}},
        "raw/X": {"X": X.tocsr()},
        "obsm/it": {"X": X.tocsr(), "obsm": {"it": X}},
    }
    adata = ad.AnnData(**of_file[element], **tables)
    if element == "raw/X":
        adata.raw = ad.AnnData(X, **tables)
    path = tmp_path / "by gene.h5ad"
    adata.write_h5ad(path)
    with pytest.raises(FormatError, match="stored by gene") as refused:
        open_collection(path, elements=[element])
    command = shlex.split(str(refused.value).split("`")[-2])
    assert command[0] == "cellfeed"
    monkeypatch.chdir(tmp_path)
    assert commands.cellfeed(*command[1:]).exit_code == 0
    cells = open_collection(command[-1], elements=[element])[:]
    np.testing.assert_array_equal(cells.elements[element].toarray(), X.toarray())


def test_duplicates_are_summed_and_rows_need_not_ascend(out, tmp_path):
    path = write(sp.csc_matrix(np.zeros((4, 3), np.float32)), tmp_path / "in.h5ad")
    with h5py.File(path, "r+") as file:
        for name, values in (
            ("data", np.array([1, 2, 4, 8, 16], np.float32)),
            ("indices", np.array([3, 0, 3, 2, 1], np.int32)),
            ("indptr", np.array([0, 3, 3, 5], np.int32)),
        ):
            del file[f"X/{name}"]
            file[f"X/{name}"] = values
    preshuffle(path, out, in_order=True)
    expected = [[2, 0, 0], [0, 0, 16], [0, 0, 8], [5, 0, 0]]
    np.testing.assert_array_equal(written(out).toarray(), expected)


# Stopped, and resumed


class StopError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.8])
def test_resumed_with_what_is_missing(by_gene, out, share):
    path, X = by_gene

    def stop(stage, done, total):
        if stage == "rewrite" and done >= share * total:
            raise StopError

    with pytest.raises(StopError):
        preshuffle(path, out, in_order=True, memory=MEMORY, on_progress=stop)
    (copy,) = (out / ".cellfeed" / "by-row").iterdir()
    done = {each: each.stat().st_mtime_ns for each in copy.glob("block-*")}
    assert done
    kept = dict[str, int]()

    def note(stage, *_):
        if stage == "rewrite":
            kept.update((each.name, each.stat().st_mtime_ns) for each in done if each.exists())

    preshuffle(path, out, in_order=True, memory=MEMORY, on_progress=note)
    check_same(written(out), X)
    assert kept == {each.name: time for each, time in done.items()}  # were not written again


def test_what_has_changed_is_refused(by_gene, out, tmp_path):
    path = Path(shutil.copy(by_gene[0], tmp_path / "in.h5ad"))

    def touch(stage, done, total):
        if stage == "rewrite" and done < total / 2:
            path.touch()

    with pytest.raises((FormatError, MismatchError), match=r"was replaced|has changed"):
        preshuffle(path, out, in_order=True, memory=MEMORY, on_progress=touch)
    assert not (out / "zarr.json").exists()


@pytest.mark.slow
def test_damage_in_the_copy_is_noticed(by_gene, out):
    path, X = by_gene

    def damage(stage, done, total):
        block = out / ".cellfeed" / "by-row" / "0-X" / "block-0" / "data.npy"
        if stage == "rewrite" and done == total:
            stored = np.load(block)
            stored[7] += 1
            np.save(block, stored)

    with pytest.raises(FormatError, match="was not rewritten with the same elements; remove"):
        preshuffle(path, out, in_order=True, memory=MEMORY, on_progress=damage)
    shutil.rmtree(out / ".cellfeed" / "by-row" / "0-X")  # as the message says
    preshuffle(path, out, in_order=True, memory=MEMORY)
    check_same(written(out), X)


def test_damaged_input_is_one_line(by_gene, out, tmp_path):
    path = Path(shutil.copy(by_gene[0], tmp_path / "in.h5ad"))
    with h5py.File(path, "r+") as file:
        offset = file["X/indices"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 40)
    result = commands.cellfeed("preshuffle", "--in-order", path, out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """With a quarter of the matrix as memory, not much more than that is in arrays at once."""
    X: Any = sp.random(8_000, 400, 0.2, "csr", np.float32, np.random.default_rng(0))
    path, memory = write(sp.csc_matrix(X), tmp_path / "in.h5ad"), 2 * X.nnz
    by_row(path, tmp_path / "first").rewrite(10**9, lambda n: None)  # compiled
    matrix = by_row(path, tmp_path / "second")
    tracemalloc.start()
    try:
        matrix.rewrite(memory, lambda n: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * memory + 1_000_000
    check_same(as_csr(matrix.read_rows(np.array([[0, 8_000]])).to_scipy()), sp.csr_matrix(X))


# The command


def test_command_keeps_everything_by_default(by_gene, out, tmp_path):
    _, X = by_gene
    adata = ad.AnnData(
        sp.csc_matrix(X), layers={"counts": sp.csc_matrix(2 * X)}, obsm={"pca": np.eye(400)[:, :3]}
    )
    path = tmp_path / "in.h5ad"
    adata.write_h5ad(path)
    result = commands.cellfeed("preshuffle", "--in-order", path, out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{out}: 400 cells in 1 part ")
    (part,) = parts_of(out)
    check_same(as_csr(part.X), X)
    check_same(as_csr(part.layers["counts"]), 2 * X)
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
