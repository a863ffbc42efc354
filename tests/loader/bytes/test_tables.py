"""Tables that are kept from one opening to the next. The oracle: rows as anndata reads them."""

import errno
import io
import multiprocessing
import os
import pwd
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader import matrices
from tests.loader.bytes.files import age, note_calls, settle
from tests.loader.sources.test_conformance import TestH5ad as H5ad
from tests.loader.sources.test_conformance_zarr import TestZarr as Zarr
from tests.loader.sources.zarr_cells import quiet, write_cells

from cellfeed import FormatError, PathError, open_collection
from cellfeed.bytes import _tables, lasting_identity
from cellfeed.decode import _hdf5, _zarr
from cellfeed.machine import cache_folder
from cellfeed.sources.anndata._matrix import StoredCsr

pytestmark = quiet
COUNTS = np.random.default_rng(0).poisson(0.7, size=(60, 30)).astype(np.float32)
OTHER_COUNTS = COUNTS[::-1]


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    """An empty folder, in which tables of however few entries are kept, each by itself."""
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_tables, "_FEWEST_ENTRIES", 2)
    monkeypatch.setattr(_tables, "_LARGEST_RECORDED", -1)
    settle(monkeypatch)
    return tmp_path / "cache" / "tables"


def write_csr(path, counts=COUNTS):
    ad.AnnData(sp.csr_matrix(counts)).write_h5ad(path, compression="gzip")
    with h5py.File(path, "r+") as file:
        for name in ("X/data", "X/indices"):
            matrices.replace(file, name, file[name][:], chunks=(16,), compression="gzip")
    return path


def write_dense(path):
    ad.AnnData(COUNTS).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        matrices.replace(file, "X", COUNTS, chunks=(7, 9), compression="gzip")
    return path


def write_zarr(path, shards):
    arrays = {"chunks": (16,), "shards": shards}
    return write_cells(path, sp.csr_matrix(COUNTS), indices=arrays, data=arrays)


STORAGES = {
    "csr": write_csr,
    "dense": write_dense,
    "zarr": lambda path: write_zarr(path, None),
    "zarr, sharded": lambda path: write_zarr(path, (160,)),
}


@pytest.fixture(params=STORAGES)
def stored(request, tmp_path):
    return STORAGES[request.param](tmp_path / ("a.zarr" if "zarr" in request.param else "a.h5ad"))


@pytest.fixture
def path(tmp_path):
    return write_csr(tmp_path / "a.h5ad")


@pytest.fixture
def made(monkeypatch):
    """Names of what was read to make tables, once for each time."""
    called, names = list[str](), ("list_chunks", "_read_index", "_read_pointer")
    for owner, name in zip((_hdf5, _zarr, StoredCsr), names, strict=True):
        note_calls(monkeypatch, owner, name, partial(called.append, name))
    return called


def read(path):
    """Open anew, and read all rows, the last one first."""
    collection = open_collection(path)
    collection.load_tables()
    X = collection[np.arange(len(collection))[::-1]].X
    return np.asarray(X if isinstance(X, np.ndarray) else X.toarray())[::-1]


def test_the_second_opening_makes_no_tables(stored, made, tables):
    assert (read(stored) == COUNTS).all()
    assert made
    made.clear()
    assert (read(stored) == COUNTS).all()
    assert not made
    assert {each.suffix for each in tables.iterdir()} == {".tables"}


def test_tables_are_read_only(path):
    for _ in range(2):
        collection = open_collection(path)
        collection.load_tables()
        element = collection._sources[0].elements["X"]
        assert isinstance(element, StoredCsr)
        pointer = element._row_pointer
        assert pointer is not None
        with pytest.raises(ValueError, match="read-only"):
            pointer[0] = 1


def test_small_tables_are_kept_in_one_file(path, monkeypatch, tables, made):
    monkeypatch.undo()
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tables.parent))
    settle(monkeypatch)
    for _ in range(2):
        assert (read(path) == COUNTS).all()
        assert len([*tables.iterdir()]) == 1


