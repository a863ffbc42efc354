"""Why a file is read slowly, from what is wrong with it to what is said."""

import ctypes

import anndata as ad
import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
from anndata.io import write_elem
from h5py import h5d, h5p, h5s, h5t
from tests.loader.sources.zarr_cells import quiet
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec

from cellfeed import open_collection

COUNTS = np.random.default_rng(0).poisson(1.0, (40, 7)).astype(np.float32)
NOT_SUPPORTED = "filter {} is not supported"


def chunked(**options):
    return lambda file: file.create_dataset("X", **{"data": COUNTS, "chunks": (10, 7), **options})


def low_level(*, kind=h5t.NATIVE_FLOAT, layout=h5d.CHUNKED, filled=None):
    def create(file):
        created = h5p.create(h5p.DATASET_CREATE)
        created.set_layout(layout)
        if layout == h5d.CHUNKED:
            created.set_chunk((10, 7))
        if filled is not None:
            created.set_fill_value(np.array(filled, np.float32))
        stored = h5py.Dataset(h5d.create(file.id, b"X", kind, h5s.create_simple((40, 7)), created))
        n = 40 if filled is None else 20
        stored[:n] = COUNTS[:n]

    return create


# HDF5 converts what NumPy has no dtype for, so its bytes are not to be taken as they are.
BFLOAT16 = h5t.IEEE_F32LE.copy()
BFLOAT16.set_fields(15, 7, 8, 0, 7)
BFLOAT16.set_size(2)
OTHER_BIAS = h5t.IEEE_F64LE.copy()
OTHER_BIAS.set_ebias(1000)
BITS_IN_BETWEEN = h5t.STD_I32LE.copy()
BITS_IN_BETWEEN.set_precision(12)
BITS_IN_BETWEEN.set_offset(4)


HDF5 = {
    "blosc2": (chunked(**hdf5plugin.Blosc2()), NOT_SUPPORTED.format("blosc2")),
    "snappy": (
        chunked(**hdf5plugin.Blosc(cname="snappy")),
        NOT_SUPPORTED.format("blosc 5 with snappy"),
    ),
    "fletcher32": (
        chunked(compression="gzip", shuffle=True, fletcher32=True),
        NOT_SUPPORTED.format("gzip 4 with fletcher32"),
    ),
    "big-endian": (chunked(data=COUNTS.astype(">f4")), "its numbers are big-endian"),
    "bfloat16": (low_level(kind=BFLOAT16), "its numbers must be converted to float32"),
    "other bias": (
        low_level(kind=OTHER_BIAS),
        f"its numbers must be converted to {np.dtype(np.longdouble)}",
    ),
    "bits in between": (
        low_level(kind=BITS_IN_BETWEEN, layout=h5d.CONTIGUOUS),
        "its numbers must be converted to int32",
    ),
    "compact": (low_level(layout=h5d.COMPACT), "it is stored in its own header (compact)"),
    "never written": (
        chunked(data=None, chunks=None, shape=(40, 7), dtype="f4"),
        "it was never written completely",
    ),
    "fill value": (low_level(filled=3), "its missing chunks are not zero"),
    "growing": (
        chunked(maxshape=(40, None)),
        "it is resizable in its second dimension but not in its first",
    ),
}


@pytest.mark.parametrize("name", HDF5)
def test_dense_hdf5(write_h5ad, name):
    create, reason = HDF5[name]

    def edit(file):
        attributes = dict(file["X"].attrs)
        del file["X"]
        create(file)
        file["X"].attrs.update(attributes)

    collection = open_collection(write_h5ad(COUNTS, edit=edit))
    assert collection.describe()["reason"].tolist() == [f"through h5py: {reason}"]
    with h5py.File(collection.locations[0]) as file:
        assert np.array_equal(collection[:].X, file["X"][:])


