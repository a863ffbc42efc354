"""Filters of numcodecs: what only zarr undoes, and damage; others are in the suite for zarr."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from tests.loader.matrices import dense
from tests.loader.sources.zarr_cells import as_type, delta, quiet
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.codecs.numcodecs import AsType, Delta

from cellfeed import BlockShuffling, CellDataset, FormatError, open_collection

pytestmark = quiet


@pytest.mark.filterwarnings("ignore:.* does not convert float32 to bool:UserWarning")
@pytest.mark.parametrize("out", ["float32", "float64", "int8", "uint8", "int32", "bool"])
def test_values_are_cast_as_if_they_were_wide(new_store, out):
    X = sp.csr_matrix(np.random.default_rng(0).integers(0, 300, (30, 20)).astype("f4"))
    narrow = {"chunks": (64,), "filters": [as_type("<u2", "<f4")]}
    rows = list[Any]()
    for options in (narrow, {"chunks": (64,)}):
        collection = open_collection(new_store(X, data=options))
        dataset = CellDataset(collection, BlockShuffling(4), batch_size=5, dtype=out, seed=1)
        rows.append(np.concatenate([dense(minibatch.X) for minibatch in dataset]))
    np.testing.assert_array_equal(*rows)


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


@pytest.mark.parametrize("compressor", [BloscCodec, ZstdCodec])
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
