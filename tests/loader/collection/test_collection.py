"""What a collection opens, reads and says of its files, and the warning where that is slow."""

import multiprocessing
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.collection.stored import Storage
from tests.loader.matrices import dense

from cellfeed import CellDataset, ParameterError, PathError, Streaming, open_collection


@pytest.fixture(scope="session")
def store(write_h5ad, replace):
    """Write a matrix in a file, stored as asked."""

    def store_(storage: Storage) -> Path:
        path = write_h5ad(storage.matrix(), edit=lambda file: storage.lay_out(file, "X", replace))
        return Path(path)

    return store_


def assert_reads(collection, expected: np.ndarray, rows: Any) -> None:
    cells = collection[rows]
    assert cells.X.dtype == collection.dtype
    assert cells.X.dtype.isnative
    assert sp.issparse(cells.X) == (collection.layout == "csr")
    assert np.array_equal(dense(cells.X), np.atleast_2d(expected[rows]))
    assert cells.rows.tolist() == np.arange(len(expected))[rows].ravel().tolist()
    assert len(cells) == len(cells.rows)


class TestFiles:
    def test_half_precision_csr_is_widened_as_scipy_has_no_such_matrix(self, write_h5ad, replace):
        X = np.eye(3, dtype=np.float32)

        def edit(file):
            replace(file, "X/data", file["X/data"][:], dtype=np.float16)

        collection = open_collection(write_h5ad(sp.csr_matrix(X), edit=edit))
        assert collection.dtype == np.float32
        assert_reads(collection, X, slice(None))

    @pytest.mark.parametrize("n_rows", [[0, 5, 0], [5, 0], [0]])
    @pytest.mark.parametrize("layout", ["csr", "dense"])
    def test_without_cells(self, store, in_memory, n_rows, layout):
        files = [store(Storage(n, layout=layout)) for n in n_rows]
        files.append(store(Storage(3, layout="dense")))
        collection = open_collection(files)
        assert collection.layout == layout
        assert_reads(collection, in_memory(files), slice(None))

    def test_describe_themselves(self, store):
        files = [store(Storage(11)), store(Storage(13))]
        collection = open_collection(files)
        expected = "Collection(24 cells x 9 genes, 2 files, X (csr float32), obs=[])"
        assert repr(collection) == expected
        assert [Path(each) for each in collection.locations] == list(files)

    def test_rows_per_chunk_is_the_mean_over_rows(self, store):
        csr = Storage(10, density=1, chunk=18)  # 9 elements a row
        dense_ = Storage(30, layout="dense", chunk=6)
        assert open_collection(store(csr)).rows_per_chunk == 2
        assert open_collection(store(dense_)).rows_per_chunk == 6
        assert open_collection([store(csr), store(dense_)]).rows_per_chunk == 5

    def test_stored_row_bytes_are_those_of_the_arrays(self, store):
        full = Storage(10, density=1, chunk=None, compression=None)  # 9 elements a row
        with h5py.File(store(full)) as file:
            arrays = [file["X"][name] for name in ("data", "indices", "indptr")]
            expected = sum(array.size * array.dtype.itemsize for array in arrays)
        assert open_collection(store(full)).stored_row_bytes() == expected / 10
        dense_ = Storage(30, layout="dense", chunk=None, compression=None)
        both = open_collection([store(full), store(dense_)])
        assert both.stored_row_bytes() == (expected + 30 * 9 * 4) / 40


ROWS = {
    "one": 3,
    "one from the end": -1,
    "a NumPy integer": np.int64(4),
    "none": [],
    "unsorted with duplicates": [5, 0, 5, 7, 0],
    "negative": [-1, 0, -23, 4],
    "unsigned": np.array([3, 1], dtype=np.uint8),
    "a slice": slice(3, 17),
    "a slice backwards": slice(None, None, -3),
    "an empty slice": slice(9, 3),
    "a mask": np.arange(24) % 5 == 0,
}
BAD_ROWS = {
    "beyond": [0, 24],
    "beyond from the start": [-25],
    "a fraction": [0.5],
    "not a number": [float("nan")],
    "a short mask": [True, False],
    "text": "first",
    "nothing": None,
    "a table": np.zeros((2, 2), dtype=int),
}