@pytest.mark.parametrize("kind", ["shuffle", "gzip"])
def test_hdf5_chunks_at_the_edge_that_are_not_filtered(tmp_path, kind):
    """Written without h5py's own functions, which cannot ask for it."""
    path, shape, chunks = tmp_path / "edges.h5ad", (35, 7), (10, 4)
    with h5py.File(path, "w", libver="latest") as file:
        write_elem(file, "/", ad.AnnData(COUNTS[:35]))
        attributes = dict(file["X"].attrs)
        del file["X"]
        created = h5p.create(h5p.DATASET_CREATE)
        created.set_chunk(chunks)
        if kind == "shuffle":
            created.set_shuffle()
        else:
            created.set_deflate(4)
        set_options = ctypes.CDLL(h5d.__file__).H5Pset_chunk_opts
        set_options.argtypes = [ctypes.c_int64, ctypes.c_uint]
        assert set_options(created.id, 2) == 0  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
        space = h5s.create_simple(shape)
        h5py.Dataset(h5d.create(file.id, b"X", h5t.NATIVE_FLOAT, space, created))[:] = COUNTS[:35]
        file["X"].attrs.update(attributes)
    collection = open_collection(path)
    assert np.array_equal(collection[:].X, COUNTS[:35])
    assert collection.describe()["reason"].tolist() == [
        "through h5py: its chunks at the edge are not filtered"
    ]


@pytest.mark.parametrize("name", ["indices", "data"])
def test_either_array_of_a_csr_matrix(write_h5ad, replace, name):
    def edit(file):
        replace(file, f"X/{name}", file[f"X/{name}"][:], fletcher32=True, chunks=(20,))

    (reason,) = open_collection(write_h5ad(sp.csr_matrix(COUNTS), edit=edit)).describe()["reason"]
    assert reason == "through h5py: filter fletcher32 is not supported"


@pytest.mark.parametrize(
    ("values", "layout"),
    [(np.zeros((5, 7), np.float32), "csr"), (np.zeros((5, 0), np.float32), "dense")],
)
def test_what_holds_no_values_is_not_slow(write_h5ad, values, layout):
    X = sp.csr_matrix(values) if layout == "csr" else values
    table = open_collection(write_h5ad(X)).describe()
    assert table["is_fast"].tolist() == [True]
    assert table["layout"].tolist() == [layout]


def test_float16_that_rows_add_up_as_float32(write_h5ad):
    half = sp.csr_matrix(COUNTS)
    half.data = half.data.astype(np.float16)
    collection = open_collection(write_h5ad(half))
    said = collection.slow_reading() or ""
    assert said.endswith(
        "`X` is read slowly, through h5py: cellfeed does not convert float16 to float32; "
        "read it as float16, or write it as float32"
    )
    assert collection.slow_reading(np.dtype(np.float16)) is None


ZARR = {
    "bz2": (2, {"compressors": numcodecs.BZ2()}, "codec bz2 is not supported"),
    "crc32c": (2, {"compressors": numcodecs.CRC32C()}, "codec crc32c is not supported"),
    "delta": (2, {"filters": [numcodecs.Delta(dtype="<f4")]}, "filter delta is not supported"),
    "columns": (2, {"order": "F"}, "its chunks are in Fortran order"),
    "big-endian v2": (2, {"dtype": ">f4"}, "its numbers are big-endian"),
    "fill value": (2, {"fill_value": 3}, "its missing chunks are 3.0, not 0"),
    "checksum": (
        3,
        {"compressors": [Crc32cCodec(), ZstdCodec()]},
        "codec crc32c with zstd is not supported",
    ),
    "big-endian v3": (3, {"serializer": BytesCodec(endian="big")}, "its numbers are big-endian"),
    "index": (
        3,
        {
            "serializer": ShardingCodec(
                chunk_shape=(5, 7), index_codecs=[BytesCodec(endian="big"), Crc32cCodec()]
            )
        },
        "its index of shards is not supported",
    ),
    "shards in shards": (
        3,
        {
            "serializer": ShardingCodec(
                chunk_shape=(5, 7), codecs=[ShardingCodec(chunk_shape=(1, 7))]
            )
        },
        "codec sharding_indexed is not supported",
    ),
    "shards compressed": (
        3,
        {"serializer": ShardingCodec(chunk_shape=(5, 7)), "compressors": [ZstdCodec()]},
        "codec sharding_indexed is not supported",
    ),
}


@quiet
@pytest.mark.parametrize("name", ZARR)
def test_dense_zarr(new_store, name):
    zarr_format, options, reason = ZARR[name]
    options = {"chunks": (10, 7), "compressors": None, **options}
    collection = open_collection(new_store(COUNTS, zarr_format=zarr_format, X=options))
    assert collection.describe()["reason"].tolist() == [f"through zarr: {reason}"]
    assert np.array_equal(collection[:].X, COUNTS)
