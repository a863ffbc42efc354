"""Zarr stores: what is opened, what links in them lead to, and which files stay open."""

import gc
import re
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
import scipy.sparse as sp
import zarr
from tests.loader.matrices import dense
from tests.loader.sources.zarr_cells import quiet, write_cells
from tests.loader.zarr_stores import written_at_once

from cellfeed import CategoricalColumn, FormatError, PathError, open_collection
from cellfeed.bytes._store import OpenFile

pytestmark = quiet

MATRIX = np.random.default_rng(0).poisson(0.6, (13, 9)).astype(np.float32)
CSR = sp.csr_matrix(MATRIX)
SHARDS = {"chunks": (7,), "shards": (14,)}
SHARDED: dict[str, Any] = {"indices": SHARDS, "data": SHARDS}


def annotated() -> ad.AnnData:
    names = [f"cell{k}" for k in range(13)]
    types = pd.Categorical((["a", "b", None] * 5)[:13], categories=["b", "a", "c"])
    obs = pd.DataFrame({"type": types, "number": np.arange(13.0)}, index=names)
    adata = ad.AnnData(MATRIX, obs=obs, layers={"sparse": CSR * 2})
    adata.obsm["pca"] = np.arange(26.0).reshape(13, 2)
    return adata


def write_annotated(path: Path, zarr_format: Any) -> Path:
    with ad.settings.override(zarr_write_format=zarr_format), written_at_once(path) as memory:
        annotated().write_zarr(memory)
    return path


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_as_anndata_writes_it(tmp_path, zarr_format):
    path = write_annotated(tmp_path / "cells.zarr", zarr_format)
    names = ["X", "layers/sparse", "obsm/pca"]
    collection = open_collection(path, elements=names, obs=["type"])
    cells, types = collection[::-1], collection.obs["type"]
    assert isinstance(types, CategoricalColumn)
    assert np.array_equal(cells["X"], MATRIX[::-1])
    assert np.array_equal(dense(cells["layers/sparse"]), 2 * MATRIX[::-1])
    assert np.array_equal(cells["obsm/pca"], annotated().obsm["pca"][::-1])
    assert types.categories.tolist() == ["b", "a", "c"]
    assert types.codes.tolist() == annotated().obs["type"].cat.codes.tolist()


def test_raw_has_genes_of_its_own(tmp_path):
    adata = annotated()[:, :4].copy()
    paths = [tmp_path / "cells.h5ad", tmp_path / "cells.zarr"]
    adata.write_h5ad(paths[0])
    adata.write_zarr(paths[1])
    for path in paths:
        with pytest.raises(FormatError, match=f"^{path}: has no `raw/X`; read `X` instead"):
            open_collection(path, elements=["raw/X"])
    adata.raw = annotated()
    adata.write_h5ad(paths[0])
    adata.write_zarr(paths[1])
    for path in paths:
        collection = open_collection(path, elements=["raw/X"])
        assert collection.var_names.tolist() == annotated().var_names.tolist()
        assert np.array_equal(collection[:].X, MATRIX)


@pytest.fixture
def shuffled(tmp_path):
    """A store in annbatch's layout of eleven datasets, of which each has other cells."""
    path = tmp_path / "shuffled.zarr"
    encoding = {"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"}
    zarr.create_group(path, attributes=encoding)
    for k in range(11):
        obs = pd.DataFrame({"number": np.full(3 + k, k)}, [f"cell{j}" for j in range(3 + k)])
        write_cells(path / f"dataset_{k}", CSR[: 3 + k], obs=obs, **SHARDED)
    return path


class TestShuffledCollection:
    def test_has_its_datasets_in_the_order_of_their_numbers(self, shuffled):
        collection = open_collection(shuffled, obs=["number"])
        assert [part.name for part in collection.locations] == [f"dataset_{k}" for k in range(11)]
        expected = np.vstack([MATRIX[: 3 + k] for k in range(11)])
        assert np.array_equal(dense(collection[:].X), expected)
        assert collection[[-1]].obs["number"][0] == 10
        assert len(open_collection(shuffled / "dataset_4")) == 7

    def test_that_lacks_a_dataset_or_is_not_finished(self, shuffled):
        shutil.rmtree(shuffled / "dataset_7")
        said = r"expected datasets numbered from 0, but .*: 0, .*6, 8, 9, 10"
        with pytest.raises(FormatError, match=said):
            open_collection(shuffled)
        zarr.open_group(shuffled).attrs.clear()
        (shuffled / ".cellfeed").mkdir()
        said = "is unfinished; run the same `cellfeed preshuffle` again"
        with pytest.raises(FormatError, match=said):
            open_collection(shuffled)


