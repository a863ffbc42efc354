import itertools
import multiprocessing
import os
import pickle
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anndata
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import dense

from cellfeed import MismatchError, ParameterError, PathError, open_collection

DTYPES = ["float32", "float64", "int32", "uint8", "uint16", "int64", "bool"]


@dataclass(frozen=True)
class Storage:
    """How a matrix lies in a file."""

    n_rows: int = 12
    dtype: str = "float32"
    layout: str = "csr"
    density: float = 0.3
    compression: str | None = None
    chunk: int | None = None
    index_dtype: str = "int32"
    big_endian: bool = False
    unsorted: bool = False
    twice: bool = False
    seed: int = 0
    element: str = "X"
    n_vars: int = field(default=9, kw_only=True)

    def matrix(self) -> Any:
        rng = np.random.default_rng(self.seed)
        shape = (self.n_rows, self.n_vars)
        dense = np.where(rng.random(shape) < self.density, rng.integers(1, 99, shape), 0)
        dense = dense.astype(self.dtype)
        return sp.csr_matrix(dense) if self.layout == "csr" else dense


STORAGES = {
    **{f"CSR of {dtype}": Storage(dtype=dtype) for dtype in DTYPES},
    **{f"dense {dtype}": Storage(dtype=dtype, layout="dense") for dtype in DTYPES},
    "dense float16": Storage(dtype="float16", layout="dense"),
    "CSR gzip": Storage(compression="gzip", chunk=7),
    "CSR lzf": Storage(compression="lzf", chunk=7),
    "dense gzip": Storage(layout="dense", compression="gzip", chunk=5),
    "dense lzf": Storage(layout="dense", compression="lzf", chunk=5),
    "CSR in chunks of one": Storage(chunk=1),
    "CSR in one chunk": Storage(chunk=10_000),
    "dense in chunks of one row": Storage(layout="dense", chunk=1),
    "int64 indices": Storage(index_dtype="int64"),
    "uint32 indices": Storage(index_dtype="uint32"),
    "unsorted columns": Storage(unsorted=True),
    "columns stored twice": Storage(twice=True),
    "big-endian CSR": Storage(big_endian=True, index_dtype="int64"),
    "big-endian dense": Storage(big_endian=True, layout="dense", dtype="float64"),
    "many empty rows": Storage(density=0.05, n_rows=40),
    "only zeros": Storage(density=0),
    "only zeros, dense": Storage(density=0, layout="dense"),
    "no zeros": Storage(density=1),
    "one row": Storage(n_rows=1),
    "one gene": Storage(n_vars=1),
    "no genes": Storage(n_vars=0),
    "CSR layer": Storage(element="layers/counts", dtype="uint16"),
    "dense layer": Storage(element="layers/counts", dtype="int32", layout="dense"),
}


def edit_row(group: h5py.Group, storage: Storage, row: slice) -> None:
    if storage.unsorted:
        for name in ("data", "indices"):
            group[name][row] = group[name][row][::-1]
    if storage.twice:
        group["indices"][row] = group["indices"][row.start]


@pytest.fixture(scope="session")
def store(write_h5ad, replace):
    """Write a matrix in a file, stored as asked."""

    def relay(group: h5py.Group, name: str, storage: Storage, dtype: str | None = None) -> None:
        values = group[name][()]
        stored_as = values.dtype if dtype is None else np.dtype(dtype)
        rows = max(1, min(storage.chunk or 1000, len(values)))
        replace(
            group,
            name,
            values,
            dtype=stored_as.newbyteorder(">") if storage.big_endian else stored_as,
            chunks=(rows, *values.shape[1:]) if storage.chunk and values.size else None,
            compression=storage.compression if values.size else None,
        )

    def edit_csr(group: h5py.Group, storage: Storage) -> None:
        for start, stop in itertools.pairwise(group["indptr"][:]):
            if stop > start:
                edit_row(group, storage, slice(start, stop))
        relay(group, "data", storage)
        relay(group, "indices", storage, storage.index_dtype)
        relay(group, "indptr", storage, storage.index_dtype)

    def store_(storage: Storage) -> Path:
        def edit(file: h5py.File) -> None:
            if storage.layout == "csr":
                edit_csr(file[storage.element], storage)
            else:
                relay(file, storage.element, storage)

        matrix = storage.matrix()
        if storage.element == "X":
            return Path(write_h5ad(matrix, edit=edit))
        elsewhere = np.full(matrix.shape, 200, dtype=np.uint8)
        layers = {storage.element.removeprefix("layers/"): matrix}
        return Path(write_h5ad(elsewhere, layers=layers, edit=edit))

    return store_


