"""Values that lie in other files: links, virtual datasets and raw files, against anndata."""

import itertools
import os
import pickle
import shutil
from itertools import pairwise
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
ELEMENTS = ["X", "layers/counts", "raw/X", "obsm/pca", "obsm/frame"]
FILTERS: dict[str, dict[str, Any]] = {"uncompressed": {}, "gzip": {"compression": "gzip"}}


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


def replace_by_virtual(
    path: Path, name: str, source: h5py.VirtualSource, rows: Any = ..., **options: Any
) -> None:
    """Replace an array by a virtual dataset, which maps these rows to the same of a source."""
    with h5py.File(path, "r+") as file:
        attributes, stored = dict(file[name].attrs), file[name]
        layout = h5py.VirtualLayout(stored.shape, stored.dtype, **options)
        for each in rows if isinstance(rows, list) else [rows]:
            layout[each] = source if each is ... else source[each]
        del file[name]
        file.create_virtual_dataset(name, layout).attrs.update(attributes)


def link_virtually(path: Path, name: str, source: str, called: str = "") -> None:
    """Replace an array by a virtual dataset of one in another file, which it may call otherwise."""
    with h5py.File(path.parent / source) as there:
        shape = there[name].shape
    replace_by_virtual(path, name, h5py.VirtualSource(called or source, name, shape))


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


ELEMENTWISE = ["link", "through a file", "through a soft link"]
ARRAYWISE = [*ELEMENTWISE, "virtual", "virtual, through a file", "raw"]


def places(layout: str) -> dict[str, list[str]]:
    """Return what can lie elsewhere, and in which ways."""
    matrices = ["X", "layers/counts", "raw/X"]
    found = dict.fromkeys(["obsm/frame", "obs/type/categories", "var"], ELEMENTWISE)
    found |= dict.fromkeys(["obsm/pca", "obs/number", "obs/type/codes"], ARRAYWISE)
    if layout == "dense":
        return found | dict.fromkeys(matrices, ARRAYWISE)
    parts = [f"{name}/{part}" for name in matrices for part in ("data", "indices", "indptr")]
    return found | dict.fromkeys(matrices, ELEMENTWISE) | dict.fromkeys(parts, ARRAYWISE)


def place(here: Path, name: str, way: str) -> set[Path]:
    """Let an element or array lie elsewhere; return in which files."""
    there, between = here.parent / "there" / "big.h5ad", here.parent / "sub" / "between.h5"
    if way == "virtual":
        link_virtually(here, name, "there/big.h5ad")
    elif way == "raw":
        raw = here.parent / f"{name.replace('/', ' ')}.bin"
        write_raw(here, name, raw)
        return {raw}
    elif way == "link":
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
        if way == "virtual, through a file":
            link_virtually(here, name, "sub/between.h5")
        else:  # HDF5 names a file by the links that lead to it, and an open one as it was opened
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
    names = data.draw(st.lists(st.sampled_from([*places(layout)]), min_size=1, unique=True))
    ways, files = dict[str, str](), set[Path]()
    for name in names:
        if not any(f"{name}/".startswith(f"{other}/") for other in ways):
            ways[name] = data.draw(st.sampled_from(places(layout)[name]))
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
    described = collection.describe().set_index("element")["is_fast"]
    for name in ELEMENTS[:-1]:
        own = [way for each, way in ways.items() if f"{each}/".startswith(f"{name}/")]
        assert described[name] or {way.partition(",")[0] for way in own} & {"virtual", "raw"}
    changed, copy = data.draw(st.sampled_from(sorted(files))), pickle.dumps(collection)
    os.utime(changed, ns=(0, 0))
    for each in (collection, pickle.loads(copy)):
        with pytest.raises(FormatError, match=rf"{changed.name}: was replaced or written to"):
            each[:]
    changed.unlink()
    with pytest.raises(PathError, match=rf"{changed.name}: was removed"):
        collection[:]