class TestPaths:
    def test_a_folder_of_stores_and_files(self, tmp_path, write_h5ad):
        write_cells(tmp_path / "a.zarr", CSR)
        shutil.copy(write_h5ad(2 * MATRIX), tmp_path / "b.h5ad")
        write_cells(tmp_path / "c.zarr", 3 * CSR, zarr_format=2)
        collection = open_collection(tmp_path)
        assert [each.name for each in collection.locations] == ["a.zarr", "b.h5ad", "c.zarr"]
        expected = np.vstack([MATRIX, 2 * MATRIX, 3 * MATRIX])
        assert np.array_equal(dense(collection[:].X), expected)
        assert len(open_collection(tmp_path / "*.zarr")) == 26

    def test_what_is_no_anndata(self, tmp_path):
        zarr.create_group(tmp_path / "other.zarr")
        with pytest.raises(FormatError, match=r"other\.zarr: is a zarr group, but neither AnnData"):
            open_collection(tmp_path / "other.zarr")
        zarr.create_array(tmp_path / "x.zarr", data=np.eye(2))
        with pytest.raises(FormatError, match="cannot be opened as a zarr group"):
            open_collection(tmp_path / "x.zarr")

    def test_a_store_without_the_matrix(self, new_store):
        path = new_store(CSR, element="layers/counts")
        with pytest.raises(FormatError, match=f"^{path}: has no `X`; its layers are: counts$"):
            open_collection(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("changed", [{"chunks": (4, 9)}, {"dtype": "int32"}])
def test_metadata_that_were_consolidated_before_arrays_were_written_anew(
    tmp_path, version, changed
):
    """Chunks of another grid or dtype would be noise, or zeros where none has that name."""
    path = write_annotated(tmp_path / "cells.zarr", version)
    options: dict[str, Any] = {"chunks": (7, 4), "dtype": "float32", "compressors": None}
    for each in (options, options | changed):
        root = zarr.open_group(path, mode="r+", use_consolidated=False)
        attributes = dict(root["X"].attrs)
        del root["X"]
        root.create_array("X", shape=MATRIX.shape, attributes=attributes, **each)[:] = MATRIX
        if each is options:
            zarr.consolidate_metadata(root.store)
    assert np.array_equal(open_collection(path)[:].X, MATRIX)


LINKED: dict[str, tuple[int, dict[str, Any]]] = {
    "files, v2": (2, {"chunks": (10, 4)}),
    "files, v3": (3, {"chunks": (10, 4)}),
    "shards": (3, {"chunks": (5, 4), "shards": (10, 12)}),
    "slow": (2, {"chunks": (10, 4), "dtype": ">f4"}),
}


class TestLinks:
    """Links of the file system, such as git-annex and datalad make."""

    @pytest.mark.parametrize("how", LINKED)
    def test_are_followed_and_no_zeros_where_they_lead_to_nothing(self, new_store, tmp_path, how):
        version, options = LINKED[how]
        path, annex = new_store(MATRIX, zarr_format=version, X=options), tmp_path / "annex"
        annex.mkdir()
        files = [each for each in (path / "X").rglob("*") if each.is_file()]
        chunks = [each for each in files if each.name not in ("zarr.json", ".zarray", ".zattrs")]
        for k, chunk in enumerate(chunks):
            chunk.rename(annex / str(k))
            chunk.symlink_to(annex / str(k))
        assert np.array_equal(open_collection(path)[:].X, MATRIX)
        (annex / "1").unlink()
        with pytest.raises((PathError, FormatError), match=re.escape(str(chunks[1]))):
            open_collection(path)[:]

    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize("name", ["obs/type/codes", "obs/number", "var/_index"])
    def test_of_tables_are_no_zeros_where_they_lead_to_nothing(self, tmp_path, version, name):
        path, there = write_annotated(tmp_path / "cells.zarr", version), tmp_path / "there"
        name = f"{name}/values" if (path / name / "values").is_dir() else name
        chunk = path / name / ("c/0" if version == 3 else "0")
        chunk.rename(there)
        chunk.symlink_to(there)

        def read() -> Any:
            obs = ["type", "number"]
            collection = open_collection(path, obs=obs)
            return collection, collection.var_names

        collection, _ = read()
        assert collection.obs["type"].codes.tolist() == annotated().obs["type"].cat.codes.tolist()
        assert collection.obs["number"].values.tolist() == list(range(13))  # noqa: PD011
        there.unlink()
        with pytest.raises(PathError, match=rf"{chunk}: is a link to {there}, which is missing"):
            read()

    @pytest.mark.parametrize("part", ["X", "X/c", "obs", "var"])
    def test_of_folders(self, new_store, tmp_path, part):
        path = new_store(MATRIX)
        there = (path / part).rename(tmp_path / "there")
        (path / part).symlink_to(there)
        assert np.array_equal(open_collection(path)[:].X, MATRIX)
        there.rename(tmp_path / "moved")
        with pytest.raises(PathError, match=rf"{part}: is a link to {there}, which is missing"):
            open_collection(path)


def open_files(path: Path) -> list[str]:
    """Return which files of a store this process has open."""
    return [file.path for file in psutil.Process().open_files() if str(path) in file.path]


class TestOpenFiles:
    def test_more_shards_than_may_stay_open(self, new_store, monkeypatch):
        gc.collect()  # what other tests opened
        opened_before = sum(each() is not None for each in OpenFile._all)
        most = "cellfeed.bytes._store.share_of_descriptors"
        monkeypatch.setattr(most, lambda *_: opened_before + 2)
        options = {"chunks": (7,), "shards": (7,)}
        path = new_store(CSR, indices=options, data=options)
        collection = open_collection(path)
        for _ in range(2):
            assert np.array_equal(dense(collection[:].X), MATRIX)
        assert len(open_files(path)) == 2

    def test_are_closed_where_ctrl_c_cannot_be_lost(self, new_store, python_calls_of_dropping):
        path = new_store(CSR, **SHARDED)
        held = [open_collection(path)]
        held[0][:]
        assert len(open_files(path)) > 0
        assert python_calls_of_dropping(held) == []
        assert open_files(path) == []
