"""Metadata that no writer would write ends in right rows or in one line, and never in a crash."""

import json
import resource
import shutil
from pathlib import Path

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from hypothesis import settings
from tests.commands import limited
from tests.loader.matrices import dense
from tests.loader.sources.arriving import Arriving
from tests.loader.sources.zarr_cells import quiet
from tests.warm import python as warm

from cellfeed import (
    CellDataset,
    CellfeedError,
    Collection,
    FormatError,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed.sources import Location, StoredElement

pytestmark = quiet

ROOT = Path(__file__).parents[3]
COUNTS = np.random.default_rng(0).poisson(0.7, size=(40, 12)).astype(np.float32)
CSR = sp.csr_matrix(COUNTS)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("storage", "n_per_example"), [("zarr", 12), ("hdf5", 6)])
def test_fuzzed(storage, n_per_example):
    """300 and 150 cases, the same in each run; ten times as many in `make thorough`."""
    n = n_per_example * settings().max_examples
    fuzzer = ("-W", "error", "-m", f"tests.loader.sources.{storage}_metadata_fuzzing", n)
    lines = warm.output_of(*fuzzer, cwd=ROOT, timeout=1800).splitlines()
    assert len(lines) == n + 1
    counts = {result: int(count) for result, count in map(str.split, lines[-1].split(", "))}
    assert sum(counts.values()) == n
    # Neither is everything refused, nor is everything harmless.
    assert min(counts["told"], counts["same"]) > n // 10


@pytest.fixture
def zarr_store(new_store):
    """Return a function that writes a dense store whose chunks have any shape in its metadata."""

    def write(chunk_shape, *, shape=COUNTS.shape, content=b""):
        path = new_store(COUNTS, X={"chunks": (8, 12), "shards": (16, 12)})
        metadata_file = path / "X/zarr.json"
        metadata = json.loads(metadata_file.read_text())
        metadata["shape"] = list(shape)
        sharding = metadata["codecs"][0]["configuration"]
        sharding["chunk_shape"] = list(chunk_shape)
        sharding["index_codecs"] = sharding["index_codecs"][:1]
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = list(chunk_shape)
        metadata_file.write_text(json.dumps(metadata))
        shutil.rmtree(path / "X/c")
        (path / "X/c/0").mkdir(parents=True)
        index = np.array([0, len(content)], "<u8").tobytes()
        (path / "X/c/0/0").write_bytes(content + index)
        return path

    return write


class TestChunkShapes:
    @pytest.mark.parametrize(
        "shape", [(1 << 32, 1 << 32), (1 << 62, 4), (1 << 61, 8), (1 << 63, 12), (1 << 40, 1 << 40)]
    )
    def test_whose_product_overflows(self, zarr_store, shape):
        """These ended in a crash, or gave rows of memory that nobody had written."""
        path = zarr_store(shape, content=numcodecs.Zstd().encode(b""))
        said = rf"^{path}: `X` cannot be read \(chunks of shape \(.*\); the file is damaged, copy"
        with pytest.raises(FormatError, match=said):
            open_collection(path)[:]

    @pytest.mark.parametrize("chunk_shape", [(40, 12), (64, 16), (1000, 1000), (1 << 20, 12)])
    def test_beyond_the_array_are_right(self, zarr_store, chunk_shape):
        values = np.zeros(chunk_shape, np.float32)
        values[:40, :12] = COUNTS
        path = zarr_store(chunk_shape, content=numcodecs.Zstd().encode(values))
        assert np.array_equal(open_collection(path)[:].X, COUNTS)

    def test_of_a_chunk_that_is_absent_take_memory_for_its_rows_only(self, zarr_store):
        """A GiB of zeros for each thread would be the end of many a process."""
        path = zarr_store((1 << 24, 16))
        (path / "X/c/0/0").write_bytes(np.full(2, -1, "<i8").tobytes())
        taken = psutil.Process().memory_info().data
        with limited(resource.RLIMIT_DATA, taken + (5 << 29)):
            assert not open_collection(path)[:].X.any()

    @pytest.mark.parametrize("shape", [(1 << 40, 12), (39, 12), (40, 1 << 40), (40, 11), (0, 12)])
    def test_of_arrays_that_the_tables_do_not_fit(self, zarr_store, shape):
        path = zarr_store((8, 12), shape=shape)
        with pytest.raises(FormatError, match=f"^{path}: (obs|var) has \\d+ rows, but `X` has "):
            open_collection(path)

    def test_of_hdf5_that_are_larger_than_the_dataset(self, write_h5ad, replace):
        def edit(file):
            options = {"chunks": (1 << 29,), "maxshape": (None,), "compression": "gzip"}
            shape = file["X/data"].shape
            replace(file, "X/data", None, shape=shape, dtype=np.float32, **options)

        path = write_h5ad(CSR, edit=edit)
        with pytest.raises(FormatError, match=f"^{path}: `X` cannot be read .chunks of shape"):
            open_collection(path)


