"""MuData, in one file or store, reads as mudata reads it in memory."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import mudata as mu
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.sources.cells import labels_of
from tests.loader.sources.suites import Suite
from tests.loader.zarr_stores import written_at_once

from cellfeed import ColumnError, FormatError, open_collection

FORMATS = ["h5mu", "zarr v2", "zarr v3"]


def without_pulling() -> Any:
    """Return a context in which mudata pulls no columns, which from 0.4 it never does."""
    return mu.set_options(pull_on_update=False) if hasattr(mu, "set_options") else nullcontext()


def write(path: Path, modalities: dict[str, ad.AnnData], **tables: Any) -> mu.MuData:
    """Write MuData in the format that the name ends with; return it."""
    with warnings.catch_warnings(), without_pulling():
        warnings.simplefilter("ignore")  # mudata's, anndata's and zarr's own
        mdata = mu.MuData(modalities)
        for name, table in tables.get("obsm", {}).items():
            mdata.obsm[name] = table
        for name, column in tables.get("obs", {}).items():
            mdata.obs[name] = column
        if tables.get("is_pulled"):
            mdata.pull_obs()
        if path.suffix == ".h5mu":
            mdata.write_h5mu(path, compression=tables.get("compression"))
            return mdata
        zarr_format = 2 if tables.get("format") == "zarr v2" else 3
        with ad.settings.override(zarr_write_format=zarr_format), written_at_once(path) as store:
            mdata.write_zarr(store)
        return mdata


def modality(X: Any, names: list[str] | None = None, **obs: Any) -> ad.AnnData:
    names = [f"cell{k}" for k in range(X.shape[0])] if names is None else names
    var = pd.DataFrame(index=[f"gene{k}" for k in range(X.shape[1])])
    adata = ad.AnnData(X, obs=pd.DataFrame(obs, index=names), var=var)
    adata.layers["counts"] = X * 2
    adata.obsm["X_pca"] = 3 * dense(X)[:, :2]
    adata.raw = adata.copy()
    return adata


ELEMENTS = {
    "X": lambda adata: adata.X,
    "layers/counts": lambda adata: adata.layers["counts"],
    "raw/X": lambda adata: adata.raw.X,
    "obsm/X_pca": lambda adata: adata.obsm["X_pca"],
}


STORED = st.fixed_dictionaries(
    {
        "n": st.integers(1, 30),
        "kind": st.sampled_from(["h5mu", *FORMATS]),
        "layouts": st.tuples(*[st.sampled_from(["csr", "dense"])] * 2),
        "is_reordered": st.booleans(),
        "compression": st.sampled_from(["gzip", None]),
        "seed": st.integers(0, 99),
    }
)


def write_stored(folder: Path, *, n, kind, layouts, is_reordered, compression, seed) -> mu.MuData:
    """Write a file of some cells, whose modalities may have them in another order."""
    rng, names = np.random.default_rng(seed), [f"cell{k}" for k in range(n)]
    made = dict[str, ad.AnnData]()
    for name, n_vars, layout in zip(("rna", "protein"), (7, 3), layouts, strict=True):
        values = rng.integers(0, 4, (n, n_vars)).astype("float32")
        order = rng.permutation(n) if made and is_reordered else range(n)
        X = sp.csr_matrix(values) if layout == "csr" else values
        made[name] = modality(X, [names[k] for k in order], number=rng.random(n))
    return write(
        folder / f"{len([*folder.iterdir()])}.{kind[:4]}",
        made,
        obsm={"X_joint": rng.random((n, 2))},
        obs={"plate": pd.Categorical(rng.choice(["a", "b"], n))},
        compression=compression,
        format=kind,
        is_pulled=True,
    )


class TestRows:
    @settings(max_examples=6, derandomize=True, database=None, phases=[Phase.generate])
    @given(
        some=st.lists(STORED, min_size=1, max_size=2),
        names=st.lists(
            st.sampled_from([f"mod/{m}/{e}" for m in ("rna", "protein") for e in ELEMENTS])
            | st.just("obsm/X_joint"),
            min_size=1,
            unique=True,
        ),
        data=st.data(),
    )
    def test_of_all_modalities_are_those_of_the_same_cells(self, new_folder, some, names, data):
        folder = new_folder()
        mdatas = [write_stored(folder, **each) for each in some]
        obs = ["plate", "protein:number"]
        collection = open_collection(folder, elements=names, obs=obs)
        rows = np.array(data.draw(st.lists(st.integers(0, len(collection) - 1))), np.int64)
        cells = collection[rows]
        for name in names:
            expected = np.vstack([in_memory(mdata, name) for mdata in mdatas])
            assert np.array_equal(dense(cells[name]), expected[rows])
        numbers = [
            mdata["protein"].obs["number"].loc[mdata.obs_names].to_numpy() for mdata in mdatas
        ]
        assert np.array_equal(cells.obs["protein:number"], np.concatenate(numbers)[rows])
        plates = np.concatenate([mdata.obs["plate"].to_numpy(dtype=object) for mdata in mdatas])
        assert labels_of(collection, "plate", cells.obs["plate"]) == plates[rows].tolist()


def in_memory(mdata: mu.MuData, name: str) -> np.ndarray:
    if name == "obsm/X_joint":
        return np.asarray(mdata.obsm["X_joint"])
    _, modality, element = name.split("/", 2)
    adata = mdata[modality]
    rows = dense(ELEMENTS[element](adata))
    return np.asarray(rows[adata.obs_names.get_indexer(mdata.obs_names)])


class TestModality(Suite):
    """Rows of the modality lie in another order than the cells."""

    suffix = ".h5mu"
    dtypes = ("<f4", "|u1", "<i8")
    elements = ("mod/rna/X", "mod/rna/layers/counts")
    max_examples = 8

    def stored(self, path, case):
        order = np.random.default_rng(case.seed).permutation(case.n_rows)
        rna = ad.AnnData(case.matrix[order], obs=case.obs.iloc[order][[]], var=case.var)
        rna.layers["counts"] = rna.X
        whole = ad.AnnData(obs=case.obs[[]])
        obs = {name: case.obs[name] for name in case.obs}
        write(path, {"whole": whole, "rna": rna}, obs=obs, compression="gzip")
        return path


@pytest.fixture(scope="module", params=FORMATS)
def two(request, new_folder):
    """Return a path, and what is there; rna has 3 of 4 cells."""
    path = new_folder() / f"cells.{request.param[:4]}"
    protein = modality(np.arange(8, dtype=np.float32).reshape(4, 2), list("abcd"))
    rna = modality(sp.csr_matrix(np.eye(3, dtype=np.float32)), list("dba"))
    rna.obs["number"] = [1, 2, 3]
    return path, write(path, {"protein": protein, "rna": rna}, format=request.param)


def test_obs_columns_of_a_modality_are_refused_with_a_remedy_that_helps(two):
    path, mdata = two
    with pytest.raises(ColumnError, match=r"no column 'number'; its columns are: none"):
        open_collection(path, elements=["mod/protein/X"], obs=["number"])
    said = (
        f"^{path}: obs has no column 'rna:number'; copy columns .* with `mdata.pull_obs\\(\\)`, and"
    )
    with pytest.raises(ColumnError, match=said):
        open_collection(path, elements=["mod/protein/X"], obs=["rna:number"])
    pulled = path.parent / "pulled.h5mu"
    with warnings.catch_warnings(), without_pulling():
        warnings.simplefilter("ignore")
        copy = mdata.copy()
        copy.pull_obs()
        copy.write_h5mu(pulled)
    for _ in range(2):  # the second time from the record of the file
        collection = open_collection(pulled, elements=["mod/protein/X"], obs=["rna:number"])
        found = list(collection.obs["rna:number"].values)
        assert np.array_equal(found, [3, 2, np.nan, 1], equal_nan=True)
        assert collection[:].X.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_modality_that_lacks_cells_is_refused_with_a_remedy_that_helps(two):
    path, mdata = two
    expected = (
        f"^{path}: modality 'rna' lacks 1 of 4 cells; write only the cells that it has, "
        r"`mdata\[mdata.obsmap\['rna'\] > 0\].copy\(\)`, and read that file$"
    )
    with pytest.raises(FormatError, match=expected):
        open_collection(path, elements=["mod/protein/X", "mod/rna/X"])
    with warnings.catch_warnings(), without_pulling():
        warnings.simplefilter("ignore")
        rest = mdata[mdata.obsmap["rna"] > 0].copy()
        rest.write_h5mu(path.parent / "rest.h5mu")
    cells = open_collection(path.parent / "rest.h5mu", elements=["mod/rna/X", "mod/protein/X"])[:]
    assert dense(cells.X).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert dense(cells["mod/protein/X"]).tolist() == [[0, 1], [2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ("X", "is MuData; give the modality of `X`, one of: `mod/protein/X`, `mod/rna/X`"),
        ("mod/atac/X", "has no modality 'atac'; its modalities are: protein, rna"),
        ("mod/protein/layers/other", "has no `mod/protein/layers/other`; its layers are: counts"),
        ("obsm/other", "has no `obsm/other`; its obsm has: protein, rna"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(two, element, words):
    path, _ = two
    with pytest.raises(FormatError, match=f"^{path}: {words}$"):
        open_collection(path, elements=[element])


def test_genes_are_of_the_first_modality(tmp_path):
    X = np.arange(8, dtype=np.float32).reshape(2, 4)
    write(tmp_path / "cells.h5mu", {"rna": modality(X), "protein": modality(X[:, :1])})
    names = ["obsm/rna", "mod/rna/X", "mod/protein/X", "mod/rna/raw/X"]
    cells = open_collection(tmp_path, elements=names, genes=["gene3", "gene1"])[[1]]
    assert cells["mod/rna/X"].tolist() == cells["mod/rna/raw/X"].tolist() == [[7, 5]]
    assert cells["mod/protein/X"].tolist() == [[4]]
    assert cells["obsm/rna"].tolist() == [[True]]  # a list of which cells a modality has


def test_a_modality_of_anndata_is_refused(write_h5ad):
    path = write_h5ad(np.eye(3, dtype=np.float32))
    expected = (
        f"^{path}: is AnnData, which has no modalities; read `layers/a`, not `mod/rna/layers/a`$"
    )
    with pytest.raises(FormatError, match=expected):
        open_collection(path, elements=["mod/rna/layers/a"])


@pytest.mark.parametrize(
    "obsmap", [None, [1, 2, 3], [1, 1, 2, 3], [1, 2, 3, 5]], ids=["none", "short", "twice", "above"]
)
def test_rows_that_are_of_no_known_cell_are_refused(tmp_path, obsmap):
    path = tmp_path / "cells.h5mu"
    write(path, {"rna": modality(np.eye(4, dtype=np.float32))})
    with h5py.File(path, "r+") as file:
        del file["obsmap/rna"]
        if obsmap is not None:
            file["obsmap/rna"] = np.array(obsmap, np.uint32)
    said = f"^{path}: .*`obsmap/rna`.*write (the file|it) again"
    with pytest.raises(FormatError, match=said):
        open_collection(path, elements=["mod/rna/X"])


def test_tables_of_older_files(tmp_path):
    path = tmp_path / "cells.h5mu"
    write(path, {"rna": modality(np.eye(3, dtype=np.float32))}, obs={"number": [3, 1, 2]})
    with h5py.File(path, "r+") as file:
        for name in ("obs", "mod/rna/obs"):
            file[name].attrs["encoding-version"] = "0.1.0"
    collection = open_collection(path, elements=["mod/rna/X"], obs=["number"])
    assert collection[:].obs["number"].tolist() == [3, 1, 2]
