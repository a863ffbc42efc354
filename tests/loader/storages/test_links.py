"""Values that lie in other files: links, virtual datasets and raw files, against anndata."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from tests.loader.matrices import dense
from tests.servers.web import WebServer

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    PathError,
    open_collection,
    preshuffle,
)

N, M = 40, 12
COUNTS = np.random.default_rng(0).poisson(0.7, (N, M)).astype(np.float32) + np.eye(N, M, k=1)
COUNTS = COUNTS.astype(np.float32)
CELLS = [f"cell{i}" for i in range(N)]
TYPES = pd.Categorical([["B", "NK", "T"][i % 3] for i in range(N)])
ELEMENTS = ["X", "layers/counts", "raw/X", "obsm/pca", "obsm/frame"]
FILTERS: dict[str, dict[str, Any]] = {
    "uncompressed": {},
    "gzip": {"compression": "gzip"},
}


def cells(X: Any, by: float = 1.0) -> ad.AnnData:
    """All elements that are read, each with its own values."""
    obs = pd.DataFrame({"type": TYPES, "number": np.arange(N) * by}, index=CELLS)
    frame = pd.DataFrame({"a": np.arange(N) * by, "b": 7.0}, index=CELLS)
    var = pd.DataFrame(index=[f"gene{i}" for i in range(M)])
    raw = ad.AnnData(X * np.float32(3 * by), obs=obs, var=var)
    adata = ad.AnnData(X * np.float32(by), obs=obs, var=var, layers={"counts": X * np.float32(by)})
    adata.obsm["pca"], adata.obsm["frame"] = np.arange(N * 3.0).reshape(N, 3) * by, frame
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


def link_virtually(path: Path, name: str, source: str, called: str = "") -> None:
    """Replace an array by a virtual dataset of one in another file, which it may call otherwise."""
    folder = path.parent
    with h5py.File(path, "r+") as file, h5py.File(folder / source, "r") as there:
        attributes, stored = dict(file[name].attrs), there[name]
        layout = h5py.VirtualLayout(stored.shape, stored.dtype)
        layout[...] = h5py.VirtualSource(called or source, name, stored.shape)
        del file[name]
        file.create_virtual_dataset(name, layout).attrs.update(attributes)


def values(collection: Any, names: list[str]) -> dict[str, np.ndarray]:
    rows = collection[np.arange(N)]
    return {name: dense(rows[name]) for name in names}


def in_memory(path: Path, name: str) -> Any:
    adata, folder, key = ad.read_h5ad(path), *name.partition("/")[::2]
    found: Any = adata.raw.X if folder == "raw" else getattr(adata, folder)
    if folder in ("layers", "obsm"):
        found = found[key]
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("layout", ["dense", "csr"])
class TestExternalLinks:
    @pytest.mark.parametrize("name", ELEMENTS)
    def test_of_an_element(self, folder, layout, filters, name):
        there, here = write_pair(folder, layout, FILTERS[filters])
        link(here, name, h5py.ExternalLink("there/big.h5ad", f"/{name}"))
        expected = in_memory(here, name)
        assert np.array_equal(expected, in_memory(there, name))
        collection = open_collection(here, elements=[name])
        assert np.array_equal(values(collection, [name])[name], expected)
        assert name == "obsm/frame" or collection.describe()["is_fast"].all()
        assert set(collection.files) == {here, there}

    def test_of_several_elements_that_are_read_together(self, folder, layout, filters):
        _, here = write_pair(folder, layout, FILTERS[filters])
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/X"))
        link(here, "obsm/pca", h5py.ExternalLink("there/big.h5ad", "/obsm/pca"))
        collection = open_collection(here, elements=ELEMENTS)
        for name, found in values(collection, ELEMENTS).items():
            assert np.array_equal(found, in_memory(here, name)), name

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_in_workers(self, folder, layout, filters, num_workers):
        _, here = write_pair(folder, layout, FILTERS[filters])
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/X"))
        collection = open_collection([here], elements=["X"])
        dataset = CellDataset(collection, BlockShuffling(2), 8, fetch_factor=2)
        expected = in_memory(here, "X")
        for minibatch in dataset.loader(num_workers=num_workers):
            assert np.array_equal(dense(minibatch.X), expected[minibatch.rows])

    def test_through_further_links(self, folder, layout, filters):
        there, here = write_pair(folder, layout, FILTERS[filters])
        with h5py.File(folder / "between.h5", "w") as file:
            file["matrix"] = h5py.ExternalLink("there/big.h5ad", "/layers/counts")
            file["all"] = h5py.ExternalLink("there/big.h5ad", "/")
            file["soft"] = h5py.SoftLink("/all/raw/X")
        link(here, "X", h5py.ExternalLink("between.h5", "/matrix"))
        link(here, "layers/counts", h5py.ExternalLink("between.h5", "/all/X"))
        link(here, "raw/X", h5py.ExternalLink("between.h5", "/soft"))
        with h5py.File(here, "r+") as file:
            file["uns/elsewhere"] = h5py.ExternalLink("between.h5", "/all")
        link(here, "obsm/pca", h5py.SoftLink("/uns/elsewhere/obsm/pca"))
        for name, found in values(open_collection(here, elements=ELEMENTS), ELEMENTS).items():
            assert np.array_equal(found, in_memory(here, name)), name
            assert np.array_equal(found, in_memory(here if name == "obsm/frame" else there, name))

    def test_of_obs_and_var(self, folder, layout, filters):
        there, here = write_pair(folder, layout, FILTERS[filters])
        for name in ("obs/number", "obs/type/categories", "var"):
            link(here, name, h5py.ExternalLink("there/big.h5ad", f"/{name}"))
        collection = open_collection(here, obs=["number", "type"])
        expected = ad.read_h5ad(here).obs
        assert list(collection.obs["number"].values) == expected["number"].tolist()
        assert list(collection.obs["number"].values) == [*np.arange(N) * 2.0]
        types: Any = collection.obs["type"]
        assert list(types.categories) == list(expected["type"].cat.categories)
        assert list(collection.var_names) == list(ad.read_h5ad(here).var_names)
        assert there in collection.files

    def test_are_watched(self, folder, layout, filters):
        there, here = write_pair(folder, layout, FILTERS[filters])
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/X"))
        collection = open_collection(here)
        assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))
        os.utime(there, ns=(0, 0))
        with pytest.raises(FormatError, match=rf"^{there}: was replaced or written to"):
            collection[:]
        there.unlink()
        with pytest.raises(PathError, match=rf"^{there}: was removed"):
            collection[:]

    def test_that_lead_to_nothing_are_named(self, folder, layout, filters):
        there, here = write_pair(folder, layout, FILTERS[filters])
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/X"))
        there.rename(folder / "moved.h5ad")
        said = rf"^{here}: `X` is a link to `/X` of 'there/big.h5ad', which cannot be opened; put"
        with pytest.raises(FormatError, match=said):
            open_collection(here)
        for target in ("/nowhere", "/layers/counts"):  # the second is a link to itself
            link(here, "layers/counts", h5py.SoftLink(target))
            with pytest.raises(FormatError, match=rf"`layers/counts` is a link to `{target}`, wh"):
                open_collection(here, elements=["layers/counts"])
        link(here, "obs", h5py.ExternalLink("there/big.h5ad", "/obs"))
        with pytest.raises(FormatError, match=r": `obs` is a link to `/obs` of 'there/big.h5ad'"):
            open_collection(here, elements=["layers/counts"])


@pytest.mark.parametrize("element", ["X", "X/data"])
def test_of_one_file_by_several_paths(folder, element):
    """HDF5 names a file by the links that lead to it, and one that is open as it was opened."""
    _, here = write_pair(folder, "csr", {})
    between = folder / "sub" / "between.h5"
    between.parent.mkdir()
    with h5py.File(between, "w") as file, h5py.File(here) as own:
        file["further"] = h5py.ExternalLink("../there/big.h5ad", f"/{element}")
        file.copy(own["layers/counts"], "counts")
    link(here, element, h5py.ExternalLink("sub/../sub/between.h5", "/further"))
    link(here, "layers/counts", h5py.ExternalLink(str(between), "/counts"))
    names = ["X", "layers/counts"]
    for name, found in values(open_collection(here, elements=names), names).items():
        assert np.array_equal(found, in_memory(here, name)), name


class TestWhereElse:
    """Links are followed by all that reads files."""

    def linked(self, folder: Path, layout: str = "csr") -> tuple[Path, Path]:
        there, here = write_pair(folder, layout, FILTERS["gzip"])
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/X"))
        return there, here

    def test_uncached(self, folder):
        _, here = self.linked(folder)
        collection = open_collection(here, uncached=True)
        assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))

    def test_another_process(self, folder):
        """With another current folder, as `spawn` may leave it."""
        _, here = self.linked(folder)
        pickled = pickle.dumps(open_collection(here))
        code = f"""