def write_in_place(path):
    other = write_csr(path.with_name("other.h5ad"), OTHER_COUNTS)
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(other.read_bytes())


def replace(path):
    write_csr(path.with_name("other.h5ad"), OTHER_COUNTS).replace(path)


@pytest.mark.parametrize("change", [write_in_place, replace])
@pytest.mark.parametrize("time_is", ["as it was", "another one", "now"])
def test_a_file_that_changed_is_noticed(path, change, time_is, made):
    read(path)
    before = path.stat()
    change(path)
    size = max(before.st_size, path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)  # HDF5 leaves alone what comes after its end
    if time_is == "as it was":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif time_is == "another one":
        age(path, 500)
    for n_made in (1, 0):
        made.clear()
        assert (read(path) == OTHER_COUNTS).all()
        assert bool(made) == n_made


def test_a_shard_that_changed_is_noticed(tmp_path, made):
    path = write_zarr(tmp_path / "a.zarr", (160,))
    read(path)
    shard = path / "X" / "data" / "c" / "1"
    before = shard.stat()
    shard.write_bytes(shard.read_bytes())
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    made.clear()
    assert (read(path) == COUNTS).all()
    assert set(made) == {"_read_index"}


def test_a_copy_has_tables_of_its_own(path, made):
    read(path)
    made.clear()
    copy = path.with_name("copy.h5ad")
    shutil.copy2(path, copy)
    assert (read(copy) == COUNTS).all()
    assert made


def test_a_link_to_another_file_is_noticed(path, made):
    """Nothing else tells files apart that were unpacked within one tick of the clock."""
    other = write_csr(path.with_name("other.h5ad"), OTHER_COUNTS)
    size = max(path.stat().st_size, other.stat().st_size)
    for _ in range(200):
        for file in (path, other):
            os.truncate(file, size)  # HDF5 leaves alone what comes after its end
            os.utime(file, ns=(0, 0))
        if path.stat().st_ctime_ns == other.stat().st_ctime_ns:
            break
    link = path.with_name("link.h5ad")
    for is_first in (True, False):
        for file, counts in ((path, COUNTS), (other, OTHER_COUNTS)):
            made.clear()
            link.unlink(missing_ok=True)
            link.symlink_to(file)
            assert (read(link) == counts).all()
            assert bool(made) == is_first


STATE = {"st_dev": 1, "st_ino": 2, "st_size": 3, "st_mtime_ns": 4, "st_ctime_ns": 5}


def identity_with(**changed):
    state: Any = SimpleNamespace(**STATE | changed)
    return lasting_identity([("a", state)])


@pytest.mark.parametrize("name", STATE)
def test_what_tells_files_apart(name):
    assert identity_with(**{name: 8}).digest != identity_with().digest


@pytest.mark.parametrize(
    ("name", "ns_ago", "is_settled"),
    [
        ("st_ctime_ns", 10**12, True),
        ("st_ctime_ns", 0, False),  # though it was modified long ago, as by `tar` and `cp -p`
        ("st_mtime_ns", 0, False),
        ("st_ctime_ns", -(10**12), False),  # a clock that went back
    ],
)
def test_what_has_just_changed_is_not_settled(monkeypatch, name, ns_ago, is_settled):
    monkeypatch.undo()
    assert identity_with(**{name: time.time_ns() - ns_ago}).is_settled == is_settled


@pytest.mark.parametrize("change", [os.utime, shutil.copystat])
def test_what_has_just_changed_is_not_kept(path, tables, monkeypatch, change):
    monkeypatch.undo()
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tables.parent))
    change(path, (0, 0)) if change is os.utime else change("/", path)
    assert (read(path) == COUNTS).all()
    assert not tables.exists()


