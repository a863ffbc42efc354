"""Zarr stores give the rows that NumPy has in memory, however they are stored."""

import itertools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anndata as ad
import numcodecs
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tests.loader.matrices import dense
from tests.loader.zarr_stores import written_at_once
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    ZstdCodec,
)
from zarr.codecs.numcodecs import FixedScaleOffset

from cellfeed import (
    BlockShuffling,
    CategoricalColumn,
    CellDataset,
    Collection,
    FormatError,
    open_collection,
)

pytestmark = pytest.mark.filterwarnings(
    # What zarr and anndata say when these stores are written.
    "ignore:.*does not have a Zarr V3 specification",
    "ignore:Numcodecs codecs are not in the Zarr version 3 specification",
    "ignore:zarr v3 autosharding will be the default",
    "ignore:Consolidated metadata is currently not part",
    "ignore:Writing zarr v2 data will no longer be the default",
)

V2_CODECS = {
    "none": None,
    "blosc": numcodecs.Blosc(cname="lz4"),
    "blosc zstd": numcodecs.Blosc(cname="zstd", shuffle=numcodecs.Blosc.BITSHUFFLE),
    "zstd": numcodecs.Zstd(),
    "zlib": numcodecs.Zlib(),
    "gzip": numcodecs.GZip(),
    "lz4": numcodecs.LZ4(),
    "bz2": numcodecs.BZ2(),
}
V3_CODECS = {
    "none": [],
    "blosc": [BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")],
    "blosc zstd": [BloscCodec(cname="zstd", shuffle="bitshuffle")],
    "zstd": [ZstdCodec()],
    "zstd with checksum": [ZstdCodec(checksum=True)],
    "gzip": [GzipCodec()],
    "with checksum": [ZstdCodec(), Crc32cCodec()],
}
SLOW = {"bz2", "with checksum"}
DTYPES = ["float32", "float64", "int8", "int32", "int64", "uint16", "uint64", "bool"]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a matrix lies in a store."""

    n_rows: int = 13
    n_vars: int = 9
    dtype: str = "float32"
    index_dtype: str = "int32"
    layout: str = "csr"
    density: float = 0.4
    zarr_format: int = 3
    codec: str = "blosc"
    chunk: tuple[int, int] = (7, 4)
    shard: int | None = None  # chunks of one, along each dimension
    separator: str | None = None
    element: str = "X"
    seed: int = 0

    def matrix(self) -> Any:
        rng = np.random.default_rng(self.seed)
        shape = (self.n_rows, self.n_vars)
        dense = np.where(rng.random(shape) < self.density, rng.integers(1, 99, shape), 0)
        return dense.astype(self.dtype)

    def options(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return what zarr has to be told of an array."""
        chunks = self.chunk[: len(shape)]
        options: dict[str, Any] = {"chunks": chunks}
        if self.zarr_format == 2:
            options["compressors"] = V2_CODECS[self.codec]
        else:
            options["compressors"] = V3_CODECS[self.codec]
            if self.shard:
                options["shards"] = tuple(n * self.shard for n in chunks)
        if self.separator:
            name = "v2" if self.zarr_format == 2 else "default"
            options["chunk_key_encoding"] = {"name": name, "separator": self.separator}
        return options


def write_store(path: Path, storage: Storage, obs: pd.DataFrame | None = None) -> Path:
    """Write an AnnData store as anndata would, but for how the matrix is stored."""
    with written_at_once(path) as memory:
        zarr_format: Any = storage.zarr_format
        write_cells(zarr.create_group(memory, zarr_format=zarr_format), storage, obs)
    return path


def write_cells(root: zarr.Group, storage: Storage, obs: pd.DataFrame | None) -> None:
    matrix = storage.matrix()
    n_rows, n_vars = matrix.shape
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    names = pd.Index([f"cell{i}" for i in range(n_rows)])
    var = pd.DataFrame(index=[f"gene{i}" for i in range(n_vars)])
    with ad.settings.override(allow_write_nullable_strings=True):
        write_elem(root, "obs", pd.DataFrame(index=names) if obs is None else obs.set_index(names))
        write_elem(root, "var", var)
        if storage.element.startswith("raw"):
            write_elem(root.require_group("raw"), "var", var.rename(index="raw {}".format))
    write_matrix(root, storage, matrix)


def write_matrix(root: zarr.Group, storage: Storage, matrix: Any) -> None:
    if storage.layout == "dense":
        attributes: Any = {"encoding-type": "array", "encoding-version": "0.2.0"}
        array = root.create_array(
            storage.element,
            shape=matrix.shape,
            dtype=matrix.dtype,
            attributes=attributes,
            **storage.options(matrix.shape),
        )
        array[...] = matrix
        return
    csr: Any = sp.csr_matrix(matrix)
    group = root.create_group(storage.element)
    encoding = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
    group.attrs.update({**encoding, "shape": list(matrix.shape)})
    group.create_array("indptr", data=csr.indptr)
    for name, dtype in (("indices", storage.index_dtype), ("data", storage.dtype)):
        values = getattr(csr, name).astype(dtype)
        array = group.create_array(
            name, shape=values.shape, dtype=dtype, **storage.options(values.shape)
        )
        array[...] = values


@pytest.fixture(scope="session")
def write(new_folder):
    folder, numbers = new_folder(), itertools.count()
    return lambda storage=Storage(), obs=None: write_store(
        folder / f"{next(numbers):05}.zarr", storage, obs
    )


def is_fast(collection: Collection) -> bool:
    return bool(collection.describe()["is_fast"].all())


class TestStorage:
    @pytest.mark.parametrize("layout", ["csr", "dense"])
    @pytest.mark.parametrize(
        ("zarr_format", "codec"),
        [(2, codec) for codec in V2_CODECS] + [(3, codec) for codec in V3_CODECS],
    )
    def test_every_codec(self, write, layout, zarr_format, codec):
        storage = Storage(layout=layout, zarr_format=zarr_format, codec=codec)
        collection = open_collection(write(storage))
        assert collection.layout == layout
        assert np.array_equal(dense(collection[:].X), storage.matrix())
        assert is_fast(collection) == (codec not in SLOW)

    @pytest.mark.parametrize("layout", ["csr", "dense"])
    @pytest.mark.parametrize("codec", V3_CODECS)
    def test_every_codec_in_shards(self, write, layout, codec):
        storage = Storage(layout=layout, codec=codec, shard=3)
        collection = open_collection(write(storage))
        assert np.array_equal(dense(collection[::-1].X), storage.matrix()[::-1])
        assert is_fast(collection) == (codec not in SLOW)

    @pytest.mark.parametrize("layout", ["csr", "dense"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype(self, write, layout, dtype):
        storage = Storage(layout=layout, dtype=dtype, shard=2)
        collection = open_collection(write(storage))
        assert collection.dtype == dtype
        assert np.array_equal(dense(collection[:].X), storage.matrix())

    @pytest.mark.parametrize("index_dtype", ["uint8", "uint16", "uint32", "int64"])
    def test_every_index_dtype(self, write, index_dtype):
        storage = Storage(index_dtype=index_dtype, shard=2)
        assert np.array_equal(dense(open_collection(write(storage))[:].X), storage.matrix())

    @pytest.mark.parametrize("layout", ["csr", "dense"])
    @pytest.mark.parametrize("zarr_format", [2, 3])
    @pytest.mark.parametrize("separator", [".", "/"])
    def test_every_name_of_chunks(self, write, layout, zarr_format, separator):
        storage = Storage(layout=layout, zarr_format=zarr_format, separator=separator)
        collection = open_collection(write(storage))
        assert is_fast(collection)
        assert np.array_equal(dense(collection[:].X), storage.matrix())

    @settings(max_examples=30)
    @given(data=st.data())
    def test_any_storage_and_any_rows(self, write, data):
        zarr_format = data.draw(st.sampled_from([2, 3]))
        storage = Storage(
            n_rows=data.draw(st.integers(1, 30)),
            n_vars=data.draw(st.integers(2, 12)),
            dtype=data.draw(st.sampled_from(DTYPES)),
            layout=data.draw(st.sampled_from(["csr", "dense"])),
            density=data.draw(st.sampled_from([0.0, 0.1, 0.6, 1.0])),
            zarr_format=zarr_format,
            codec=data.draw(st.sampled_from(list(V2_CODECS if zarr_format == 2 else V3_CODECS))),
            chunk=data.draw(st.tuples(st.integers(1, 40), st.integers(1, 14))),
            shard=data.draw(st.none() | st.integers(1, 5)),
            seed=data.draw(st.integers(0, 99)),
        )
        rows = data.draw(st.lists(st.integers(-storage.n_rows, storage.n_rows - 1), max_size=40))
        collection = open_collection(write(storage))
        assert np.array_equal(dense(collection[np.array(rows, int)].X), storage.matrix()[rows])

    @pytest.mark.parametrize("layout", ["csr", "dense"])
    def test_index_of_a_shard_at_its_start(self, write, layout):
        storage = Storage(layout=layout)
        path = write(storage)
        names = ["X"] if layout == "dense" else ["X/indices", "X/data"]
        for name in names:
            self.write_with_codec(
                path / name,
                lambda chunk: ShardingCodec(
                    chunk_shape=chunk, index_codecs=[BytesCodec()], index_location="start"
                ),
            )
        collection = open_collection(path)
        assert is_fast(collection)
        assert np.array_equal(dense(collection[:].X), storage.matrix())

    @pytest.mark.parametrize("layout", ["csr", "dense"])
    @pytest.mark.parametrize(
        "make_codecs",
        [
            lambda chunk: BytesCodec(endian="big"),
            pytest.param(
                lambda chunk: ShardingCodec(
                    chunk_shape=chunk, codecs=[ShardingCodec(chunk_shape=(1,) * len(chunk))]
                ),
                marks=pytest.mark.skipif(
                    Version(zarr.__version__) < Version("3.1.6"), reason="zarr does not read them"
                ),
            ),
        ],
        ids=["big-endian", "shards in shards"],
    )
    def test_what_only_zarr_reads(self, write, layout, make_codecs):
        storage = Storage(layout=layout)
        path = write(storage)
        for name in ["X"] if layout == "dense" else ["X/indices", "X/data"]:
            self.write_with_codec(path / name, make_codecs)
        collection = open_collection(path)
        assert not is_fast(collection)
        assert np.array_equal(dense(collection[[5, 0, 5]].X), storage.matrix()[[5, 0, 5]])

    @staticmethod
    def write_with_codec(path: Path, make_codec: Any) -> None:
        """Write an array anew, in shards or chunks of two of its chunks."""
        old = zarr.open_array(path, mode="r")
        values, chunk = np.asarray(old[...]), old.chunks
        shutil.rmtree(path)
        array = zarr.create(
            shape=values.shape,
            chunks=tuple(2 * n for n in chunk),
            dtype=values.dtype,
            store=path,
            codecs=[make_codec(chunk)],
            zarr_format=3,
            fill_value=0,
            attributes=dict(old.attrs),
        )
        array[...] = values

    def test_filters(self, write):
        path = write(Storage(layout="dense", dtype="int32"))
        matrix = Storage(dtype="int32").matrix()
        shutil.rmtree(path / "X")
        zarr.open_group(path).create_array(
            "X",
            data=matrix,
            chunks=(4, 9),
            filters=[FixedScaleOffset(offset=1, scale=1, dtype="<i4")],
        )
        collection = open_collection(path)
        assert not is_fast(collection)
        assert np.array_equal(collection[:].X, matrix)

    def test_a_fill_value_that_is_not_zero(self, write):
        path = write(Storage(layout="dense"))
        matrix = np.full((13, 9), 7, np.float32)
        shutil.rmtree(path / "X")
        array = zarr.open_group(path).create_array(
            "X", shape=matrix.shape, dtype=matrix.dtype, chunks=(4, 9), fill_value=7
        )
        array[...] = matrix
        assert np.array_equal(open_collection(path)[:].X, matrix)

    @pytest.mark.parametrize("zarr_format", [2, 3])
    def test_as_anndata_writes_it(self, tmp_path, zarr_format):
        matrix = Storage().matrix()
        obs = pd.DataFrame({"plate": pd.Categorical(["a", "b"] * 6 + ["c"])})
        obs.index = obs.index.astype(str)
        adata = ad.AnnData(sp.csr_matrix(matrix), obs=obs, layers={"dense": matrix})
        with ad.settings.override(zarr_write_format=zarr_format):
            adata.write_zarr(tmp_path / "cells.zarr")
        collection = open_collection(tmp_path / "cells.zarr", obs=["plate"])
        assert np.array_equal(dense(collection[:].X), matrix)
        plate = collection.obs["plate"]
        assert isinstance(plate, CategoricalColumn)
        assert list(plate.categories) == ["a", "b", "c"]
        layer = open_collection(tmp_path / "cells.zarr", elements=["layers/dense"])
        assert np.array_equal(layer[:].X, matrix)


class TestRaw:
    @pytest.mark.parametrize("layout", ["csr", "dense"])
    def test_of_zarr_has_genes_of_its_own(self, write, layout):
        storage = Storage(element="raw/X", layout=layout)
        collection = open_collection(write(storage), elements=["raw/X"])
        assert collection.var_names[0] == "raw gene0"
        assert np.array_equal(dense(collection[:].X), storage.matrix())

    def test_of_h5ad_has_genes_of_its_own(self, tmp_path):
        adata = ad.AnnData(np.eye(4, dtype=np.float32))
        raw, adata = adata, adata[:, :2].copy()
        adata.raw = raw
        adata.write_h5ad(tmp_path / "cells.h5ad")
        collection = open_collection(tmp_path / "cells.h5ad", elements=["raw/X"])
        assert collection.n_vars == 4
        assert np.array_equal(collection[:].X, np.eye(4))

    def test_that_is_absent(self, write, write_h5ad):
        for path in (write(), write_h5ad(np.eye(2, dtype=np.float32))):
            with pytest.raises(FormatError, match=f"^{path}: has no `raw/X`; read `X` instead"):
                open_collection(path, elements=["raw/X"])


@pytest.fixture
def shuffled(tmp_path):
    """A store in annbatch's layout of eleven datasets, and its rows."""
    root = zarr.create_group(tmp_path / "shuffled.zarr")
    root.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    storages = [Storage(seed=k, n_rows=3 + k, index_dtype="uint16", shard=4) for k in range(11)]
    for k, storage in enumerate(storages):
        write_store(
            tmp_path / "shuffled.zarr" / f"dataset_{k}",
            storage,
            pd.DataFrame({"number": np.full(storage.n_rows, k)}),
        )
    return tmp_path / "shuffled.zarr", np.vstack([storage.matrix() for storage in storages])


class TestShuffledCollection:
    def test_has_its_datasets_in_the_order_of_their_numbers(self, shuffled):
        path, matrix = shuffled
        collection = open_collection(path, obs=["number"])
        assert [part.name for part in collection.locations] == [f"dataset_{k}" for k in range(11)]
        assert np.array_equal(dense(collection[:].X), matrix)
        assert collection[[-1]].obs["number"][0] == 10

    def test_is_trained_on(self, shuffled):
        path, matrix = shuffled
        dataset = CellDataset(
            open_collection(path),
            BlockShuffling(block_size=4),
            batch_size=8,
            fetch_factor=4,
            seed=0,
        )
        for minibatch in dataset:
            assert np.array_equal(dense(minibatch.X), matrix[minibatch.rows])

    def test_one_dataset_of_it(self, shuffled):
        assert len(open_collection(shuffled[0] / "dataset_4")) == 7

    def test_that_lacks_a_dataset(self, shuffled):
        shutil.rmtree(shuffled[0] / "dataset_7")
        with pytest.raises(
            FormatError, match=r"expected datasets numbered from 0, but .*: 0, .*6, 8, 9, 10"
        ):
            open_collection(shuffled[0])

    def test_that_is_not_finished(self, shuffled):
        zarr.open_group(shuffled[0]).attrs.clear()
        (shuffled[0] / ".cellfeed").mkdir()
        with pytest.raises(
            FormatError, match="is unfinished; run the same `cellfeed preshuffle` again"
        ):
            open_collection(shuffled[0])


class TestPaths:
    def test_a_folder_of_stores_and_files(self, tmp_path, write_h5ad):
        storages = [Storage(seed=1), Storage(seed=2, zarr_format=2)]
        write_store(tmp_path / "a.zarr", storages[0])
        shutil.copy(write_h5ad(Storage(seed=3).matrix()), tmp_path / "b.h5ad")
        write_store(tmp_path / "c.zarr", storages[1])
        collection = open_collection(tmp_path)
        assert [each.name for each in collection.locations] == ["a.zarr", "b.h5ad", "c.zarr"]
        expected = np.vstack([Storage(seed=seed).matrix() for seed in (1, 3, 2)])
        assert np.array_equal(dense(collection[:].X), expected)
        assert len(open_collection(tmp_path / "*.zarr")) == 26

    def test_a_group_of_something_else(self, tmp_path):
        zarr.create_group(tmp_path / "other.zarr")
        with pytest.raises(FormatError, match=r"other\.zarr: is a zarr group, but neither AnnData"):
            open_collection(tmp_path / "other.zarr")

    def test_an_array(self, tmp_path):
        zarr.create_array(tmp_path / "x.zarr", data=np.eye(2))
        with pytest.raises(FormatError, match="cannot be opened as a zarr group"):
            open_collection(tmp_path / "x.zarr")

    def test_a_store_without_the_matrix(self, write):
        path = write(Storage(element="layers/counts"))
        with pytest.raises(FormatError, match=f"^{path}: has no `X`; its layers are: counts$"):
            open_collection(path)
        assert len(open_collection(path, elements=["layers/counts"])) == 13


def test_storages_differ():
    assert not np.array_equal(Storage().matrix(), replace(Storage(), seed=1).matrix())


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("changed", [{"chunks": (4, 9)}, {"dtype": "int32"}])
def test_metadata_that_were_consolidated_before_arrays_were_written_anew(
    tmp_path, version, changed
):
    """Chunks of another grid or dtype would be noise, or zeros where none has that name."""
    X = np.random.default_rng(0).poisson(2, (13, 9)).astype(np.float32)
    path = tmp_path / "cells.zarr"
    with ad.settings.override(zarr_write_format=version):
        ad.AnnData(X).write_zarr(path)
    options: dict[str, Any] = {"chunks": (7, 4), "dtype": "float32", "compressors": None}
    for each in (options, options | changed):
        root = zarr.open_group(path, mode="r+", use_consolidated=False)
        attributes = dict(root["X"].attrs)
        del root["X"]
        dtype = np.dtype(each["dtype"])
        others = {name: value for name, value in each.items() if name != "dtype"}
        root.create_array("X", data=X.astype(dtype), **others).attrs.update(attributes)
        if each is options:
            zarr.consolidate_metadata(root.store)
    assert np.array_equal(open_collection(path)[:].X, X)
