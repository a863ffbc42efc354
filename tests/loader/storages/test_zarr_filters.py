"""Filters of numcodecs, differences and narrower numbers, are undone as zarr undoes them."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.storages.zarr_cells import quiet, write_cells
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec
from zarr.codecs.numcodecs import LZ4, AsType, Delta

from cellfeed import BlockShuffling, CellDataset, FormatError, open_collection

pytestmark = quiet

V2_CODECS: dict[str, Any] = {
    "none": None,
    "blosc": numcodecs.Blosc("lz4"),
    "zstd": numcodecs.Zstd(),
}
V3_CODECS: dict[str, Any] = {
    "none": [],
    "blosc": [BloscCodec(cname="lz4hc", shuffle="shuffle")],
    "bits": [BloscCodec(cname="lz4", shuffle="bitshuffle")],
    "zstd": [ZstdCodec()],
    "gzip": [GzipCodec()],
}


def delta(dtype: str, zarr_format: int = 3) -> Any:
    return numcodecs.Delta(dtype) if zarr_format == 2 else Delta(dtype=dtype)


def as_type(narrow: str, wide: str, zarr_format: int = 3) -> Any:
    if zarr_format == 2:
        return numcodecs.AsType(narrow, wide)
    return AsType(encode_dtype=narrow, decode_dtype=wide)


@st.composite
def stores(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    """Draw a CSR matrix of counts, and how it is stored."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = draw(st.integers(1, 40)), draw(st.sampled_from([1, 9, 300, 70_000]))
    lengths = rng.integers(0, min(shape[1], 20) + 1, shape[0])
    columns = [rng.choice(shape[1], n, replace=False) for n in lengths]
    if draw(st.booleans()):
        columns = [np.sort(each) for each in columns]
    indices = np.concatenate([*columns, np.empty(0)])
    narrow = draw(st.sampled_from(["u1", "u2", "i2"]))
    largest = min(np.iinfo(narrow).max, 300)
    wide = draw(st.sampled_from(["f4", "f8", "i4"]))
    index_dtype = draw(st.sampled_from(["u2", "i4", "u4", "i8"] if shape[1] <= 300 else ["i4"]))
    zarr_format = draw(st.sampled_from([2, 3]))
    codecs = V2_CODECS if zarr_format == 2 else V3_CODECS
    chunk = draw(st.integers(1, 70))
    common: dict[str, Any] = {"chunks": (chunk,)}
    if zarr_format == 3 and draw(st.booleans()):
        common["shards"] = (chunk * draw(st.integers(1, 4)),)
    X: Any = sp.csr_matrix(np.zeros(shape, wide))
    X.indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    X.indices = indices.astype(index_dtype)
    X.data = rng.integers(1, largest + 1, indices.size).astype(wide)
    of_indices = [delta(index_dtype, zarr_format)]
    if index_dtype == "i8" and shape[1] <= 300:
        of_indices = [as_type("u2", "i8", zarr_format), delta("u2", zarr_format)]
    of_data = [as_type(narrow, wide, zarr_format)]
    if draw(st.booleans()):
        of_data.append(delta(narrow, zarr_format))
    options = {
        "zarr_format": zarr_format,
        "indices": common
        | {"filters": of_indices, "compressors": codecs[draw(st.sampled_from(sorted(codecs)))]},
        "data": common
        | {"filters": of_data, "compressors": codecs[draw(st.sampled_from(sorted(codecs)))]},
    }
    return X, options


def with_wide_indices(X: Any) -> Any:
    return sp.csr_matrix((X.data, X.indices.astype(np.int64), X.indptr), X.shape).toarray()


@given(stores(), st.integers(0, 1 << 32))
def test_rows_are_those_in_memory(drawn, seed):
    X, options = drawn
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        collection = open_collection(write_cells(Path(folder, "a.zarr"), X, **options))
        assert collection.dtype == X.dtype
        assert collection.describe()["is_fast"].all()
        for share in (0.5, 0.2, 0.2):  # chunks that were decoded whole, then only as far as wanted
            rows = np.flatnonzero(rng.random(X.shape[0]) < share)
            found = collection[rows].X
            np.testing.assert_array_equal(found.toarray(), with_wide_indices(X)[rows])
            assert found.dtype == X.dtype


