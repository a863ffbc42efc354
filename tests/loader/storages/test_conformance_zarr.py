"""Zarr stores of both formats pass the suite for sources."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import anndata as ad
import numcodecs
import numpy as np
import pytest
import zarr
from anndata.io import write_elem
from hypothesis import strategies as st
from tests.loader.zarr_stores import written_at_once
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from cellfeed.testing import SourceConformance, StoredCase

pytestmark = pytest.mark.filterwarnings(
    # What zarr says when these stores are written, also where workers are spawned.
    "ignore:.*does not have a Zarr V3 specification",
    "ignore:zarr v3 autosharding will be the default",
    "ignore:Consolidated metadata is currently not part",
    "ignore:Writing zarr v2 data will no longer be the default",
    "ignore:Numcodecs codecs are not in the Zarr version 3 specification",
)

V2_CODECS: dict[str, Any] = {
    "none": None,
    "blosc lz4": numcodecs.Blosc(cname="lz4"),
    "blosc zstd": numcodecs.Blosc(cname="zstd", shuffle=numcodecs.Blosc.BITSHUFFLE),
    "zstd": numcodecs.Zstd(),
    "zlib": numcodecs.Zlib(),
    "gzip": numcodecs.GZip(),
    "lz4": numcodecs.LZ4(),
    "bz2": numcodecs.BZ2(),
}
V3_CODECS: dict[str, Any] = {
    "none": [],
    "blosc lz4": [BloscCodec(cname="lz4", shuffle="shuffle")],
    "blosc zstd": [BloscCodec(cname="zstd", shuffle="bitshuffle")],
    "zstd": [ZstdCodec()],
    "gzip": [GzipCodec()],
    "with checksum": [ZstdCodec(), Crc32cCodec()],
}
SLOW = {"bz2", "with checksum"}


@dataclass(frozen=True, kw_only=True)
class ZarrStorage:
    """How arrays lie in a store; ``chunks`` are those of X, or of the indices and the data."""

    zarr_format: Literal[2, 3] = 3
    codec: str = "none"
    chunks: tuple[int, int] = (7, 4)
    shard: int | None = None  # chunks of one, along each dimension
    separator: Literal[".", "/"] = "."
    empty_chunks: bool = True  # whether chunks that hold zeros alone are written


@st.composite
def storages(draw: st.DrawFn) -> ZarrStorage:
    zarr_format = draw(st.sampled_from([3, 3, 2]))
    return ZarrStorage(
        zarr_format=zarr_format,  # type: ignore[arg-type]
        codec=draw(st.sampled_from(list(V2_CODECS if zarr_format == 2 else V3_CODECS))),
        chunks=draw(st.tuples(st.integers(1, 40), st.integers(1, 40))),
        shard=draw(st.none() | st.integers(1, 4)) if zarr_format == 3 else None,
        separator=draw(st.sampled_from([".", "/"])),
        empty_chunks=draw(st.booleans()),
    )


class TestZarr(SourceConformance):
    dtypes = (*SourceConformance.dtypes, "|b1", "<f2")
    index_dtypes = ("<i4", "<i8", "|u1", "<u2", "<u4", "<u8")
    elements = ("X", "X", "layers/counts", "raw/X")
    max_examples = 20

    def storages(self, layout, dtype):
        return storages()

    def is_decoded_here(self, case: StoredCase) -> bool | None:
        if case.row_lengths.sum() == 0 or (case.layout == "csr" and case.dtype == "<f2"):
            return None
        if case.layout == "csr" and not case.storage.empty_chunks:
            return None
        return case.storage.codec not in SLOW

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path = tmp_path / f"{next(numbers):05}.zarr"
            write_store(path, case)
            return path

        return write


def write_store(path, case):
    with written_at_once(path) as memory:
        write_case(zarr.create_group(memory, zarr_format=case.storage.zarr_format), case)


def write_case(root, case):
    storage = case.storage
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    with ad.settings.override(allow_write_nullable_strings=True):
        write_elem(root, "obs", case.obs)
        write_elem(root, "var", case.var)
        if case.element == "raw/X":
            write_elem(root.require_group("raw"), "var", case.var)
    if case.layout == "dense":
        create(root, case.element, case.dense, storage.chunks, storage)
        root[case.element].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        return
    group = root.create_group(case.element)
    group.attrs.update(
        {
            "encoding-type": "csr_matrix",
            "encoding-version": "0.1.0",
            "shape": [case.n_rows, case.n_vars],
        }
    )
    group.create_array("indptr", data=case.indptr.astype(case.indptr.dtype.newbyteorder("=")))
    for name, rows in zip(("indices", "data"), storage.chunks, strict=True):
        create(group, name, getattr(case, name), (rows,), storage)


def create(group, name, values, chunks, storage):
    options: dict[str, Any] = {}
    if storage.zarr_format == 2:
        options["compressors"] = V2_CODECS[storage.codec]
        options["chunk_key_encoding"] = {"name": "v2", "separator": storage.separator}
    else:
        options["compressors"] = V3_CODECS[storage.codec]
        options["chunk_key_encoding"] = {"name": "default", "separator": storage.separator}
        if storage.shard:
            options["shards"] = tuple(n * storage.shard for n in chunks)
    # Where stored values were never written, nobody can tell zeros from a lost file.
    writes_zeros = storage.empty_chunks or name == "data"
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=chunks,
        config={"write_empty_chunks": writes_zeros},
        **options,
    )
    if values.size:
        array[...] = values
    np.testing.assert_array_equal(array[...], values)