import pickle
import numpy as np
collection = pickle.loads({pickled!r})
np.save({str(folder / "found.npy")!r}, collection[:].X.toarray())
"""
        done = run(code)
        assert done.returncode == 0, done.stderr
        assert np.array_equal(np.load(folder / "found.npy"), in_memory(here, "X"))

    @pytest.mark.parametrize("is_virtual", [False, True])
    def test_files_between_are_watched(self, folder, is_virtual):
        there, here = write_pair(folder, "dense", {})
        between, last = folder / "between.h5", folder / "last.h5"
        with h5py.File(last, "w") as file, h5py.File(there) as values:
            values.copy("X", file, "values")
        with h5py.File(between, "w") as file:
            file["X"] = h5py.ExternalLink("last.h5", "values")
        if is_virtual:
            link_virtually(here, "X", "between.h5")
        else:
            link(here, "X", h5py.ExternalLink("between.h5", "X"))
        pickled = pickle.dumps(collection := open_collection(here))
        assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))
        assert [path.name for path in collection.files] == ["small.h5ad", "between.h5", "last.h5"]
        for path in (between, last):
            before = path.stat().st_mtime_ns
            os.utime(path, ns=(0, 0))
            for each in (collection, pickle.loads(pickled)):
                with pytest.raises(FormatError, match=rf"^{path}: was replaced"):
                    each[:]
            os.utime(path, ns=(before, before))

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
            with h5py.File(between, "w") as file:
                file["X"] = h5py.ExternalLink("small.h5ad", f"uns/{name}")
            os.utime(between, ns=(0, len(name)))
            collection = open_collection(here)
            assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))
            assert between in collection.files
        os.utime(between, ns=(0, 0))
        with pytest.raises(FormatError, match=rf"^{between}: was replaced"):
            collection[:]

    @pytest.mark.parametrize("is_virtual", [False, True])
    def test_where_a_file_appears_that_they_would_lead_to_now(self, folder, is_virtual):
        """A collection that was moved has files beside it whose first places are empty."""
        there, here = write_pair(folder, "dense", {})
        first = folder / "before" / "big.h5ad"
        shutil.copy(there, folder / "big.h5ad")
        if is_virtual:
            link_virtually(here, "X", "big.h5ad", f"{first}")
        else:
            link(here, "X", h5py.ExternalLink(f"{first}", "X"))
        pickled = pickle.dumps(collection := open_collection(here))
        assert np.array_equal(dense(collection[:].X), in_memory(there, "X"))
        assert list(collection.files) == [here, folder / "big.h5ad"]
        first.parent.mkdir()
        shutil.copy(there, first)
        for each in (collection, pickle.loads(pickled)):
            with pytest.raises(FormatError, match=rf"^{first}: has appeared"):
                each[:]

    def test_in_the_current_folder_alone_are_refused(self, folder, monkeypatch):
        """Another process, or a later read, may find another file there."""
        there, here = write_pair(folder, "dense", {})
        monkeypatch.chdir(there.parent)
        link(here, "X", h5py.ExternalLink("big.h5ad", "X"))
        with pytest.raises(FormatError, match=r"`X` is a link into 'big.h5ad', which is in the cu"):
            open_collection(here)
        monkeypatch.chdir(here.parent)
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "X"))  # also beside it
        assert np.array_equal(dense(open_collection(here)[:].X), in_memory(here, "X"))

    def test_preshuffle(self, folder):
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
        monkeypatch.setattr("cellfeed._bytes._tables._FEWEST_ENTRIES", 1)
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

    @pytest.mark.parametrize("kind", ["virtual", "raw"])
    def test_tables_of_values_in_other_files_are_not_cached(self, folder, monkeypatch, kind):
        monkeypatch.setattr("cellfeed._bytes._tables._FEWEST_ENTRIES", 1)
        there, here = write_pair(folder, "csr", {})
        lengths, raw = np.diff(sp.csr_matrix(COUNTS).indptr), folder / "raw.bin"
        if kind == "virtual":
            link_virtually(here, "X/indptr", "there/big.h5ad")
        else:
            write_raw(here, "X/indptr", raw, offset=0)
        os.utime(here, ns=(0, 0))
        for each in (lengths, lengths[::-1]):
            pointer = np.append(0, np.cumsum(each)).astype(np.int32)
            with h5py.File(there, "r+") as file:
                file["X/indptr"][...] = pointer
            if kind == "raw":
                raw.write_bytes(pointer.tobytes())
            assert np.array_equal(dense(open_collection(here)[:].X), in_memory(here, "X"))

    @pytest.mark.parametrize("is_link", [True, False])
    def test_sources_in_a_file_on_a_server_may_lead_elsewhere(self, folder, is_link):
        """HDF5 would return zeros."""
        _, here = write_pair(folder, "dense", {})
        with h5py.File(here, "r+") as file:
            attributes, stored = dict(file["X"].attrs), file["X"]
            layout = h5py.VirtualLayout(stored.shape, stored.dtype)
            layout[...] = h5py.VirtualSource(".", "uns/values", stored.shape)
            del file["X"]
            file.create_virtual_dataset("X", layout).attrs.update(attributes)
            if is_link:
                file["uns/values"] = h5py.ExternalLink("there/big.h5ad", "X")
        said = (
            "'there/big.h5ad', which is not looked for" if is_link else "`uns/values`, which is not"
        )
        with WebServer(folder) as server, pytest.raises(FormatError, match=said):
            open_collection(f"{server.url}/{here.name}")

    def test_servers_are_refused(self, folder):
        """There, HDF5 would take the file itself for the one that a link names."""
        _, here = write_pair(folder, "dense", {})
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/layers/counts"))
        link_virtually(here, "obsm/pca", "there/big.h5ad")
        link(here, "obs/number", h5py.ExternalLink("there/big.h5ad", "/obs/number"))
        with WebServer.in_process(folder) as url:
            for name in ("X", "obsm/pca"):
                said = rf"small.h5ad: `{name}` is in another file, 'there/big.h5ad', which is not"
                with pytest.raises(FormatError, match=said):
                    open_collection(f"{url}/small.h5ad", elements=[name])
            with pytest.raises(FormatError, match=r"`obs/number` is in another file"):
                open_collection(f"{url}/small.h5ad", elements=["layers/counts"], obs=["number"])
            collection = open_collection(f"{url}/small.h5ad", elements=["layers/counts"])
            assert np.array_equal(collection[:]["layers/counts"], in_memory(here, "layers/counts"))
            link(here, "obs/type/codes", h5py.ExternalLink("there/big.h5ad", "/obs/number"))
            with pytest.raises(FormatError, match=r"`obs/type/codes` is in another file"):
                open_collection(f"{url}/small.h5ad", elements=["layers/counts"], obs=["type"])


def run(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize("array", ["data", "indices", "indptr"])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", ["link", "virtual", "raw"])
def test_one_array_of_a_csr_matrix(folder, array, filters, kind):
    _, here = write_pair(folder, "csr", FILTERS[filters])
    name = f"X/{array}"
    if kind == "link":
        link(here, name, h5py.ExternalLink("there/big.h5ad", f"/{name}"))
    elif kind == "virtual":
        link_virtually(here, name, "there/big.h5ad")
    else:
        write_raw(here, name, folder / "raw.bin")
    collection = open_collection(here)
    assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))


def write_raw(path: Path, name: str, raw: Path, offset: int = 16) -> None:
    """Move the bytes of an array to a file that is not HDF5."""
    with h5py.File(path, "r+") as file:
        values, attributes = file[name][...], dict(file[name].attrs)
        raw.write_bytes(bytes(offset))
        del file[name]
        where = [(str(raw), offset, values.nbytes)]
        file.create_dataset(name, data=values, external=where).attrs.update(attributes)


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
    collection = open_collection(path, elements=["mod/rna/X"], obs=["rna:type"])
    assert np.array_equal(dense(collection[:].X), in_memory(there, "X"))
    for name in ("obsmap", "mod"):
        other = folder / f"{name}.h5mu"
        other.write_bytes(path.read_bytes())
        with h5py.File(other, "r+") as file:
            del file[name]
            file[name] = h5py.ExternalLink("gone.h5", "/all")
        said = (
            rf"^{other}: `{name}.*` is a link to `/all` of 'gone.h5', which cannot be opened; put"
        )
        with pytest.raises(FormatError, match=said):
            open_collection(other, elements=["mod/rna/X"])
    there.unlink()
    with pytest.raises(FormatError, match=r"is a link to `/` of 'there/big.h5ad', which cannot"):
        open_collection(path, elements=["mod/rna/X"])


class TestVirtualDatasets:
    @pytest.mark.parametrize("name", ["X", "obsm/pca", "obs/number"])
    def test_are_read_as_by_anndata_until_their_source_moves(self, folder, name):
        there, here = write_pair(folder, "dense", {"compression": "gzip"})
        link_virtually(here, name, "there/big.h5ad")
        element = name if not name.startswith("obs/") else "X"
        collection = open_collection(here, elements=[element], obs=["number"])
        assert np.array_equal(dense(collection[:][element]), in_memory(here, element))
        expected = ad.read_h5ad(here).obs["number"].tolist()
        assert list(collection.obs["number"].values) == expected
        os.utime(there, ns=(0, 0))
        with pytest.raises(FormatError, match=rf"^{there}: was replaced"):
            collection[:]
        there.rename(folder / "moved.h5ad")
        said = rf"^{here}: `{name}` is virtual, .* `{name}` in 'there/big.h5ad', which is not there"
        with pytest.raises(FormatError, match=said):
            open_collection(here, elements=[element], obs=["number"])

    def test_of_codes_are_refused_where_their_source_has_moved(self, folder):
        there, here = write_pair(folder, "dense", {})
        link_virtually(here, "obs/type/codes", "there/big.h5ad")
        column: Any = open_collection(here, obs=["type"]).obs["type"]
        assert np.array_equal(column.codes, TYPES.codes)
        there.rename(folder / "moved.h5ad")
        with pytest.raises(FormatError, match=r"`obs/type/codes` is virtual.*is not there"):
            open_collection(here, obs=["type"])

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda file: file.move("X", "Y"), "has no such array"),
            (lambda file: file["X"].resize((N - 1, M)), "now has another shape"),
        ],
    )
    def test_of_a_source_that_has_changed(self, folder, change, said):
        there, here = write_pair(folder, "dense", {})
        with h5py.File(there, "r+") as file:
            attributes, X = dict(file["X"].attrs), file["X"][:]
            del file["X"]
            file.create_dataset("X", data=X, maxshape=(None, M)).attrs.update(attributes)
        link_virtually(here, "X", "there/big.h5ad")
        assert np.array_equal(dense(open_collection(here)[:].X), in_memory(here, "X"))
        with h5py.File(there, "r+") as file:
            change(file)
        with pytest.raises(FormatError, match=rf"^{here}: `X` is virtual.*{said}"):
            open_collection(here)

    def test_that_can_grow_are_refused_where_a_part_of_a_source_is_gone(self, folder):
        there, here = write_pair(folder, "dense", {})
        with h5py.File(there) as file:
            X = file["X"][:]
        source = there.with_name("source.h5")

        def write(values: np.ndarray) -> None:
            with h5py.File(source, "w") as file:
                file.create_dataset("X", data=values, maxshape=(None, M), compression="gzip")

        with h5py.File(here, "r+") as file:
            attributes = dict(file["X"].attrs)
            layout = h5py.VirtualLayout(X.shape, X.dtype, maxshape=(None, M))
            layout[:] = h5py.VirtualSource(source, "X", (N + 1, M), X.dtype)[1:]
            del file["X"]
            file.create_virtual_dataset("X", layout).attrs.update(attributes)
        write(np.concatenate([X[:1], X]))
        assert np.array_equal(dense(open_collection(here)[:].X), X)
        write(X[: N // 2])
        with pytest.raises(FormatError, match=rf"^{here}: `X` is virtual.*now has another shape"):
            open_collection(here)

    @pytest.mark.parametrize("step", [1, 2])
    def test_that_grow_with_their_sources(self, folder, step):
        there, here = write_pair(folder, "csr", {})
        unlimited = h5py.h5s.UNLIMITED
        with h5py.File(there) as file, h5py.File(here, "r+") as growing:
            for name in ("X/data", "X/indices"):
                n, dtype = file[name].shape[0], file[name].dtype
                layout = h5py.VirtualLayout((n,), dtype, maxshape=(None,))
                values = h5py.VirtualSource(there, name, (n,), dtype, maxshape=(None,))
                for first in range(step):
                    rows = slice(first, unlimited, step)
                    layout[rows] = values[rows]
                del growing[name]
                growing.create_virtual_dataset(name, layout)
        assert np.array_equal(dense(open_collection(here)[:].X), in_memory(there, "X"))

    def test_of_virtual_datasets(self, folder):
        there, here = write_pair(folder, "dense", {})
        between = folder / "between.h5ad"
        between.write_bytes(here.read_bytes())
        link_virtually(between, "X", "there/big.h5ad")
        link_virtually(here, "X", "between.h5ad")
        assert np.array_equal(dense(open_collection(here)[:].X), in_memory(there, "X"))
        there.unlink()
        with pytest.raises(FormatError, match=r"^.*small.h5ad: `X` is virtual.*'there/big.h5ad'"):
            open_collection(here)

    @pytest.mark.parametrize("n_lost", [1, 9])
    @pytest.mark.parametrize("name", ["X/data", "X/indices"])
    @pytest.mark.parametrize("can_grow", [False, True])
    def test_of_sparse_rows_lack_no_values(self, folder, name, n_lost, can_grow):
        """HDF5 reads what is mapped to nothing as zeros."""
        _, here = write_pair(folder, "csr", {})
        with h5py.File(here, "r+") as file:
            n, dtype = file[name].shape[0], file[name].dtype
            most = None if can_grow else n
            layout = h5py.VirtualLayout((n,), dtype, maxshape=(most,))
            source = h5py.VirtualSource("there/big.h5ad", name, (n,), maxshape=(most,))
            rows = slice(n_lost, h5py.h5s.UNLIMITED if can_grow else n)
            layout[rows] = source[rows]
            del file[name]
            file.create_virtual_dataset(name, layout)
        with pytest.raises(FormatError, match=rf"`X`: {n_lost} of its .* are missing"):
            open_collection(here)[:]

    def test_of_many_sources_with_a_cell_without_elements(self, folder):
        """HDF5 refuses to read no element of a virtual dataset of 50 sources or more."""
        X = sp.csr_matrix(COUNTS * (np.arange(N) % 4 > 0)[:, None])
        here, n = folder / "small.h5ad", X.nnz
        cells(X).write_h5ad(here)
        (folder / "there").mkdir()
        shutil.copy(here, folder / "there" / "big.h5ad")
        with h5py.File(here, "r+") as file:
            for name in ("X/data", "X/indices"):
                layout = h5py.VirtualLayout((n,), file[name].dtype)
                for k in range(n):
                    layout[k] = h5py.VirtualSource("there/big.h5ad", name, (n,))[k]
                del file[name]
                file.create_virtual_dataset(name, layout)
        assert n >= 50
        collection = open_collection(here)
        for row in range(N):
            assert np.array_equal(dense(collection[[row]].X), X[row].toarray())


class TestRawFiles:
    @pytest.mark.parametrize("name", ["X", "obsm/pca", "obs/number"])
    def test_are_read_as_by_anndata_and_watched(self, folder, name):
        _, here = write_pair(folder, "dense", {})
        raw = folder / "raw.bin"
        write_raw(here, name, raw)
        element = name if not name.startswith("obs/") else "X"
        collection = open_collection(here, elements=[element], obs=["number"])
        assert np.array_equal(dense(collection[:][element]), in_memory(here, element))
        assert raw in collection.files
        os.utime(raw, ns=(0, 0))
        with pytest.raises(FormatError, match=rf"^{raw}: was replaced"):
            collection[:]
        os.truncate(raw, 100)  # HDF5 reads zeros
        said = rf"^{here}: `{name}` has its bytes in '{re.escape(str(raw))}', which is too short"
        with pytest.raises(FormatError, match=said):
            open_collection(here, elements=[element], obs=["number"])
        raw.unlink()
        with pytest.raises(FormatError, match=rf"`{name}` has its bytes in .*, which is not there"):
            open_collection(here, elements=[element], obs=["number"])

    def test_beside_the_current_folder(self, folder, monkeypatch):
        """HDF5 looks for relative names in the current folder."""
        _, here = write_pair(folder, "dense", {})
        monkeypatch.chdir(folder)
        write_raw(here, "X", Path("raw.bin"))
        collection = open_collection(here)
        assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))
        monkeypatch.chdir(folder / "there")
        with pytest.raises(PathError, match=r"^raw\.bin: was removed"):
            collection[:]


@pytest.mark.filterwarnings("ignore:.*zarr v2 data will no longer:UserWarning")
@pytest.mark.filterwarnings("ignore:zarr v3 autosharding will be the default")
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
class TestLinksInZarr:
    """Links of the file system, such as git-annex and datalad make."""

    def write(self, folder: Path, version: int, how: str) -> Path:
        path = folder / "cells.zarr"
        with ad.settings.override(zarr_write_format=version):
            cells(COUNTS).write_zarr(path)
        options: dict[str, Any] = {"chunks": (10, 4)}
        if how == "shards":
            options["shards"] = (20, 12)
        if how == "slow":
            options |= {"dtype": ">f4"}
        values = COUNTS.astype(options.pop("dtype", "f4"))
        root = zarr.open_group(path, mode="r+", use_consolidated=False)
        attributes = dict(root["X"].attrs)
        del root["X"]
        root.create_array("X", data=values, **options).attrs.update(attributes)
        zarr.consolidate_metadata(root.store)
        return path

    @pytest.mark.parametrize(
        ("version", "how"), [(2, "files"), (3, "files"), (3, "shards"), (2, "slow")]
    )
    def test_are_followed_and_no_zeros_where_they_lead_to_nothing(self, folder, version, how):
        path, annex = self.write(folder, version, how), folder / "annex"
        annex.mkdir()
        files = [each for each in (path / "X").rglob("*") if each.is_file()]
        chunks = [each for each in files if each.name not in ("zarr.json", ".zarray", ".zattrs")]
        for k, chunk in enumerate(chunks):
            chunk.rename(annex / str(k))
            chunk.symlink_to(annex / str(k))
        assert np.array_equal(open_collection(path)[:].X, COUNTS)
        (annex / "1").unlink()
        with pytest.raises((PathError, FormatError), match=re.escape(str(chunks[1]))):
            open_collection(path)[:]

    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize(
        "name",
        ["obs/type/codes", "obs/number", "var/_index", "obsm/frame/a", "obsm/frame/_index"],
    )
    def test_of_tables_are_no_zeros_where_they_lead_to_nothing(self, folder, version, name):
        path, there = self.write(folder, version, "files"), folder / "there"
        name = f"{name}/values" if (path / name / "values").is_dir() else name
        chunk = path / name / ("c/0" if version == 3 else "0")
        chunk.rename(there)
        chunk.symlink_to(there)

        def read() -> Any:
            obs = ["type", "number"]
            collection = open_collection(path, elements=["X", "obsm/frame"], obs=obs)
            return collection, collection[:]["obsm/frame"], collection.var_names

        collection, frame, _ = read()
        assert np.array_equal(frame, cells(COUNTS).obsm["frame"])
        assert np.array_equal(collection.obs["type"].codes, TYPES.codes)
        assert list(collection.obs["number"].values) == list(range(N))
        there.unlink()
        with pytest.raises(PathError, match=rf"{chunk}: is a link to {there}, which is missing"):
            read()

    @pytest.mark.parametrize("name", ["obs", "var"])
    def test_of_whole_tables_are_named(self, folder, name):
        path = self.write(folder, 3, "files")
        shutil.rmtree(path / name)
        (path / name).symlink_to(folder / "gone")
        with pytest.raises(PathError, match=rf"^{path / name}: is a link to {folder / 'gone'}, wh"):
            open_collection(path)

    @pytest.mark.parametrize("part", ["X", "X/c"])
    def test_of_folders(self, folder, part):
        path = self.write(folder, 3, "files")
        there = (path / part).rename(folder / "there")
        (path / part).symlink_to(there)
        assert np.array_equal(open_collection(path)[:].X, COUNTS)
        there.rename(folder / "moved")
        with pytest.raises(PathError, match=rf"{part}: is a link to {there}, which is missing"):
            open_collection(path)


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


def test_a_mounted_file_is_refused(folder):
    """Other processes do not have it."""
    there, here = write_pair(folder, "dense", {})
    with h5py.File(here, "r+") as file:
        del file["layers"]
        file.create_group("layers")
    with h5py.File(here) as file, h5py.File(there) as other:
        h5py.h5f.mount(file.id, b"/layers", other.id)
        with pytest.raises(FormatError, match=r"`layers/X` lies in .*big.h5ad, which .* mounted"):
            open_collection(here, elements=["layers/X"])