class TestSizesOfChunks:
    @pytest.mark.parametrize("name", ["X/data", "X/indices", "X/indptr"])
    def test_of_hdf5_that_are_shuffled_and_not_compressed(self, write_h5ad, replace, name):
        """HDF5 itself would deliver what lies in memory behind them."""

        def edit(file):
            replace(file, name, file[name][:], chunks=(16,), shuffle=True)
            file[name].id.write_direct_chunk((16,), bytes(8))

        path = write_h5ad(CSR, edit=edit)
        problem = f"^{path}: `{name}` cannot be read .it has chunks that are not"
        with pytest.raises(FormatError, match=problem):
            open_collection(path)[:]

    @pytest.mark.parametrize(
        "options", [{"compression": "gzip"}, {"compression": "lzf"}, dict(hdf5plugin.Zstd())]
    )
    def test_of_row_pointers(self, write_h5ad, replace, options):
        def edit(file):
            replace(file, "X/indptr", file["X/indptr"][:], chunks=(16,), **options)
            with h5py.File("other", "w", driver="core", backing_store=False) as other:
                small = other.create_dataset("x", data=np.arange(4), chunks=(4,), **options)
                _, content = small.id.read_direct_chunk((0,))
            file["X/indptr"].id.write_direct_chunk((16,), content)

        path = write_h5ad(CSR, edit=edit)
        problem = rf"^{path}: `X/indptr`, elements 16 to 32 \(bytes \d+ to \d+\): "
        with pytest.raises(FormatError, match=problem):
            open_collection(path)[:]

    @pytest.mark.parametrize("n_bytes", [385, 1 << 16])
    def test_of_zarr_that_are_alone_in_a_file_and_not_compressed(self, new_store, n_bytes):
        path = new_store(COUNTS, X={"chunks": (8, 12), "compressors": None})
        assert np.array_equal(open_collection(path)[:].X, COUNTS)
        chunk = path / "X/c/1/0"
        chunk.write_bytes(chunk.read_bytes() + bytes(n_bytes - 384))
        problem = f"^{chunk}: `X`, rows 8 to 16.*: decompress to another size than that of the chu"
        with pytest.raises(FormatError, match=problem):
            open_collection(path)[[9]]


class TestNumbers:
    @pytest.mark.parametrize("name", ["X/indices", "X/indptr"])
    def test_row_pointers_and_columns_are_integers(self, write_h5ad, replace, name):
        path = write_h5ad(CSR, edit=lambda file: replace(file, name, file[name][:] != 0))
        said = f"/{name} is not an array of integers, but has shape"
        with pytest.raises(FormatError, match=said):
            open_collection(path)

    @pytest.mark.parametrize("name", ["X/indices", "X/indptr"])
    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_row_pointers_and_columns_may_be_integers_as_floats(
        self, write_h5ad, replace, name, dtype
    ):
        """As R writes large integers."""

        def edit(file):
            replace(file, name, file[name][:].astype(dtype), chunks=(20,))
            file["X"].attrs["shape"] = np.array(COUNTS.shape, dtype)

        def with_half(file):
            edit(file)
            file[name][1] += 0.5

        collection = open_collection(write_h5ad(CSR, edit=edit))
        assert np.array_equal(dense(collection[:].X), COUNTS)
        assert collection.describe()["is_fast"].tolist() == [name == "X/indptr"]
        path = write_h5ad(CSR, edit=with_half)
        with pytest.raises(FormatError, match=f"{path}: .*has values that are not integers"):
            open_collection(path)[:]

    @pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="it is float64 here")
    @pytest.mark.parametrize("is_dense", [False, True])
    @pytest.mark.parametrize("name", ["X", "X/data"])
    def test_longdouble_becomes_what_torch_has_or_is_refused(
        self, write_h5ad, replace, name, is_dense
    ):
        def edit(file):
            replace(file, name, file[name][:].astype(np.longdouble))

        X = COUNTS if name == "X" else sp.csr_matrix(COUNTS)
        collection = open_collection(write_h5ad(X, edit=edit))
        sizes = {"batch_size": 40, "fetch_factor": 1, "dense": is_dense}
        problem = (
            r"values are stored as float\d+, which torch does not support; give `dtype='float64'`"
        )
        with pytest.raises(ParameterError, match=problem):
            CellDataset(collection, Streaming(), **sizes)
        with pytest.raises(ParameterError, match=problem):
            collection[:].to_torch(dense=is_dense)
        (as_numpy,) = CellDataset(collection, Streaming(), as_torch=False, **sizes)
        assert np.array_equal(dense(as_numpy.X), COUNTS)
        with pytest.warns(UserWarning, match=r"is read slowly, .* does not convert .* to float64"):
            dataset = CellDataset(collection, Streaming(), dtype="float64", **sizes)
        (minibatch,) = dataset
        assert np.array_equal(dense(minibatch.X), COUNTS)


class Huge(StoredElement):
    """A row that is larger than the machine."""

    var, dtype = None, np.dtype(np.float32)

    def __init__(self, n, layout):
        self.shape, self.layout, self._n = (1, n), layout, n

    def row_lengths(self, runs):
        return np.array([self._n])

    def read_rows(self, runs):
        raise AssertionError


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("n", [1 << 40, 1 << 60, (1 << 63) - 1])
def test_rows_that_are_larger_than_the_machine(n, layout):
    refused: type[CellfeedError] = ParameterError
    said = "these rows take .* bytes, but this machine has"
    if layout == "csr":
        refused, said = FormatError, f"{n:,} columns, and sparse rows have fewer than"
    with pytest.raises(refused, match=said):
        Collection([Arriving(Location("memory://huge"), {"X": Huge(n, layout)})])[[0]]
