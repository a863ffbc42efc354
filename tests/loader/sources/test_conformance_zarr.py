"""Zarr stores of both formats pass the suite for sources."""

from dataclasses import dataclass
from typing import Any, Literal

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.sources.suites import Suite
from tests.loader.sources.zarr_cells import as_type, delta, quiet, write_cells
from tests.loader.zarr_stores import in_this_thread
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from cellfeed import open_collection
from cellfeed.testing import StoredCase

pytestmark = quiet

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
    "zstd with checksum": [ZstdCodec(checksum=True)],
    "gzip": [GzipCodec()],
    "crc32c": [Crc32cCodec()],
    "zstd, crc32c": [ZstdCodec(), Crc32cCodec()],
    "blosc lz4, crc32c": [BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()],
    "crc32c, zstd": [Crc32cCodec(), ZstdCodec()],
}
CODECS = {2: V2_CODECS, 3: V3_CODECS}
SLOW = {"lz4", "bz2", "crc32c, zstd"}


@dataclass(frozen=True, kw_only=True)
class ZarrStorage:
    """How arrays lie in a store; ``chunks`` are those of X, or of the indices and the data."""

    zarr_format: Literal[2, 3] = 3
    codec: str = "none"
    chunks: tuple[int, int] = (7, 4)
    shard: int | None = None  # chunks of one, along each dimension
    index_location: Literal["start", "end"] = "end"
    separator: Literal[".", "/"] = "."
    empty_chunks: bool = True  # whether chunks that hold zeros alone are written
    narrow: str = ""  # dtype that counts are stored in; then columns are stored as differences

    def filters(self, case: StoredCase, name: str) -> list[Any]:
        n, dtype = self.zarr_format, case.index_dtype if name == "indices" else case.dtype
        if not self.narrow:
            return []
        if name == "indices" and dtype == "<i8":
            return [as_type("<u2", dtype, n), delta("<u2", n)]
        if name == "indices":
            return [delta(dtype, n)] if dtype in ("<u2", "<i4", "<u4") else []
        if case.values != "counts" or dtype not in ("<f4", "<f8", "<i4"):
            return []
        return [as_type(self.narrow, dtype, n), *[delta(self.narrow, n)] * (case.seed % 2)]

    def options(self, case: StoredCase, name: str, chunks: tuple[int, ...]) -> dict[str, Any]:
        """Return what zarr has to be told of an array."""
        names = "v2" if self.zarr_format == 2 else "default"
        options: dict[str, Any] = {
            "chunks": chunks,
            "compressors": CODECS[self.zarr_format][self.codec],
            "filters": self.filters(case, name),
            "chunk_key_encoding": {"name": names, "separator": self.separator},
            # Where what is stored was never written, nobody can tell zeros from a lost file, but
            # of the column indices of an only gene.
            "config": {
                "write_empty_chunks": self.empty_chunks
                or name == "data"
                or (name == "indices" and case.n_vars > 1)
            },
        }
        if self.shard:
            shape = tuple(n * self.shard for n in chunks)
            options["shards"] = {"shape": shape, "index_location": self.index_location}
        return options


@st.composite
def storages(draw: st.DrawFn) -> ZarrStorage:
    zarr_format = draw(st.sampled_from([3, 3, 2]))
    shard = draw(st.none() | st.integers(1, 4)) if zarr_format == 3 else None
    length = st.integers(1 if shard else 3, 40)  # else each is a file
    return ZarrStorage(
        zarr_format=zarr_format,  # type: ignore[arg-type]
        codec=draw(st.sampled_from(list(CODECS[zarr_format]))),
        chunks=draw(st.tuples(length, length)),
        shard=shard,
        index_location=draw(st.sampled_from(["end", "start"])),
        separator=draw(st.sampled_from([".", "/"])),
        empty_chunks=draw(st.booleans()),
        narrow=draw(st.sampled_from(["", "", "|u1", "<u2", "<i2"])),
    )


class TestZarr(Suite):
    suffix = ".zarr"
    dtypes = (*Suite.dtypes, "|b1", "<f2")
    index_dtypes = ("<i4", "<i8", "|u1", "<u2", "<u4", "<u8")
    elements = ("X", "X", "layers/counts", "raw/X")
    max_examples = 12

    def storages(self, layout, dtype):
        return storages()

    def test_epochs(self, write):
        """Fewer cases, since what an epoch adds to rows is the same for all stores."""
        self.max_examples = min(self.max_examples, 6)
        super().test_epochs(write)

    def is_decoded_here(self, case: StoredCase) -> bool | None:
        if case.row_lengths.sum() == 0 or (case.layout == "csr" and case.dtype == "<f2"):
            return None
        if case.layout == "csr" and not case.storage.empty_chunks:
            return None
        return case.storage.codec not in SLOW

    def stored(self, path, case):
        return write_store(path, case)


def write_store(path, case):
    storage, rows = case.storage, case.storage.chunks
    chunks = {"X": rows, "indices": rows[:1], "data": rows[1:]}
    write_cells(
        path,
        case.dense if case.layout == "dense" else case,
        zarr_format=storage.zarr_format,
        element=case.element,
        obs=case.obs,
        var=case.var,
        indptr={"dtype": case.indptr.dtype.newbyteorder("=")} if case.layout == "csr" else {},
        **{name: storage.options(case, name, each) for name, each in chunks.items()},
    )
    parts = {"": "dense"} if case.layout == "dense" else {"/indices": "indices", "/data": "data"}
    with in_this_thread():
        root = zarr.open_group(path, mode="r")
        for name, part in parts.items():  # the oracle is right
            array: Any = root[f"{case.element}{name}"]
            np.testing.assert_array_equal(array[...], getattr(case, part))
    return path


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize(
    ("zarr_format", "codec"), [(each, codec) for each in CODECS for codec in CODECS[each]]
)
def test_every_codec(tmp_path, layout, zarr_format, codec):
    for shard in (None, 3)[: zarr_format - 1]:
        storage = ZarrStorage(zarr_format=zarr_format, codec=codec, shard=shard)
        case = StoredCase(layout=layout, n_rows=13, n_vars=9, storage=storage)
        collection = open_collection(write_store(tmp_path / f"{shard}.zarr", case))
        assert np.array_equal(dense(collection[::-1].X), case.in_memory()[::-1])
        assert collection.describe()["is_fast"].tolist() == [codec not in SLOW]
