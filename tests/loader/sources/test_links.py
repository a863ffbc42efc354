"""Values that lie in other files: links, against anndata; others are refused."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import dense, replace
from tests.servers.web import WebServer

from cellfeed import FormatError, ParameterError, PathError, open_collection

N, M = 40, 12
COUNTS = np.random.default_rng(0).poisson(0.7, (N, M)).astype(np.float32) + np.eye(N, M, k=1)
COUNTS = COUNTS.astype(np.float32)
CELLS = [f"cell{i}" for i in range(N)]
TYPES = pd.Categorical([["B", "NK", "T"][i % 3] for i in range(N)])
ELEMENTS = ["X", "layers/counts", "raw/X", "obsm/pca"]
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


def values(collection: Any, names: list[str]) -> dict[str, np.ndarray]:
    rows = collection[np.arange(N)]
    return {name: dense(rows[name]) for name in names}


def in_memory(path: Path | ad.AnnData, name: str) -> Any:
    adata = ad.read_h5ad(path) if isinstance(path, Path) else path
    folder, key = name.partition("/")[::2]
    found: Any = adata.raw.X if folder == "raw" else getattr(adata, folder)
    if folder in ("layers", "obsm"):
        found = found[key]
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found)


WAYS = ["link", "through a file", "through a soft link"]


def places(layout: str) -> list[str]:
    """Return what can lie elsewhere."""
    matrices = ["X", "layers/counts", "raw/X"]
    found = [*matrices, "obs/type/categories", "var", "obs"]
    found += ["obsm/pca", "obs/number", "obs/type/codes"]
    parts = [f"{name}/{part}" for name in matrices for part in ("data", "indices", "indptr")]
    return found + parts * (layout == "csr")


def place(here: Path, name: str, way: str) -> set[Path]:
    """Let an element or array lie elsewhere; return in which files."""
    there, between = here.parent / "there" / "big.h5ad", here.parent / "sub" / "between.h5"
    if way == "link":
        link(here, name, h5py.ExternalLink("there/big.h5ad", f"/{name}"))
    elif way == "through a soft link":
        with h5py.File(here, "r+") as file:
            if "uns/elsewhere" not in file:
                file["uns/elsewhere"] = h5py.ExternalLink("there/big.h5ad", "/")
        link(here, name, h5py.SoftLink(f"/uns/elsewhere/{name}"))
    else:
        between.parent.mkdir(exist_ok=True)
        with h5py.File(between, "a") as file:
            file[name] = h5py.ExternalLink("../there/big.h5ad", f"/{name}")
        called = ("sub/../sub/between.h5", str(between))[len(name) % 2]
        link(here, name, h5py.ExternalLink(called, f"/{name}"))
        return {between, there}
    return {there}


@pytest.fixture(scope="module")
def pairs(new_folder):
    """Folders as `write_pair` makes them, by layout and filters."""
    folders = dict[tuple[str, str], Path]()
    for layout in ("dense", "csr"):
        for filters, options in FILTERS.items():
            folders[layout, filters] = new_folder()
            write_pair(folders[layout, filters], layout, options)
    return folders


@given(
    layout=st.sampled_from(["dense", "csr"]), filters=st.sampled_from([*FILTERS]), data=st.data()
)
def test_what_lies_elsewhere_is_read_as_by_anndata_and_watched(
    pairs, new_folder, layout, filters, data
):
    here = shutil.copytree(pairs[layout, filters], new_folder() / "pair") / "small.h5ad"
    names = data.draw(st.lists(st.sampled_from(places(layout)), min_size=1, unique=True))
    ways, files = dict[str, str](), set[Path]()
    for name in names:
        if not any(f"{name}/".startswith(f"{other}/") for other in ways):
            ways[name] = data.draw(st.sampled_from(WAYS))
    for name in [each for each in ways if each.rpartition("/")[0] in ways]:
        del ways[name]  # it goes with the whole element
    for name, way in ways.items():
        files |= place(here, name, way)
    options: Any = {"elements": ELEMENTS, "obs": ["number", "type"]}
    collection = open_collection(here, **options)
    adata = ad.read_h5ad(here)
    for name, found in values(collection, ELEMENTS).items():
        assert np.array_equal(found, in_memory(adata, name)), name
    assert list(collection.obs["number"].values) == adata.obs["number"].tolist()
    types: Any = collection.obs["type"]
    assert types.decode(types.codes).tolist() == adata.obs["type"].tolist()
    assert list(collection.var_names) == list(adata.var_names)
    assert {path.resolve() for path in collection.files} == {here, *files}
    assert collection.describe()["is_fast"].all()
    changed, copy = data.draw(st.sampled_from(sorted(files))), pickle.dumps(collection)
    os.utime(changed, ns=(0, 0))
    for each in (collection, pickle.loads(copy)):
        with pytest.raises(FormatError, match=rf"{changed.name}: was replaced or written to"):
            each[:]
    changed.unlink()
    with pytest.raises(PathError, match=rf"{changed.name}: was removed"):
        collection[:]


@pytest.mark.parametrize("name", ["X", "obs", "obs/number", "obs/type/codes", "obsm/pca"])
def test_what_is_lost_is_named(folder, name):
    there, here = write_pair(folder, "dense", {})
    link(here, name, h5py.ExternalLink("there/big.h5ad", f"/{name}"))
    options: Any = {"elements": ["X", "obsm/pca"], "obs": ["number", "type"]}
    said = f"^{here}: `{name}.*` is a link to `/{name}` of 'there/big.h5ad', which"
    with h5py.File(there, "r+") as file:
        file.move(name, "uns/moved")
    with pytest.raises(FormatError, match=f"{said} cannot be opened; put back"):
        open_collection(here, **options)
    there.rename(there.with_name("moved.h5ad"))
    with pytest.raises(FormatError, match=f"{said} is no file; put back"):
        open_collection(here, **options)


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


@pytest.mark.parametrize("way", ["link", "links", "soft link"])
def test_pipes_are_refused(folder, way):
    """Opening one would wait for ever."""
    name = "obs/number"
    there, here = write_pair(folder, "dense", {})
    os.mkfifo(folder / "pipe")
    if way == "link":
        link(here, name, h5py.ExternalLink("pipe", "X"))
    elif way == "links":
        link(there, "X", h5py.ExternalLink(str(folder / "pipe"), "X"))
        link(here, name, h5py.ExternalLink("there/big.h5ad", "X"))
    else:
        link(here, name, h5py.SoftLink("/uns/pipe"))
        link(here, "uns", h5py.ExternalLink("pipe", "uns"))
    with pytest.raises(FormatError, match=r"pipe', which is no file; put back what it leads to$"):
        open_collection(here, obs=["number"])


class TestWhereElse:
    """Links are followed by all that reads files."""

    def linked(self, folder: Path, layout: str = "csr") -> tuple[Path, Path]:
        there, here = write_pair(folder, layout, FILTERS["gzip"])
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/X"))
        return there, here

    def test_a_copy_where_another_folder_is_the_current_one(self, folder, monkeypatch):
        _, here = self.linked(folder)
        pickled = pickle.dumps(open_collection(here))
        monkeypatch.chdir("/")
        assert np.array_equal(dense(pickle.loads(pickled)[:].X), in_memory(here, "X"))

    @pytest.mark.parametrize("layout", ["dense", "csr"])
    def test_that_lead_back_into_the_file_itself(self, folder, layout):
        """Only the file between changes; its links choose among arrays of the first one."""
        _, here = write_pair(folder, layout, {})
        between = folder / "between.h5"
        with h5py.File(here, "r+") as file:
            file.move("X", "uns/first")
            file.copy("raw/X", file, "uns/second")
            file["X"] = h5py.ExternalLink("between.h5", "X")
        os.utime(here, ns=(0, 0))
        for name in ("first", "second", "first"):
            collection: Any = None  # HDF5 writes no file that it has open to read
            with h5py.File(between, "w") as file:
                file["X"] = h5py.ExternalLink("small.h5ad", f"uns/{name}")
            os.utime(between, ns=(0, len(name)))
            collection = open_collection(here)
            assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))
            assert between in collection.files
        os.utime(between, ns=(0, 0))
        with pytest.raises(FormatError, match=rf"^{between}: was replaced"):
            collection[:]

    def test_preshuffle(self, folder):
        preshuffle = pytest.importorskip("cellfeed.preshuffling").preshuffle
        there, here = self.linked(folder)
        out = folder / "out.zarr"
        preshuffle(here, out)
        found = ad.io.read_zarr(out / "dataset_0")
        rows = [CELLS.index(name) for name in found.obs_names]
        assert np.array_equal(found.X.toarray(), in_memory(here, "X")[rows])
        os.utime(there, ns=(0, 0))
        with pytest.raises((FormatError, ParameterError), match=r"big\.h5ad` was changed"):
            preshuffle(here, out)

    def test_cached_tables_are_those_of_the_array(self, folder, monkeypatch):
        """Two links of one name into one file, and a link that is changed to another array."""
        monkeypatch.setattr("cellfeed.bytes._tables._FEWEST_ENTRIES", 1)
        there, here = self.linked(folder)
        os.utime(there, ns=(0, 0))
        with h5py.File(there, "r+") as file:
            ad.io.write_elem(file, "other", sp.csr_matrix(COUNTS[::-1] * 5))
        os.utime(there, ns=(0, 0))
        for name in ("X", "other", "X"):
            link(here, "X", h5py.ExternalLink("there/big.h5ad", f"/{name}"))
            found = dense(open_collection(here)[:].X)
            with h5py.File(there) as file:
                assert np.array_equal(found, ad.io.read_elem(file[name]).toarray())

    def test_servers_are_refused(self, folder):
        """There, HDF5 would take the file itself for the one that a link names."""
        _, here = write_pair(folder, "dense", {})
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/layers/counts"))
        link(here, "obsm/pca", h5py.ExternalLink("there/big.h5ad", "/obsm/pca"))
        there, expected = "layers/counts", in_memory(here, "layers/counts")
        for name in ("obs/number", "obs/type/codes"):
            link(here, name, h5py.ExternalLink("there/big.h5ad", "/obs/number"))
        with WebServer(folder) as server:
            url = f"{server.url}/small.h5ad"
            for name, element, obs in (
                ("X", "X", []),
                ("obsm/pca", "obsm/pca", []),
                ("obs/number", there, ["number"]),
                ("obs/type/codes", there, ["type"]),
            ):
                said = rf"`{name}` is a link to `/\S+` of 'there/big.h5ad', another file, which is"
                with pytest.raises(FormatError, match=said):
                    open_collection(url, elements=[element], obs=obs)
            collection = open_collection(url, elements=[there])
            assert np.array_equal(collection[:][there], expected)


def write_raw(path: Path, name: str, raw: Path, offset: int = 16) -> None:
    """Move the bytes of an array to a file that is not HDF5."""
    with h5py.File(path, "r+") as file:
        values = file[name][...]
        raw.write_bytes(bytes(offset))
        replace(file, name, values, external=[(str(raw), offset, values.nbytes)])


def test_modalities_that_are_links(folder):
    there, _ = write_pair(folder, "dense", {})
    obs = pd.DataFrame(index=CELLS)
    path = folder / "both.h5mu"
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0"})
        ad.io.write_elem(file, "obs", obs)
        ad.io.write_elem(file, "var", pd.DataFrame(index=[f"gene{i}" for i in range(M)]))
        ad.io.write_elem(file, "obsmap", {"rna": np.arange(1, N + 1)})
        file.create_group("mod")["rna"] = h5py.ExternalLink("there/big.h5ad", "/")
    collection = open_collection(path, elements=["mod/rna/X"])
    assert np.array_equal(dense(collection[:].X), in_memory(there, "X"))
    for name in ("obsmap", "mod"):
        other = folder / f"{name}.h5mu"
        other.write_bytes(path.read_bytes())
        with h5py.File(other, "r+") as file:
            del file[name]
            file[name] = h5py.ExternalLink("gone.h5", "/all")
        said = rf"^{other}: `{name}.*` is a link to `/all` of 'gone.h5', which is no file; put"
        with pytest.raises(FormatError, match=said):
            open_collection(other, elements=["mod/rna/X"])
    there.unlink()
    with pytest.raises(FormatError, match=r"is a link to `/` of 'there/big.h5ad', which is no"):
        open_collection(path, elements=["mod/rna/X"])


@pytest.mark.parametrize("kind", ["itself", "linked"])
def test_a_file_that_is_written_while_it_is_open_is_not_opened_again(folder, kind):
    """HDF5 would combine what it has in memory with what is in the file now."""
    there, here = write_pair(folder, "dense", {})
    path = there
    if kind == "linked":
        path = here
        link(here, "obs", h5py.ExternalLink("there/big.h5ad", "/obs"))
    adata = cells(COUNTS, 3.0)
    adata.var_names = [f"other{i}" for i in range(M)]
    adata.write_h5ad(folder / "other.h5ad")
    before = open_collection(path, obs=["number"])
    with there.open("r+b") as file:  # the same file, as `cp` writes it
        file.write((folder / "other.h5ad").read_bytes())
        file.truncate()
    with pytest.raises(FormatError, match=rf"^{there}: was written to while this process has it"):
        open_collection(path, obs=["number"])
    garbage = [before]
    garbage.append(garbage)  # type: ignore[arg-type]
    del before, garbage
    assert list(open_collection(path, obs=["number"]).obs["number"].values) == [
        3.0 * i for i in range(N)
    ]


def test_a_mounted_file_is_refused(tmp_path):
    """Its chunks lie at other offsets; and other processes do not have it."""
    there, here = write_pair(tmp_path, "dense", {})
    with h5py.File(here, "r+") as file:
        del file["layers"]
        file.create_group("layers")
    with h5py.File(here) as file, h5py.File(there) as other:
        h5py.h5f.mount(file.id, b"/layers", other.id)
        with pytest.raises(FormatError, match=r"`layers/X` is virtual, or has its"):
            open_collection(here, elements=["layers/X"])