@pytest.mark.parametrize("out", ["float32", "float64", "int8", "uint8", "int32", "bool"])
def test_values_are_cast_as_if_they_were_wide(new_store, out):
    X = sp.csr_matrix(np.random.default_rng(0).integers(0, 300, (30, 20)).astype("f4"))
    narrow = {"chunks": (64,), "filters": [as_type("<u2", "<f4")]}
    rows = list[np.ndarray]()
    for options in (narrow, {"chunks": (64,)}):
        collection = open_collection(new_store(X, data=options))
        dataset = CellDataset(collection, BlockShuffling(4), batch_size=5, dtype=out, seed=1)
        rows.append(np.concatenate([dense(minibatch.X) for minibatch in dataset]))
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("chunk", [(7, 9), (7, 4)])
def test_of_dense_matrices(new_store, chunk):
    X = np.random.default_rng(0).integers(0, 300, (30, 9)).astype("f4")
    options = {"chunks": chunk, "filters": [as_type("<u2", "<f4"), delta("<u2")]}
    collection = open_collection(new_store(X, X=options))
    assert collection.describe()["is_fast"].all()
    rows = np.array([0, 3, 8, 29])
    np.testing.assert_array_equal(collection[rows].X, X[rows])


NARROW = AsType, {"encode_dtype": "<u2", "decode_dtype": "<f4"}
OTHERS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "delta of fractions": [(Delta, {"dtype": "<f4"})],
    "delta to a wider dtype": [NARROW, (Delta, {"dtype": "<u2", "astype": "<u4"})],
    "astype to a wider dtype": [(AsType, {"encode_dtype": "<f8", "decode_dtype": "<f4"})],
    "astype that may round": [(AsType, {"encode_dtype": "<i4", "decode_dtype": "<f4"})],
    "delta of delta": [NARROW, *[(Delta, {"dtype": "<u2"})] * 2],
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_go_through_zarr(new_store, name):
    X = sp.csr_matrix(np.random.default_rng(0).integers(1, 300, (12, 5)).astype("f4"))
    filters = [codec(**options) for codec, options in OTHERS[name]]
    options = {"chunks": (16,), "filters": filters}
    collection = open_collection(new_store(X, data=options))
    (reason,) = collection.describe()["reason"]
    assert "is not supported" in reason
    np.testing.assert_array_equal(collection[np.arange(12)].X.toarray(), X.toarray())


@pytest.mark.parametrize("compressor", [BloscCodec, ZstdCodec, LZ4])
@pytest.mark.parametrize("name", ["indices", "data"])
def test_a_chunk_that_is_damaged_is_an_error(new_store, compressor, name):
    X = sp.csr_matrix(np.random.default_rng(0).integers(1, 300, (40, 30)).astype("f4"))
    X.indices = X.indices.astype("u2")
    common = {"chunks": (128,), "compressors": [compressor()]}
    filters = {"indices": [delta("<u2")], "data": [as_type("<u2", "<f4"), delta("<u2")]}
    store = new_store(X, **{key: common | {"filters": filters[key]} for key in filters})
    chunk = store / "X" / name / "c" / "3"
    for content in (chunk.read_bytes()[:-1], b"\xff" * 64, b""):
        chunk.write_bytes(content)
        with pytest.raises(FormatError, match=rf"`X/{name}`, elements 384 to 512"):
            open_collection(store)[np.arange(40)]


def test_differences_that_are_not_compressed(new_store):
    X = sp.csr_matrix(np.random.default_rng(0).integers(0, 3, (40, 30)).astype("f4"))
    common = {"chunks": (32,), "compressors": None}
    store = new_store(
        X,
        indices=common | {"filters": [delta("<i4")]},
        data=common | {"filters": [as_type("<u2", "<f4")]},
    )
    collection = open_collection(store)
    for row in range(40):
        np.testing.assert_array_equal(collection[np.array([row])].X.toarray(), X[[row]].toarray())
    chunk = store / "X" / "indices" / "c" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-4])
    with pytest.raises(FormatError, match="`X/indices`, elements 32 to 64"):
        open_collection(store)[np.arange(40)]


def test_a_column_that_the_sum_leads_out_of_the_matrix_is_an_error(new_store):
    X = sp.csr_matrix(np.eye(8, dtype="f4"))
    store = new_store(X, indices={"chunks": (8,), "filters": [delta("<i4")]})
    array: Any = zarr.open_group(store)["X/indices"]
    array[:] = np.array([0, 1, 2, 3, 4, 5, 6, 8], "i4")
    with pytest.raises(FormatError, match="a column index outside of the matrix"):
        open_collection(store)[np.arange(8)]
