"""Links within a file are followed; values that lie in other files are refused."""

import os
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense, replace
from tests.loader.sources.cells import labels_of
from tests.servers.web import WebServer

from cellfeed import FormatError, open_collection

N, M = 40, 12
COUNTS = np.random.default_rng(0).poisson(0.7, (N, M)).astype(np.float32) + np.eye(N, M, k=1)
COUNTS = COUNTS.astype(np.float32)
CELLS = [f"cell{i}" for i in range(N)]
TYPES = pd.Categorical([["B", "NK", "T"][i % 3] for i in range(N)])
FILTERS: dict[str, dict[str, Any]] = {"uncompressed": {}, "gzip": {"compression": "gzip"}}


def cells(X: Any, by: float = 1.0) -> ad.AnnData:
    """All elements that are read, each with its own values."""
    obs = pd.DataFrame({"type": TYPES, "number": np.arange(N) * by}, index=CELLS)
    var = pd.DataFrame(index=[f"gene{i}" for i in range(M)])
    raw = ad.AnnData(X * np.float32(3 * by), obs=obs, var=var)
    adata = ad.AnnData(X * np.float32(by), obs=obs, var=var, layers={"counts": X * np.float32(by)})
    adata.obsm["pca"] = np.arange(N * 3.0).reshape(N, 3) * by
    adata.raw = raw
    return adata


@pytest.fixture
def folder(new_folder, monkeypatch):
    """A folder that is not the current one."""
    monkeypatch.chdir(new_folder())
    return new_folder()


def write_pair(folder: Path, layout: str, filters: dict[str, Any]) -> tuple[Path, Path]:
    """Write a file, and another with the same shapes, other values, and other offsets."""
    X = COUNTS if layout == "dense" else sp.csr_matrix(COUNTS)
    there, here = folder / "there" / "big.h5ad", folder / "small.h5ad"
    there.parent.mkdir()
    for path, by in ((there, 2.0), (here, 1.0)):
        adata = cells(X, by)
        if path is here:
            adata.obsm["a"] = np.ones((N, 5))
            adata.obs["before"] = np.arange(N)
        adata.write_h5ad(path, **filters)
    return there, here


def link(path: Path, name: str, target: Any) -> None:
    with h5py.File(path, "r+") as file:
        del file[name]
        file[name] = target


def make_virtual(path: Path, name: str, source: str) -> None:
    """Replace an array by a virtual dataset of one in another file."""
    with h5py.File(path, "r+") as file:
        stored, attributes = file[name], dict(file[name].attrs)
        layout = h5py.VirtualLayout(stored.shape, stored.dtype)
        layout[...] = h5py.VirtualSource(source, name, stored.shape)
        del file[name]
        file.create_virtual_dataset(name, layout).attrs.update(attributes)


def in_memory(path: Path | ad.AnnData, name: str) -> Any:
    adata = ad.read_h5ad(path) if isinstance(path, Path) else path
    folder, key = name.partition("/")[::2]
    found: Any = adata.raw.X if folder == "raw" else getattr(adata, folder)
    if folder in ("layers", "obsm"):
        found = found[key]
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found)


@pytest.mark.parametrize("name", ["X", "X/data", "X/indptr", "obsm/pca", "obs/number"])
@pytest.mark.parametrize("kind", ["virtual", "raw"])
def test_virtual_datasets_and_raw_files_are_refused(folder, name, kind):
    """HDF5 returns zeros where a source is missing."""
    _, here = write_pair(folder, "dense" if name == "X" else "csr", {})
    if kind == "virtual":
        make_virtual(here, name, "there/big.h5ad")
    else:
        write_raw(here, name, folder / "raw.bin")
    said = f"`{name}` is virtual, or has its values in another file; write one file with all"
    with WebServer(folder) as server:
        for where in (here, f"{server.url}/{here.name}"):
            with pytest.raises(FormatError, match=f"small.h5ad: {said}"):
                open_collection(where, elements=["X", "obsm/pca"], obs=["number", "type"])