def lose(here: Path) -> None:
    for path in [here.parent / "there" / "big.h5ad", *here.parent.glob("*.bin")]:
        if path.exists():
            path.rename(here.parent / f"moved {path.name}")


def cut_raw(here: Path) -> None:
    """HDF5 would read zeros."""
    for path in here.parent.glob("*.bin"):
        os.truncate(path, 100)


IS_LINK = "`{0}` is a link to `/{0}` of 'there/big.h5ad', which cannot be opened; put"
IS_VIRTUAL = "`{0}` is virtual, .* `{0}` in 'there/big.h5ad', which is not there"


@pytest.mark.parametrize(
    ("name", "way", "change", "said"),
    [
        ("X", "link", lose, IS_LINK),
        ("obs", "link", lose, IS_LINK),
        ("X", "virtual", lose, IS_VIRTUAL),
        ("obsm/pca", "virtual", lose, IS_VIRTUAL),
        ("obs/number", "virtual", lose, IS_VIRTUAL),
        ("obs/type/codes", "virtual", lose, IS_VIRTUAL),
        *(
            (name, "raw", change, said)
            for name in ("X", "obsm/pca", "obs/number")
            for change, said in (
                (lose, "`{0}` has its bytes in .*, which is not there"),
                (cut_raw, "`{0}` has its bytes in '.*bin', which is too short"),
            )
        ),
    ],
)
def test_what_is_lost_is_named(folder, name, way, change, said):
    _, here = write_pair(folder, "dense", {})
    place(here, name, way)
    change(here)
    with pytest.raises(FormatError, match=f"^{here}: {said.format(name)}"):
        open_collection(here, elements=["X", "obsm/pca"], obs=["number", "type"])


@pytest.mark.parametrize("target", ["/nowhere", "/layers/counts"])
def test_links_to_nothing_and_to_themselves_are_named(folder, target):
    _, here = write_pair(folder, "dense", {})
    link(here, "layers/counts", h5py.SoftLink(target))
    with pytest.raises(FormatError, match=rf"`layers/counts` is a link to `{target}`, wh"):
        open_collection(here, elements=["layers/counts"])