class TestRows:
    @pytest.fixture
    def files(self, store):
        return [store(Storage(11)), store(Storage(13, seed=1))]

    @pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
    def test_are_numbered_as_numpy_does(self, files, in_memory, rows):
        assert_reads(open_collection(files), in_memory(files), rows)

    @pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS)
    def test_that_do_not_exist(self, files, rows):
        with pytest.raises(IndexError, match=r"rows? .*24"):
            open_collection(files)[rows]

    def test_obs_come_with_them(self, plates):
        collection = open_collection(plates, obs=["plate", "number"])
        rows = np.random.default_rng(0).permutation(len(collection))
        cells = collection[rows]
        assert cells.obs["number"].tolist() == rows.tolist()
        codes = [0 if row < 37 else 1 for row in rows]
        assert cells.obs["plate"].tolist() == codes

    def test_have_the_names_that_their_file_gives_them(self, plates):
        collection = open_collection(plates)
        names = np.concatenate([anndata.read_h5ad(path).obs_names for path in plates])
        rows = np.random.default_rng(0).permutation(len(collection))[:50]
        assert collection.obs_names(rows).tolist() == names[rows].tolist()
        assert collection.obs_names(slice(None)).tolist() == names.tolist()
        assert collection.obs_names([]).size == 0

    def test_results_are_independent_of_each_other(self, files):
        collection = open_collection(files)
        first = collection[:5]
        kept = dense(first.X).copy()
        collection[8:20]
        assert np.array_equal(dense(first.X), kept)


NOT_OPENED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("missing.h5ad", {}, PathError, r"missing\.h5ad: no such file or folder; check the pa"),
    ("missing/*.h5ad", {}, PathError, r"missing/\*\.h5ad: matches no file; check the path$"),
    (
        "empty",
        {},
        PathError,
        r"empty: the folder has nothing that can be opened \(\.h5ad, .*\); give the",
    ),
    ([], {}, PathError, r"no path was given; give \.h5ad files"),
    ({"a.h5ad", "b.h5ad"}, {}, ParameterError, "`set` cannot be opened; .* in a list"),
    (frozenset(), {}, ParameterError, "`frozenset` cannot be opened; .* in a l"),
    ("x" * 4096, {}, PathError, "^x+: no such file or folder; check the path$"),
    ("/" + "x/" * 3000, {}, PathError, ": no such file or folder; check the path$"),
    ("~nobody-here/x.h5ad", {}, PathError, r"^~nobody-here/x\.h5ad: no such file or"),
    ("https://", {}, PathError, "^https://: names no server; add it$"),
    ("s3://", {}, PathError, "^s3://: names no bucket; add it$"),
    (["a.h5ad", "link.h5ad"], {}, PathError, r"link\.h5ad: given twice, .*; give it once"),
    (".", {"obs": "plate"}, ParameterError, r"`obs` must be a list .* write \['plate'\]"),
    *[
        (".", {name: {"X"}}, ParameterError, f"^`{name}` must be a list of .*; give a sort")
        for name in ("obs", "elements", "genes")
    ],
    *[
        (".", {name: 5}, ParameterError, f"^`{name}` must be a (list of|dict).*, but got")
        for name in ("obs", "elements", "storage_options")
    ],
]


# Names in a folder, and which of them a folder and a pattern take: all that are shown as cells.
NAMES = ["a.h5ad", "B.H5AD", "run [2]/c.h5ad", "sub/d.h5ad"]
HIDDEN = ["._a.h5ad", ".git/e.h5ad", "sub/._d.h5ad"]
TAKEN = [
    ("", ["B.H5AD", "a.h5ad"]),
    ("*", ["B.H5AD", "a.h5ad"]),
    ("[aB].*", ["B.H5AD", "a.h5ad"]),
    ("run [2]", ["run [2]/c.h5ad"]),
    ("run [2]/*.h5ad", ["run [2]/c.h5ad"]),
    ("run [2]/../sub/?.h5ad", ["run [2]/../sub/d.h5ad"]),
    ("**/*.h5ad", ["a.h5ad", "run [2]/c.h5ad", "sub/d.h5ad"]),
]