@pytest.fixture(scope="session")
def oracle(in_memory):
    """All rows of stored matrices, dense, in memory."""

    def read(files: list[Path], mixture: list[Storage]) -> np.ndarray:
        parts = [
            # anndata cannot read big-endian CSR.
            dense(storage.matrix())
            if storage.big_endian and storage.layout == "csr"
            else in_memory([file], storage.element)
            for file, storage in zip(files, mixture, strict=True)
        ]
        return np.vstack(parts)

    return read


def assert_reads(collection, expected: np.ndarray, rows: Any) -> None:
    cells = collection[rows]
    assert cells.X.dtype == collection.dtype
    assert cells.X.dtype.isnative
    assert sp.issparse(cells.X) == (collection.layout == "csr")
    assert np.array_equal(dense(cells.X), np.atleast_2d(expected[rows]))
    assert cells.rows.tolist() == np.arange(len(expected))[rows].ravel().tolist()
    assert len(cells) == len(cells.rows)


class TestOneFile:
    @pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
    def test_reads_as_anndata_does_in_memory(self, store, oracle, storage):
        path = store(storage)
        collection = open_collection(path, elements=[storage.element])
        expected = oracle([path], [storage])
        assert collection.layout == storage.layout
        assert collection.dtype == storage.dtype
        assert len(collection) == storage.n_rows
        assert collection.n_vars == storage.n_vars
        assert_reads(collection, expected, slice(None))
        rng = np.random.default_rng(1)
        for _ in range(5):
            assert_reads(collection, expected, rng.integers(0, len(expected), 7))

    def test_half_precision_csr_is_widened_as_scipy_has_no_such_matrix(self, write_h5ad, replace):
        X = np.eye(3, dtype=np.float32)

        def edit(file):
            replace(file, "X/data", file["X/data"][:], dtype=np.float16)

        collection = open_collection(write_h5ad(sp.csr_matrix(X), edit=edit))
        assert collection.dtype == np.float32
        assert_reads(collection, X, slice(None))

    @pytest.mark.parametrize("name", ["scgen_valid.h5ad", "pbmc68k_reduced.h5ad"])
    def test_real_old_files(self, shared_file, in_memory, read_by_anndata, name):
        path = shared_file(name)
        collection = open_collection(path)
        rows = np.random.default_rng(0).integers(0, len(collection), 300)
        assert_reads(collection, in_memory([path]), rows)
        assert collection.var_names.tolist() == read_by_anndata(path).var_names.tolist()


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


MIXTURES = {
    "CSR and dense": [Storage(), Storage(layout="dense")],
    "CSR and dense that differ in dtype": [
        Storage(dtype="int32"),
        Storage(layout="dense", dtype="float32"),
    ],
    "columns stored twice, beside a dense file": [
        Storage(twice=True, dtype="int32"),
        Storage(layout="dense", dtype="float64"),
    ],
    "small and large counts": [Storage(dtype="uint8"), Storage(dtype="uint16")],
    "signed and unsigned": [Storage(dtype="uint16"), Storage(dtype="int32")],
    "booleans and numbers": [Storage(dtype="bool"), Storage(dtype="float32")],
    "byte orders": [Storage(big_endian=True), Storage()],
    "index dtypes": [Storage(index_dtype="int64"), Storage(index_dtype="int32")],
    "files without cells": [
        Storage(0),
        Storage(5),
        Storage(0),
        Storage(0, layout="dense"),
        Storage(5, layout="dense"),
        Storage(0),
    ],
}

storages = st.builds(
    Storage,
    n_rows=st.integers(1, 15),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["csr", "dense"]),
    density=st.sampled_from([0, 0.1, 0.6, 1]),
    compression=st.sampled_from([None, "gzip", "lzf"]),
    chunk=st.sampled_from([1, 3, 10, 1000]),
    index_dtype=st.sampled_from(["int32", "int64"]),
    big_endian=st.booleans(),
    unsorted=st.booleans(),
    seed=st.integers(0, 1000),
)


class TestManyFiles:
    @pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
    def test_read_as_one(self, store, oracle, mixture):
        files = [store(storage) for storage in mixture]
        collection = open_collection(files)
        expected = oracle(files, mixture)
        assert collection.dtype == expected.dtype
        assert collection.layout == ("csr" if "csr" in {s.layout for s in mixture} else "dense")
        assert_reads(collection, expected, slice(None))
        assert_reads(collection, expected, [-1, 0, 6, 7, 6])

    @given(st.lists(storages, min_size=1, max_size=3), st.data())
    def test_any_files_and_any_rows(self, store, oracle, mixture, data):
        files = [store(storage) for storage in mixture]
        expected = oracle(files, mixture)
        numbers = st.integers(-len(expected), len(expected) - 1)
        assert_reads(open_collection(files), expected, data.draw(st.lists(numbers, max_size=30)))

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