@pytest.mark.parametrize("way", ["link", "links", "soft link", "virtual", "unlimited", "raw"])
def test_pipes_are_refused(folder, way):
    """Opening one would wait for ever, unless somebody writes to it, as here."""
    name = "obs/number"
    there, here = write_pair(folder, "dense", {})
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    if way == "link":
        link(here, name, h5py.ExternalLink("pipe", "X"))
    elif way == "links":
        link(there, "X", h5py.ExternalLink(str(pipe), "X"))
        link(here, name, h5py.ExternalLink("there/big.h5ad", "X"))
    elif way == "soft link":
        link(here, name, h5py.SoftLink("/uns/pipe"))
        link(here, "uns", h5py.ExternalLink("pipe", "uns"))
    elif way == "virtual":
        replace_by_virtual(here, name, h5py.VirtualSource("pipe", "X", (N,)), np.s_[:N])
    elif way == "unlimited":
        source = h5py.VirtualSource("pipe", "X", (N,), maxshape=(None,))
        every = np.s_[: h5py.h5s.UNLIMITED]
        replace_by_virtual(here, name, source, every, maxshape=(None,))
    else:
        write_raw(here, name, folder / "raw.bin")
        (folder / "raw.bin").unlink()
        (folder / "raw.bin").symlink_to(pipe)
    message = f"^{here}: .*(which is a pipe, a socket or a device; put a file there$|too short)"
    with pytest.raises(FormatError, match=message):
        open_collection(here, obs=["number"])
    os.close(writer)


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

    @pytest.mark.parametrize("kind", ["virtual", "raw"])
    def test_tables_of_values_in_other_files_are_not_cached(self, folder, monkeypatch, kind):
        monkeypatch.setattr("cellfeed.bytes._tables._FEWEST_ENTRIES", 1)
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
        replace_by_virtual(here, "X", h5py.VirtualSource(".", "uns/values", (N, M)))
        if is_link:
            with h5py.File(here, "r+") as file:
                file["uns/values"] = h5py.ExternalLink("there/big.h5ad", "X")
        said = (
            "'there/big.h5ad', which is not looked for" if is_link else "`uns/values`, which is n"
        )
        with WebServer(folder) as server, pytest.raises(FormatError, match=said):
            open_collection(f"{server.url}/{here.name}")

    def test_servers_are_refused(self, folder):
        """There, HDF5 would take the file itself for the one that a link names."""
        _, here = write_pair(folder, "dense", {})
        link(here, "X", h5py.ExternalLink("there/big.h5ad", "/layers/counts"))
        link_virtually(here, "obsm/pca", "there/big.h5ad")
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
                said = rf"small.h5ad: `{name}` is in another file, 'there/big.h5ad', which is not"
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
            replace(file, "X", file["X"][:], maxshape=(None, M))
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

        values = h5py.VirtualSource(source, "X", (N + 1, M), X.dtype)[1:]
        replace_by_virtual(here, "X", values, maxshape=(None, M))
        write(np.concatenate([X[:1], X]))
        assert np.array_equal(dense(open_collection(here)[:].X), X)
        write(X[: N // 2])
        with pytest.raises(FormatError, match=rf"^{here}: `X` is virtual.*now has another shape"):
            open_collection(here)

    @pytest.mark.parametrize("step", [1, 2])
    def test_that_grow_with_their_sources(self, folder, step):
        there, here = write_pair(folder, "csr", {})
        n = np.count_nonzero(COUNTS)
        for name in ("X/data", "X/indices"):
            source = h5py.VirtualSource(there, name, (n,), maxshape=(None,))
            rows = [slice(first, h5py.h5s.UNLIMITED, step) for first in range(step)]
            replace_by_virtual(here, name, source, rows, maxshape=(None,))
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
        n = np.count_nonzero(COUNTS)
        most = None if can_grow else n
        source = h5py.VirtualSource("there/big.h5ad", name, (n,), maxshape=(most,))
        rows = slice(n_lost, h5py.h5s.UNLIMITED if can_grow else n)
        replace_by_virtual(here, name, source, rows, maxshape=(most,))
        with pytest.raises(FormatError, match=rf"`X`: {n_lost} of its .* are missing"):
            open_collection(here)[:]

    def test_of_many_sources_with_a_cell_without_elements(self, folder):
        """HDF5 refuses to read no element of a virtual dataset of 50 sources or more."""
        X = sp.csr_matrix(COUNTS * (np.arange(N) % 4 > 0)[:, None])
        here = folder / "small.h5ad"
        cells(X).write_h5ad(here)
        (folder / "there").mkdir()
        shutil.copy(here, folder / "there" / "big.h5ad")
        bounds = np.linspace(0, X.nnz, 61).astype(int).tolist()
        for name in ("X/data", "X/indices"):
            source = h5py.VirtualSource("there/big.h5ad", name, (X.nnz,))
            replace_by_virtual(here, name, source, [*itertools.starmap(slice, pairwise(bounds))])
        collection = open_collection(here)
        for row in range(9):
            assert np.array_equal(dense(collection[[row]].X), X[[row]].toarray())


def test_raw_files_beside_the_current_folder(folder, monkeypatch):
    """HDF5 looks for relative names in the current folder."""
    _, here = write_pair(folder, "dense", {})
    monkeypatch.chdir(folder)
    write_raw(here, "X", Path("raw.bin"))
    collection = open_collection(here)
    assert np.array_equal(dense(collection[:].X), in_memory(here, "X"))
    monkeypatch.chdir(folder / "there")
    with pytest.raises(PathError, match=r"^raw\.bin: was removed"):
        collection[:]


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
