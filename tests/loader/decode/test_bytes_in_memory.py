"""Chunks whose bytes are in memory are decoded there, by every codec, and damage is named."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr
from numcodecs import LZ4, Blosc, GZip, Zlib, Zstd
from zarr.codecs import BytesCodec, ShardingCodec, ZstdCodec

from cellfeed import FormatError
from cellfeed._bytes._tables import CachedTables
from cellfeed._decode import (
    ChunkReads,
    Decoder,
    ZarrFiles,
    hdf5_array,
    hdf5_tables,
    zarr_array,
    zarr_layout,
)
from cellfeed.sources import ByteStore, Location

VALUES = np.random.default_rng(0).poisson(2, 5000).astype(np.int32)
HDF5 = {
    "none": {},
    "shuffle": {"shuffle": True},
    "gzip": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc(cname="lz4")),
}
ZARR_2 = {
    "none": None,
    "zlib": Zlib(),
    "gzip": GZip(),
    "zstd": Zstd(),
    "blosc": Blosc(),
    "lz4": LZ4(),
}


class Objects(ByteStore):
    """Objects in memory, of which ranges are asked; counts what is."""

    def __init__(self, contents):
        self.contents = {file: content for file, content in contents.items() if content is not None}
        self.asked = []

    def location_of(self, file):
        return Location(f"memory://bucket/{file}")

    def sizes(self, files):
        return np.array(
            [len(self.contents.get(file, ())) or -1 for file in files.tolist()], np.int64
        )

    def read_ranges(self, files, offsets, sizes):
        self.asked.append([*zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)])
        return [
            memoryview(self.contents[file])[first : first + n] if file in self.contents else None
            for file, first, n in self.asked[-1]
        ]


def no_tables(path):
    return CachedTables(str(path), "x", lambda: None)


def hdf5(path, options, chunks=(300,)):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=chunks, **options)
    store = Objects({0: path.read_bytes()})
    with h5py.File(path) as file:
        tables = hdf5_tables(file["x"], lambda: no_tables(path))
        assert tables is not None
        array = hdf5_array(tables, "x", store, lost_is_zero=False)
    path.unlink()
    return array, store


def zarr_of(path, **options):
    array = zarr.create_array(path, data=VALUES, chunks=(300,), **options)
    layout: Any = zarr_layout(array.metadata.to_dict())
    names = layout.file_names(np.arange(np.prod(layout.file_grid), dtype=np.int64)).tolist()
    files = {k: path / os.fsdecode(name) for k, name in enumerate(names)}
    store = Objects({k: file.read_bytes() if file.exists() else None for k, file in files.items()})
    return zarr_array(layout, store, "x", no_tables(path), lost_is_zero=False), store


def read(array, ranges, n_threads=2):
    starts, stops = np.array(ranges, np.int64).T
    counts = np.ascontiguousarray(stops - starts)
    out = np.zeros(counts.sum(), array.dtype)
    places = (np.cumsum(counts) - counts) * out.itemsize
    reads = array.reads_of_ranges(np.ascontiguousarray(starts), counts, places, out.dtype)
    reads.readahead()
    with ThreadPoolExecutor(n_threads) as threads:
        done = reads.run(np.array([out.ctypes.data]), Decoder(threads, n_threads))
    return out, done


RANGES = [(10, 20), (290, 310), (900, 905), (3000, 3001), (4990, 5000)]
EXPECTED = np.concatenate([VALUES[slice(*each)] for each in RANGES])
CHUNKS = [0, 1, 3, 10, 16]


@pytest.mark.parametrize("codec", HDF5)
def test_hdf5(tmp_path, codec):
    array, store = hdf5(tmp_path / "x.h5", HDF5[codec])
    out, done = read(array, RANGES)
    assert np.array_equal(out, EXPECTED)
    located = array.locations.locate(np.array(CHUNKS, np.int64))
    needed = [*zip([0] * 5, located.offsets.tolist(), located.sizes.tolist(), strict=True)]
    if codec == "none":  # which are cut to what is wanted of them
        wanted = [(10, 20), (290, 300), (0, 10), (0, 5), (0, 1), (190, 200)]
        per_chunk = [wanted[0:2], wanted[2:3], *([each] for each in wanted[3:])]
        needed = [
            (0, first + 4 * parts[0][0], 4 * (parts[-1][1] - parts[0][0]))
            for (_, first, _), parts in zip(needed, per_chunk, strict=True)
        ]
    assert store.asked == [needed]  # one request for all, of each chunk's bytes once and no others
    assert (done.n_chunks, done.n_bytes) == (5, sum(n for _, _, n in needed))


@pytest.mark.parametrize("codec", ZARR_2)
def test_zarr_with_a_file_for_each_chunk(tmp_path, codec):
    array, store = zarr_of(tmp_path / "x", zarr_format=2, compressors=ZARR_2[codec])
    out, done = read(array, RANGES)
    assert np.array_equal(out, EXPECTED)
    assert [file for file, _, _ in store.asked[0]] == CHUNKS
    if codec != "none":
        assert done.n_bytes == sum(len(store.contents[file]) for file in CHUNKS)


@pytest.mark.parametrize("checksum", [False, True])
def test_zarr_shards(tmp_path, checksum):
    index = {"index_codecs": None} if checksum else {"index_codecs": [BytesCodec()]}
    codec = ShardingCodec(chunk_shape=(100,), codecs=[BytesCodec(), ZstdCodec()])
    if not checksum:
        codec = ShardingCodec(chunk_shape=(100,), codecs=[BytesCodec(), ZstdCodec()], **index)
    array, store = zarr_of(tmp_path / "x", serializer=codec, compressors=None, filters=None)
    assert len(store.asked) == 17  # the index of each shard, once
    out, _ = read(array, RANGES)
    assert np.array_equal(out, EXPECTED)
    assert len(store.asked) == 18


def test_many_arrays_of_one_store_are_asked_for_together(tmp_path):
    array, store = hdf5(tmp_path / "x.h5", HDF5["gzip"])
    out = np.zeros((2, 50), np.int32)
    begin, count = np.array([100], np.int64), np.array([50], np.int64)
    reads = ChunkReads.concatenate(
        [
            array.reads_of_ranges(begin, count, np.array([place]), out.dtype)
            for place in (0, out[0].nbytes)
        ]
    )
    reads.run(np.array([out.ctypes.data]))
    assert np.array_equal(out, [VALUES[100:150]] * 2)
    assert len(store.asked) == 1


class TestReadahead:
    def test_a_store_expects_what_it_is_then_asked_for(self, tmp_path):
        array, store = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        expected = []

        def expect(files, offsets, sizes):
            expected.append([*zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)])
            return expected

        store.expect = expect
        begin, count = np.array([100, 2000], np.int64), np.array([500, 50], np.int64)
        out = np.zeros(1100, np.int32)
        parts = [
            array.reads_of_ranges(begin, count, np.array([place, place + 2000]), out.dtype)
            for place in (0, 2200)
        ]
        reads = ChunkReads.concatenate(parts)
        assert reads.readahead() == [expected]
        reads.run(np.array([out.ctypes.data]))
        assert store.asked == expected  # of both arrays at once
        assert reads.requested_bytes == sum(size for _, _, size in expected[0])

    def test_most_stores_prefetch_nothing(self, tmp_path):
        array, _ = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        begin, count, place = np.array([[0], [300], [0]], np.int64)
        reads = array.reads_of_ranges(begin, count, place, array.dtype)
        assert reads.readahead() == []

    def test_files_are_not_requested(self, tmp_path):
        array = zarr.create_array(tmp_path / "x", data=VALUES, chunks=(300,))
        layout: Any = zarr_layout(array.metadata.to_dict())
        files = ZarrFiles(tmp_path / "x", layout, lambda: None)
        there = zarr_array(layout, files, "x", no_tables(tmp_path), lost_is_zero=False)
        begin, count, place = np.array([[0], [300], [0]], np.int64)
        reads = there.reads_of_ranges(begin, count, place, there.dtype)
        assert (reads.are_requested, reads.requested_bytes, reads.readahead()) == (False, 0, [])


def test_bytes_in_memory_beside_bytes_in_files(tmp_path):
    """Also where an address happens to follow an offset, they are not read as one."""
    (tmp_path / "z").mkdir()
    inside, _ = hdf5(tmp_path / "x.h5", HDF5["gzip"])
    zarr_array_ = zarr.create_array(tmp_path / "z" / "y", data=VALUES, chunks=(300,))
    layout: Any = zarr_layout(zarr_array_.metadata.to_dict())
    files = ZarrFiles(tmp_path / "z" / "y", layout, lambda: None)
    beside = zarr_array(layout, files, "y", no_tables(tmp_path), lost_is_zero=False)
    out = np.zeros((2, 1000), np.int32)
    begin, count = np.array([0], np.int64), np.array([1000], np.int64)
    parts = [
        each.reads_of_ranges(begin, count, np.array([place]), out.dtype)
        for each, place in ((inside, 0), (beside, out[0].nbytes))
    ]
    for order in (parts, parts[::-1]):
        out[...] = 0
        ChunkReads.concatenate(order).run(np.array([out.ctypes.data]))
        assert np.array_equal(out, [VALUES[:1000]] * 2)


class TestDamage:
    """Each is one line with the location and, where it is known, the byte range."""

    WHERE = r"^memory://bucket/0: `x`, elements 300 to 600 \(bytes \d+ to \d+\): "

    @pytest.mark.parametrize("codec", HDF5)
    def test_an_object_that_ends_too_early(self, tmp_path, codec):
        array, store = hdf5(tmp_path / "x.h5", HDF5[codec])
        first = int(array.locations.locate(np.array([1], np.int64)).offsets[0])
        store.contents[0] = store.contents[0][: first + 10]
        with pytest.raises(FormatError, match=self.WHERE + "are beyond the end of the file; "):
            read(array, [(300, 600)])

    @pytest.mark.parametrize("codec", ["gzip", "zstd", "blosc", "lzf"])
    def test_an_object_with_other_bytes(self, tmp_path, codec):
        array, store = hdf5(tmp_path / "x.h5", HDF5[codec])
        located = array.locations.locate(np.array([1], np.int64))
        first, size = int(located.offsets[0]), int(located.sizes[0])
        damaged = bytearray(store.contents[0])
        damaged[first : first + size] = b"\xff" * size
        store.contents[0] = bytes(damaged)
        with pytest.raises(
            FormatError, match=self.WHERE + "(cannot be decompressed|decompress to)"
        ):
            read(array, [(300, 600)])
        assert np.array_equal(read(array, [(0, 300)])[0], VALUES[:300])

    def test_an_object_that_is_gone(self, tmp_path):
        array, store = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        del store.contents[0]
        with pytest.raises(FormatError, match=self.WHERE + "are missing; "):
            read(array, [(300, 600)])

    def test_an_object_of_one_chunk_that_ends_too_early(self, tmp_path):
        array, store = zarr_of(tmp_path / "x", zarr_format=2, compressors=Zstd())
        store.contents[1] = store.contents[1][:-5]
        with pytest.raises(FormatError, match=r"^memory://bucket/1: `x`, elements 300 to 600: "):
            read(array, [(300, 600)])

    @pytest.mark.parametrize("by", [-4, 4])
    def test_an_object_of_one_chunk_as_it_is_of_another_size(self, tmp_path, by):
        array, store = zarr_of(tmp_path / "x", zarr_format=2, compressors=None)
        store.contents[1] = (store.contents[1] + bytes(8))[: 1200 + by]
        with pytest.raises(FormatError, match=r"elements 300 to 600 \(.*\): decompress to another"):
            read(array, [(310, 320)])

    def test_a_store_that_gives_more_than_was_asked_for(self, tmp_path):
        array, store = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        store.read_ranges = lambda files, offsets, sizes: [bytes(n + 1) for n in sizes.tolist()]
        with pytest.raises(ValueError, match=r"^\d+ bytes were read, but \d+ expected"):
            read(array, [(300, 600)])

    def test_a_shard_whose_index_is_cut_off(self, tmp_path):
        codec = ShardingCodec(chunk_shape=(100,), codecs=[BytesCodec(), ZstdCodec()])

        class Short(Objects):
            def read_ranges(self, files, offsets, sizes):
                return [each[:-1] for each in super().read_ranges(files, offsets, sizes)]

        array = zarr.create_array(
            tmp_path / "x", data=VALUES, chunks=(300,), serializer=codec, compressors=None,
            filters=None,
        )  # fmt: skip
        layout: Any = zarr_layout(array.metadata.to_dict())
        store = Short(dict.fromkeys(range(17), bytes(500)))
        with pytest.raises(
            FormatError, match=r"index of the shard \(bytes .*: the file ends before"
        ):
            zarr_array(layout, store, "x", no_tables(tmp_path), lost_is_zero=False)


def test_a_store_without_either(tmp_path):
    class Neither(ByteStore):
        def location_of(self, file):
            return Location("nowhere://")

        def sizes(self, files):
            return np.zeros(len(files), np.int64)

    with pytest.raises(NotImplementedError, match=r"^Neither must override `handles` or `read_ra"):
        Neither().read_ranges(*np.zeros((3, 1), np.int64))