def test_what_changes_while_tables_are_made_is_not_kept(path, tables, monkeypatch):
    list_chunks = _hdf5.list_chunks

    def change_meanwhile(*arguments):
        listed = list_chunks(*arguments)
        with path.open("ab") as file:
            file.write(b"more")
        return listed

    monkeypatch.setattr(_hdf5, "list_chunks", change_meanwhile)
    with pytest.raises(FormatError, match="was replaced or written to"):
        read(path)
    assert not tables.exists()


KINDS_OF_DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
    st.tuples(st.just("flip"), st.floats(0, 0.02), st.integers(1, 255)),  # where it begins
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("zero"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("append"), st.just(1.0), st.binary(min_size=1, max_size=70)),
)


def damaged(content, damage):
    kind, share, how = damage
    where = int(share * len(content))
    if kind == "flip":
        return content[:where] + bytes([content[where] ^ how]) + content[where + 1 :]
    if kind == "append":
        return content + how
    return content[:where] + (bytes(len(content) - where) if kind == "zero" else b"")


@pytest.mark.parametrize("storage", ["csr", pytest.param("zarr, sharded", marks=pytest.mark.slow)])
def test_damaged_tables_are_made_anew(tmp_path, tables, made, storage):
    path = STORAGES[storage](tmp_path / ("a.zarr" if "zarr" in storage else "a.h5ad"))
    read(path)
    whole = {file: file.read_bytes() for file in sorted(tables.iterdir())}
    assert len(whole) == 3

    @settings(derandomize=True, database=None)
    @given(which=st.integers(0, 2), damage=KINDS_OF_DAMAGE)
    def check(which, damage):
        file = list(whole)[which]
        content = damaged(whole[file], damage)
        file.write_bytes(content)
        made.clear()
        assert (read(path) == COUNTS).all()
        assert bool(made) == (content != whole[file])
        assert {each: each.read_bytes() for each in sorted(tables.iterdir())} == whole

    check()


def test_tables_of_something_else_are_not_used(path, tables, made):
    read(path)
    first, second, *_ = sorted(tables.iterdir())
    shutil.copy(first, second)
    made.clear()
    assert (read(path) == COUNTS).all()
    assert made


@pytest.mark.parametrize(("name", "other"), [("_FORMAT", 1000), ("__version__", "1000.0")])
def test_tables_of_another_version_are_not_used(path, made, monkeypatch, name, other):
    read(path)
    made.clear()
    monkeypatch.setattr(_tables, name, other)
    assert (read(path) == COUNTS).all()
    assert made


@pytest.mark.parametrize("folder", ["/proc/nowhere", "a file"])
def test_without_a_folder(path, monkeypatch, tmp_path, folder):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / folder))
    for _ in range(2):
        assert (read(path) == COUNTS).all()