class TestGenes:
    def open_two(self, write_h5ad, genes):
        X = np.ones((2, 3), np.float32)
        self.first, self.second = (
            write_h5ad(X, genes=list("abc")),
            write_h5ad(np.ones((2, len(genes)), np.float32), genes=genes),
        )
        return open_collection([self.first, self.second])

    @pytest.mark.parametrize("genes", [list("abc"), list("acb"), list("cba")])
    def test_that_are_the_same_in_any_order(self, write_h5ad, genes):
        assert self.open_two(write_h5ad, genes).var_names.tolist() == list("abc")

    @pytest.mark.parametrize(
        ("genes", "problem"),
        [
            (list("abd"), r"has other genes than {first} \(2 of 3 are shared\)"),
            (list("ab"), r"has other genes than {first} \(2 of 3 are shared\)"),
            (list("abcd"), r"has other genes than {first} \(3 of 3 are shared\)"),
        ],
    )
    def test_that_differ(self, write_h5ad, genes, problem):
        with pytest.raises(MismatchError) as caught:
            self.open_two(write_h5ad, genes)
        expected = f"^{self.second}: {problem.format(first=self.first)}; give join_vars="
        assert caught.match(expected)


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

    @pytest.mark.parametrize(
        ("path", "problem"),
        [
            ("missing.h5ad", "no such file or folder; check the path"),
            ("missing/*.h5ad", "matches no file; check the path"),
            (
                "empty",
                r"the folder has nothing that can be opened \(\.h5ad, \.h5mu, .*\); give the .*",
            ),
        ],
    )
    def test_that_lead_nowhere(self, folder, path, problem):
        with pytest.raises(PathError, match=rf"{path.replace('*', '.')}: {problem}$") as caught:
            open_collection(folder / path)
        assert isinstance(caught.value, FileNotFoundError)

    def test_none_at_all(self):
        with pytest.raises(PathError, match=r"no path was given; give \.h5ad files"):
            open_collection([])

    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_paths_without_an_order(self, folder, kind):
        with pytest.raises(
            ParameterError, match=r"`(frozen)?set` cannot be opened; it has no order"
        ):
            open_collection(kind(folder.glob("*.h5ad")))

    @pytest.mark.parametrize("name", ["obs", "elements", "genes"])
    def test_names_without_an_order(self, folder, name):
        with pytest.raises(ParameterError, match=rf"^`{name}` must be a list of .*; give a sorted"):
            open_collection(folder, **{name: cast("Any", {"X"})})

    @pytest.mark.parametrize("name", ["obs", "elements", "storage_options"])
    def test_a_number_in_place_of_a_list(self, folder, name):
        with pytest.raises(ParameterError, match=rf"^`{name}` must be a (list of|dict).*, but got"):
            open_collection(folder, **{name: cast("Any", 5)})

    @pytest.mark.parametrize("path", ["x" * 4096, "/" + "x/" * 3000])
    def test_a_path_that_is_too_long(self, path):
        with pytest.raises(PathError, match=r"the path is too long for the file system; check it$"):
            open_collection(path)

    def test_the_home_of_nobody(self):
        with pytest.raises(PathError, match=r"^~nobody-here/x\.h5ad: .* without ~$"):
            open_collection("~nobody-here/x.h5ad")

    @pytest.mark.parametrize(("url", "what"), [("https://", "server"), ("s3://", "bucket")])
    def test_a_url_of_nothing(self, url, what):
        with pytest.raises(PathError, match=f"^{url}: names no {what}; add it$"):
            open_collection(url)

    def test_the_same_file_twice(self, folder):
        (folder / "link.h5ad").symlink_to(folder / "a.h5ad")
        with pytest.raises(PathError, match=r"link\.h5ad: given twice, .*; give it once"):
            open_collection([folder / "a.h5ad", folder / "link.h5ad"])

    def test_a_column_name_in_place_of_a_list(self, folder):
        with pytest.raises(ParameterError, match=r"`obs` must be a list .* write \['plate'\]"):
            open_collection(folder, obs="plate")


def sum_of_rows(collection, connection) -> None:
    connection.send((os.getpid(), dense(collection[1::3].X).sum()))


class TestProcesses:
    def test_a_pickle_has_no_open_file_and_reads_again(self, plates, in_memory, tmp_path):
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

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_forked_process_reads_while_its_parent_does(self, plates, in_memory):
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