def test_which_files_folders_and_patterns_take(write_h5ad, tmp_path):
    folder = tmp_path / "[x]*"
    for name in NAMES + HIDDEN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(write_h5ad(sp.csr_matrix(np.eye(3, dtype="f4"))), folder / name)
    for name in HIDDEN:
        (folder / name).write_bytes(b"\0\5\x16\7")
    for given, taken in TAKEN:
        if given == "*":
            shutil.move(folder / "run [2]", tmp_path)
            shutil.move(folder / "sub", tmp_path)
        collection = open_collection(folder / given)
        assert [each.text for each in collection.locations] == [str(folder / e) for e in taken]
        if given == "*":
            shutil.move(tmp_path / "run [2]", folder)
            shutil.move(tmp_path / "sub", folder)


def test_what_is_no_file_is_refused(tmp_path):
    for kind, said in (
        ("pipe", "is a pipe, a socket or a device, not a file; give a file"),
        ("device", "is a pipe, a socket or a device, not a file; give a file"),
        ("loop", "is a link that leads back to itself; remove it"),
        ("gone", "is a link to nowhere, which is missing; put it there"),
    ):
        path = tmp_path / kind / "a.h5ad"
        path.parent.mkdir()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to({"device": "/dev/zero", "loop": path, "gone": "nowhere"}[kind])
        for given in (path, path.parent, path.parent / "*"):
            with pytest.raises(PathError, match=f"^{path}: {said}$"):
                open_collection(given)


class TestPaths:
    @pytest.fixture
    def folder(self, tmp_path, write_h5ad):
        for name in ("b", "a", "c [old]"):
            path = write_h5ad(np.ones((2, 3), np.float32))
            path.rename(tmp_path / f"{name}.h5ad")
        (tmp_path / "notes.txt").write_text("not a file of cells")
        (tmp_path / "empty").mkdir()
        return tmp_path

    @pytest.mark.parametrize(
        ("paths", "names"),
        [
            (".", ["a", "b", "c [old]"]),
            ("*.h5ad", ["a", "b", "c [old]"]),
            ("c [old].h5ad", ["c [old]"]),
            (["b.h5ad", "a.h5ad"], ["b", "a"]),
            (["c*.h5ad", "[ab].h5ad"], ["c [old]", "a", "b"]),
        ],
    )
    @pytest.mark.parametrize("kind", [str, Path])
    def test_files_folders_and_patterns(self, folder, monkeypatch, paths, names, kind):
        monkeypatch.chdir(folder)
        given_paths = kind(paths) if isinstance(paths, str) else map(kind, paths)
        assert [Path(each).stem for each in open_collection(given_paths).locations] == names

    def test_of_the_home_folder(self, folder, monkeypatch):
        monkeypatch.setenv("HOME", str(folder))
        assert open_collection("~/a.h5ad").files == (folder / "a.h5ad",)

    @pytest.mark.parametrize(("paths", "options", "error", "message"), NOT_OPENED)
    def test_what_cannot_be_opened(self, folder, monkeypatch, paths, options, error, message):
        monkeypatch.chdir(folder)
        if "link.h5ad" in paths:
            Path("link.h5ad").symlink_to("a.h5ad")
        with pytest.raises(error, match=message):
            open_collection(paths, **options)


def test_a_pickle_has_no_open_file_and_reads_again(plates, in_memory, tmp_path):
    # Of files that have no record yet, from which they would be opened.
    paths = [Path(shutil.copy(path, tmp_path)) for path in plates]
    collection = open_collection(paths, obs=["plate"])
    before = pickle.dumps(collection)
    collection[:]
    after = pickle.dumps(collection)
    assert len(after) == len(before)
    copy = pickle.loads(after)
    assert_reads(copy, in_memory(plates), [3, 60, 3])
    assert np.array_equal(copy.obs["plate"].values, collection.obs["plate"].values)


def sum_of_rows(collection, connection) -> None:
    connection.send((os.getpid(), dense(collection[1::3].X).sum()))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_while_its_parent_does(plates, in_memory):
    collection, expected = open_collection(plates), in_memory(plates)
    collection[:]  # the parent's handles are open
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=sum_of_rows, args=(collection, sending))
    process.start()
    assert_reads(collection, expected, [50, 1])
    pid, total = receiving.recv()
    process.join()
    assert pid == process.pid != os.getpid()
    assert total == expected[1::3].sum()
    assert_reads(collection, expected, slice(None))


