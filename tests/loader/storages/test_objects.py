"""Objects of other libraries in place of paths."""

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.experimental import AnnCollection
from tests.loader.preshuffling.copies import assert_preshuffled
from tests.loader.sources.cells import labels_of
from tests.loader.storages.huggingface.arrow_files import write_dataset
from tests.loader.storages.memory_maps.written import write_npy, write_scdl

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    MemoryMapSource,
    ParameterError,
    open_collection,
    preshuffle,
)

COUNTS = np.random.default_rng(0).poisson(0.5, (30, 8)).astype(np.float32)


@pytest.fixture
def adata():
    obs = pd.DataFrame({"plate": ["a", "b", "c"] * 10}, index=[f"cell {k}" for k in range(30)])
    adata = ad.AnnData(sp.csr_matrix(COUNTS), obs=obs)
    adata.layers["dense"] = np.asfortranarray(2 * COUNTS)
    adata.obsm["pca"] = COUNTS[:, :3].copy()
    return adata


@pytest.fixture
def path(adata, tmp_path):
    adata.write_h5ad(tmp_path / "cells.h5ad")
    return tmp_path / "cells.h5ad"


@pytest.mark.parametrize("kind", ["object", "halves", "AnnCollection", "backed"])
def test_elements_and_epochs_of_objects(adata, path, kind):
    halves = [adata[:15].copy(), adata[15:].copy()]
    made = {"object": adata, "halves": halves, "AnnCollection": AnnCollection(halves)}
    given = ad.read_h5ad(path, backed="r") if kind == "backed" else made[kind]
    collection = open_collection(given, elements=["X", "layers/dense", "obsm/pca"], obs=["plate"])
    assert collection.slow_reading() is None
    assert collection.var_names.tolist() == adata.var_names.tolist()
    assert collection.files == ((path,) if kind == "backed" else ())
    seen = list[int]()
    for cells in CellDataset(collection, BlockShuffling(4), 8, seed=0, as_torch=False):
        rows = cells.rows
        assert np.array_equal(cells.X.toarray(), COUNTS[rows])
        assert np.array_equal(cells["layers/dense"], 2 * COUNTS[rows])
        assert np.array_equal(cells["obsm/pca"], COUNTS[rows, :3])
        plates = labels_of(collection, "plate", cells.obs["plate"])
        assert plates == adata.obs["plate"].iloc[rows].tolist()
        seen += rows.tolist()
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("kind", ["folder", "scdl"])
def test_folders_of_other_libraries_are_shuffled(adata, tmp_path, kind):
    X, obs, where = adata.X, adata.obs, tmp_path / kind
    if kind == "scdl":
        pytest.importorskip("bionemo.scdl")
        write_scdl(where, X, obs, adata.var)
    else:
        write_dataset(where, X, obs, num_shards=3)
    shuffled, rows = assert_preshuffled(where, adata, tmp_path, obs=["plate"])
    assert labels_of(shuffled, "plate") == obs["plate"].iloc[rows].tolist()


def test_a_view_is_read_as_it_is(adata):
    assert np.array_equal(open_collection(adata[[9, 3]])[:].X.toarray(), COUNTS[[9, 3]])


def test_objects_beside_paths(adata, path):
    collection = open_collection([adata, path, adata.copy()])
    assert np.array_equal(collection[:].X.toarray(), np.vstack([COUNTS] * 3))


def test_an_object_that_is_given_twice(adata, path):
    source = MemoryMapSource(write_npy(path.with_suffix(""), adata.X))
    for given in (adata, AnnCollection([adata]), source):
        said = r"^the same `\w+` is given twice.*; give it once$"
        with pytest.raises(ParameterError, match=said):
            open_collection([given, path, [given]])


@pytest.mark.parametrize(
    "given",
    [
        sp.csr_matrix(COUNTS),
        sp.csc_array(COUNTS),
        COUNTS,
        pd.DataFrame(COUNTS),
        {"a": "cells.h5ad"},
    ],
)
def test_what_is_no_anndata(given):
    name = type(given).__name__
    for each in (given, [given]):
        said = rf"^`{name}` cannot be opened; give .* in a list, and a matrix in `AnnData\(X\)`$"
        with pytest.raises(ParameterError, match=said):
            open_collection(each)


def test_paths_in_arrays(path):
    for given in (np.array([str(path)]), pd.Series([str(path)]), np.array([path])):
        assert len(open_collection(given)) == 30


def test_genes_of_elements_without_genes(adata):
    with pytest.raises(ParameterError, match="`genes` are given, but 'obsm/pca' has no gene names"):
        open_collection(adata, elements=["obsm/pca"], genes=["no such gene"])


def test_a_backed_object_has_its_own_obs(path):
    backed = ad.read_h5ad(path, backed="r")
    backed.obs["split"] = ["train"] * 30
    collection = open_collection(backed, obs=["split"])
    assert collection.locations[0].path == path
    assert np.array_equal(collection[[2, 1]].X.toarray(), COUNTS[[2, 1]])
    with pytest.raises(FormatError, match="is a view of a backed AnnData; give the whole object"):
        open_collection(backed[:5])


def test_what_an_object_lacks(adata):
    with pytest.raises(FormatError, match="has no `raw/X`; its elements are: `X`, `layers/dense`"):
        open_collection(adata, elements=["raw/X"])
    bare = ad.AnnData(obs=adata.obs)
    with pytest.raises(FormatError, match=r"has no `X`; it has no elements$"):
        open_collection(bare)
    adata.X = adata.X.tocsc()
    with pytest.raises(FormatError, match=r"`X` is stored by gene \(csc\).*make it CSR"):
        open_collection(adata)
    adata.obsm["frame"] = pd.DataFrame({"a": range(30)}, index=adata.obs_names)
    with pytest.raises(FormatError, match="`obsm/frame` is a DataFrame, not a matrix of numbers"):
        open_collection(adata, elements=["obsm/frame"])
    adata.obsm["masked"] = np.ma.array(np.ones((30, 2)), mask=True)
    with pytest.raises(FormatError, match="`obsm/masked` is a MaskedArray, not a matrix"):
        open_collection(adata, elements=["obsm/masked"])
    with pytest.raises(ParameterError, match="a view of an AnnCollection cannot be opened"):
        open_collection(AnnCollection([adata])[:4])
    with pytest.raises(ParameterError, match="`int` cannot be opened; give paths"):
        open_collection(3)


def test_preshuffle_takes_paths(adata, path):
    source = MemoryMapSource(write_npy(path.with_suffix(""), adata.X))
    given: Any
    for given in (adata, [adata], source, [path, source]):
        with pytest.raises(ParameterError, match=r"^`preshuffle` takes paths, but got `\w+`; give"):
            preshuffle(given, path.with_suffix(".zarr"))