def test_without_a_home(path, monkeypatch, tmp_path):
    def unknown(user):
        raise KeyError(user)

    for name in ("CELLFEED_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert (read(path) == COUNTS).all()
    with pytest.raises(PathError, match=r"name one in CELLFEED_CACHE_DIR$"):
        cache_folder("tables")
    assert not Path("~").exists()


def test_a_full_disk(path, monkeypatch, tables):
    class FullDisk(io.FileIO):
        def writelines(self, lines):
            self.write(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fdopen", FullDisk)
    for _ in range(2):
        assert (read(path) == COUNTS).all()
    assert not [*tables.iterdir()]


def test_tables_that_are_removed_while_they_are_used(path, tables, made):
    read(path)
    collection = open_collection(path)
    collection.load_tables()
    shutil.rmtree(tables)
    assert (collection[np.arange(60)].X.toarray() == COUNTS).all()
    assert (read(path) == COUNTS).all()
    made.clear()
    assert (read(path) == COUNTS).all()
    assert not made


def read_at_once(path, barrier, connection):
    barrier.wait()
    connection.send(bool((read(path) == COUNTS).all()))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_write_at_once(path, tables, made):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    receiving, sending = context.Pipe(duplex=False)
    children = [
        context.Process(target=read_at_once, args=(path, barrier, sending)) for _ in range(3)
    ]
    for child in children:
        child.start()
    assert [receiving.recv() for _ in children] == [True] * 3
    for child in children:
        child.join()
    assert {each.suffix for each in tables.iterdir()} == {".tables"}
    assert (read(path) == COUNTS).all()
    assert not made


@pytest.mark.parametrize("reason", ["server", "descriptors"])
def test_tables_that_cannot_be_mapped_are_copied(path, monkeypatch, made, reason):
    read(path)
    if reason == "server":
        monkeypatch.setattr(_tables, "file_system", lambda folder: "nfs4")
    else:
        monkeypatch.setattr(_tables, "_SHARE_OF_OPEN_FILES", 1 << 62)
    made.clear()
    n_mapped = sum(each() is not None for each in _tables._mapped)
    collection = open_collection(path)
    assert (collection[np.arange(60)].X.toarray() == COUNTS).all()
    assert not made
    assert sum(each() is not None for each in _tables._mapped) <= n_mapped


class TestTheFolderIsBounded:
    @pytest.fixture
    def paths(self, tmp_path):
        return [write_csr(tmp_path / f"{name}.h5ad") for name in "abc"]

    def test_by_what_was_not_used_for_longest(self, paths, tables, made, monkeypatch):
        read(paths[0])
        first = {*tables.iterdir()}
        n_bytes = sum(file.stat().st_size for file in first)
        monkeypatch.setattr(_tables, "_MOST_BYTES", int(2.5 * n_bytes))
        _tables._room.clear()
        read(paths[1])
        left_over = tables / "killed.unfinished"
        left_over.write_bytes(b"a part")
        for file in tables.iterdir():
            age(file, 3 * 24 * 3600 if file in first else 2 * 24 * 3600)
        age(left_over, 10 * 24 * 3600)
        read(paths[0])  # is used again
        read(paths[2])
        assert not left_over.exists()
        assert sum(file.stat().st_size for file in tables.iterdir()) <= 2.5 * n_bytes
        for path, is_kept in ((paths[0], True), (paths[2], True), (paths[1], False)):
            made.clear()
            assert (read(path) == COUNTS).all()
            assert bool(made) != is_kept

    def test_and_what_is_in_use_stays(self, paths, tables, made, monkeypatch):
        read(paths[0])
        files = {*tables.iterdir()}
        n_bytes = sum(file.stat().st_size for file in files)
        monkeypatch.setattr(_tables, "_MOST_BYTES", n_bytes)
        _tables._room.clear()
        for path in paths:
            assert (read(path) == COUNTS).all()
        assert {*tables.iterdir()} == files
        made.clear()
        read(paths[0])
        assert not made


def test_the_folder_is_the_users_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", "/given")
    assert cache_folder("tables") == Path("/given/tables")
    monkeypatch.delenv("CELLFEED_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder("tables") == Path("/xdg/cellfeed/tables")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder("tables") == Path("/home/somebody/.cache/cellfeed/tables")


# The suite of sources once more


LARGEST_RECORDED = _tables._LARGEST_RECORDED


class OpenedBefore:
    """What is written was opened once, so that its tables are cached."""

    max_examples = 10

    @pytest.fixture(autouse=True)
    def cached(self, tables, monkeypatch):
        monkeypatch.setattr(_tables, "_FEWEST_ENTRIES", 1)
        monkeypatch.setattr(_tables, "_LARGEST_RECORDED", LARGEST_RECORDED)
        yield
        assert [*tables.glob("*.tables")]

    def opened(self, stored, case):
        for source in open_collection(stored, elements=[case.element]).sources:
            for element in source.elements.values():
                element.load_tables()
        return stored


@pytest.mark.slow
class TestH5adOpenedBefore(OpenedBefore, H5ad):
    pass


@pytest.mark.slow
class TestZarrOpenedBefore(OpenedBefore, Zarr):
    pass