COUNTS = np.random.default_rng(0).poisson(1.0, (40, 7)).astype(np.float32)
REASON = "through h5py: filter fletcher32 is not supported"
REMEDY = "write it again with anndata and compression='gzip'"


def slowly(*names, replace):
    """Store arrays with a checksum, which is not decoded here."""

    def edit(file):
        for name in names:
            values = file[name][:]
            replace(file, name, values, chunks=(7, *values.shape[1:]), fletcher32=True)

    return edit


@pytest.fixture
def make(write_h5ad, replace):
    """Write a file of a sparse matrix and a dense layer, in which some arrays are slow."""

    def write(*names) -> Path:
        layers = {"scaled": COUNTS.astype(np.float64)}
        edit = slowly(*names, replace=replace)
        X = sp.csr_matrix(COUNTS)
        path: Path = write_h5ad(X, layers=layers, compression="gzip", edit=edit)
        return path

    return write


def opened(paths):
    return open_collection(paths, elements=["X", "layers/scaled"])


def as_stored(path, element):
    """The oracle: a row of the table, by anndata and h5py."""
    with h5py.File(path) as file:
        stored = anndata.io.sparse_dataset(file[element]) if element == "X" else file[element]
        values = file["X/data"] if element == "X" else file[element]
        per_chunk = values.chunks[0]
        if element == "X":
            per_chunk = min(len(COUNTS), per_chunk * len(COUNTS) / values.size)
        return {
            "location": str(path),
            "element": element,
            "n_cells": stored.shape[0],
            "layout": getattr(stored, "format", "dense"),
            "dtype": str(values.dtype),
            "codec": f"{values.compression} {values.compression_opts}"
            if values.compression
            else "none",
            "chunk_shape": values.chunks,
            "rows_per_chunk": float(per_chunk),
            "is_fast": not values.fletcher32,
            "reason": REASON if values.fletcher32 else None,
        }


def test_the_table_has_a_row_for_each_element_of_each_file(make, write_h5ad):
    paths = [make(), make("X/data", "layers/scaled"), make("layers/scaled")]
    expected = [as_stored(path, element) for path in paths for element in ("X", "layers/scaled")]
    collection = opened(paths)
    for each in (collection, pickle.loads(pickle.dumps(collection))):
        pd.testing.assert_frame_equal(each.describe(), pd.DataFrame(expected))
    in_one_piece = open_collection(write_h5ad(COUNTS)).describe()
    assert in_one_piece["chunk_shape"].tolist() == [None]
    assert in_one_piece["is_fast"].all()


class TestWarning:
    @pytest.mark.parametrize(
        ("n_slow", "others"),
        [
            (1, ""),
            (2, " (1 more are: see `collection.describe()`)"),
            (4, " (3 more are: see `collection.describe()`)"),
        ],
    )
    def test_there_is_one_however_many_files_are_slow(self, make, n_slow, others):
        paths = [make(), *(make("X/data") for _ in range(n_slow))]
        with pytest.warns(UserWarning) as warned:  # noqa: PT030 - the whole message follows
            CellDataset(opened(paths), Streaming(), 8)
        line = f"{paths[1]}: `X` is read slowly, {REASON}; {REMEDY}{others}"
        assert [str(each.message) for each in warned] == [line]
        assert warned[0].filename == __file__
        assert opened(paths).slow_reading() == line

    def test_it_is_given_once_for_a_collection_and_its_copies(self, make):
        collection = opened(make("X/data"))
        with pytest.warns(UserWarning, match="read slowly"):
            CellDataset(collection, Streaming(), 8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CellDataset(collection, Streaming(), 4)
            dataset = CellDataset(pickle.loads(pickle.dumps(collection)), Streaming(), 8)
            assert sum(map(len, dataset.loader())) == 40

    def test_none_where_all_is_fast(self, make):
        CellDataset(opened(make()), Streaming(), 8)

    def test_a_dtype_may_be_what_makes_it_slow(self, make):
        collection = opened(path := make())
        with pytest.warns(UserWarning) as warned:  # noqa: PT030
            CellDataset(collection, Streaming(), 8, dtype={"layers/scaled": "float16"})
        (line,) = {str(each.message) for each in warned}
        assert line == (
            f"{path}: `layers/scaled` is read slowly, through h5py: cellfeed does not convert "
            "float64 to float16; read it as float64, or write it as float16"
        )