@pytest.mark.parametrize("target", ["/nowhere", "/layers/counts"])
def test_links_to_nothing_and_to_themselves_are_named(folder, target):
    _, here = write_pair(folder, "dense", {})
    link(here, "layers/counts", h5py.SoftLink(target))
    with pytest.raises(FormatError, match=rf"`layers/counts` is a link to `{target}`, wh"):
        open_collection(here, elements=["layers/counts"])


ELSEWHERE = r"another file; write one file with all values: `anndata.read_h5ad\(path\).write_h5ad\("


@pytest.mark.parametrize(
    "name", ["X", "X/data", "X/indptr", "obsm/pca", "obs", "obs/number", "obs/type/codes", "var"]
)
@pytest.mark.parametrize("target", ["there/big.h5ad", "gone.h5", "pipe"])
@pytest.mark.parametrize("is_soft", [False, True])
def test_links_into_other_files_are_refused_without_opening_them(folder, name, target, is_soft):
    """Opening a pipe would wait for ever."""
    _, here = write_pair(folder, "csr", {})
    os.mkfifo(folder / "pipe")
    link(here, name, h5py.ExternalLink(target, f"/{name}"))
    if is_soft:
        with h5py.File(here, "r+") as file:
            file["uns/elsewhere"] = h5py.ExternalLink(target, "/")
        link(here, name, h5py.SoftLink(f"/uns/elsewhere/{name}"))
    said = f"small.h5ad: `.*` is a link to `/.*` of '{target}', {ELSEWHERE}"
    with WebServer(folder) as server:
        for where in (here, f"{server.url}/{here.name}"):
            with pytest.raises(FormatError, match=said):
                open_collection(where, elements=["X", "obsm/pca"], obs=["number", "type"])
    if target == "there/big.h5ad":
        ad.read_h5ad(here).write_h5ad(folder / "copy.h5ad")
        found = open_collection(folder / "copy.h5ad")[:].X
        assert np.array_equal(dense(found), in_memory(here, "X"))


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_links_within_a_file_are_followed(folder, layout, options):
    _, here = write_pair(folder, layout, options)
    with h5py.File(here, "r+") as file:
        file.move("layers", "uns/moved")
        file.move("obs/type/codes", "obs/type/moved")
        file["uns/between"] = h5py.SoftLink("moved")
        file["obs/type/codes"] = h5py.SoftLink("moved")
    link(here, "X", h5py.SoftLink("/uns/between/counts"))
    link(here, "obs/number", h5py.SoftLink("before"))
    collection = open_collection(here, obs=["number", "type"])
    adata = ad.read_h5ad(here)
    assert np.array_equal(dense(collection[:].X), dense(adata.X))
    assert list(collection.obs["number"].values) == adata.obs["number"].tolist()
    assert labels_of(collection, "type") == adata.obs["type"].tolist()
    assert collection.describe()["is_fast"].all()


def write_raw(path: Path, name: str, raw: Path, offset: int = 16) -> None:
    """Move the bytes of an array to a file that is not HDF5."""
    with h5py.File(path, "r+") as file:
        values = file[name][...]
        raw.write_bytes(bytes(offset))
        replace(file, name, values, external=[(str(raw), offset, values.nbytes)])


def test_modalities_that_are_links_are_refused(folder):
    write_pair(folder, "dense", {})
    path = folder / "both.h5mu"
    os.mkfifo(folder / "pipe")
    for name in ("mod", "mod/rna", "obsmap"):
        with h5py.File(path, "w") as file:
            for table in ("obs", "var"):
                ad.io.write_elem(file, table, pd.DataFrame(index=CELLS))
            ad.io.write_elem(file, "obsmap", {"rna": np.arange(1, N + 1)})
            ad.io.write_elem(file, "mod", {"rna": cells(COUNTS)})
        link(path, name, h5py.ExternalLink("pipe", "/"))
        said = rf"`{name}.*` is a link to `/` of 'pipe', {ELSEWHERE}"
        with pytest.raises(FormatError, match=said):
            open_collection(path, elements=["mod/rna/X"])
