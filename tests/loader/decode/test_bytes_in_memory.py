"""Chunks whose bytes come to memory are decoded there as they arrive, and damage is named."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import Blosc, GZip, Zlib, Zstd
from tests.loader.decode.test_chunks import run
from zarr.codecs import BytesCodec, ShardingCodec, ZstdCodec

from cellfeed import FormatError
from cellfeed.bytes._store import FolderFiles
from cellfeed.bytes._tables import CachedTables
from cellfeed.decode import ChunkReads
from cellfeed.decode._hdf5 import hdf5_array, hdf5_tables
from cellfeed.decode._zarr import zarr_array, zarr_layout
from cellfeed.sources import Arrival, ByteStore, Location

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


def zarr_on_disk(path):
    array = zarr.create_array(path, data=VALUES, chunks=(300,))
    layout: Any = zarr_layout(array.metadata.to_dict())
    files = FolderFiles(path, layout.file_names, 0, stay_open=False)
    return zarr_array(layout, files, "x", no_tables(path), lost_is_zero=False)


def reads_of(array, ranges, place=0):
    """Return what reads ranges of elements to a place, one behind the other."""
    starts, stops = np.array(ranges, np.int64).T
    counts = np.ascontiguousarray(stops - starts)
    places = place + (np.cumsum(counts) - counts) * array.dtype.itemsize
    return array.reads_of_ranges(np.ascontiguousarray(starts), counts, places, array.dtype)


def read(array, ranges, num_threads=2):
    reads, out = reads_of(array, ranges), np.zeros(np.ptp(ranges, 1).sum(), array.dtype)
    reads.readahead()
    return out, run(reads, [out.ctypes.data], num_threads)


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
    index: Any = {} if checksum else {"index_codecs": [BytesCodec()]}
    codec = ShardingCodec(chunk_shape=(100,), codecs=[BytesCodec(), ZstdCodec()], **index)
    array, store = zarr_of(tmp_path / "x", serializer=codec, compressors=None, filters=None)
    assert len(store.asked) == 17  # the index of each shard, once
    out, _ = read(array, RANGES)
    assert np.array_equal(out, EXPECTED)
    assert len(store.asked) == 18


class TestTogether:
    """Arrays of one store are asked for together, and told of together before."""

    RANGES = ((100, 600), (2000, 2050))

    def test_one_request_for_many_arrays(self, tmp_path):
        array, store = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        expected = []

        def expect(files, offsets, sizes):
            expected.append([*zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)])
            return expected

        store.expect = expect
        out = np.zeros((2, 550), np.int32)
        parts = [reads_of(array, self.RANGES, place) for place in (0, out[0].nbytes)]
        reads = ChunkReads.concatenate(parts)
        assert reads.readahead() == [expected]
        reads.run(np.array([out.ctypes.data]))
        assert store.asked == expected
        assert len(expected) == 1
        assert reads.requested_bytes == sum(size for _, _, size in expected[0])
        assert np.array_equal(out, [np.r_[VALUES[100:600], VALUES[2000:2050]]] * 2)

    def test_nothing_is_requested_ahead_of_most_stores_and_of_files(self, tmp_path):
        array, _ = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        assert reads_of(array, self.RANGES).readahead() == []
        reads = reads_of(zarr_on_disk(tmp_path / "x"), self.RANGES)
        assert (reads.are_requested, reads.requested_bytes, reads.readahead()) == (False, 0, [])

    def test_bytes_in_memory_beside_bytes_in_files(self, tmp_path):
        """Also where an address happens to follow an offset, they are not read as one."""
        inside, _ = hdf5(tmp_path / "x.h5", HDF5["gzip"])
        out = np.zeros((2, 1000), np.int32)
        arrays = (inside, 0), (zarr_on_disk(tmp_path / "y"), out[0].nbytes)
        for order in (arrays, arrays[::-1]):
            out[...] = 0
            parts = [reads_of(array, [(0, 1000)], place) for array, place in order]
            ChunkReads.concatenate(parts).run(np.array([out.ctypes.data]))
            assert np.array_equal(out, [VALUES[:1000]] * 2)


def end_early(store, first, size):
    store.contents[0] = store.contents[0][: first + 10]


def change(store, first, size):
    damaged = bytearray(store.contents[0])
    damaged[first : first + size] = b"\xff" * size
    store.contents[0] = bytes(damaged)


def remove(store, first, size):
    del store.contents[0]


class Arriving(Objects):
    """Ranges arrive when a test lets them, each with those of its piece."""

    def __init__(self, contents, piece_of):
        super().__init__(contents)
        self.piece_of = np.array(piece_of)
        self.here = [Future[None]() for _ in range(max(piece_of) + 1)]

    def arrivals(self, files, offsets, sizes):
        assert len(files) == len(self.piece_of)
        return [
            Arrival(np.flatnonzero(self.piece_of == piece), here, self)
            for piece, here in enumerate(self.here)
            if (self.piece_of == piece).any()
        ]


@pytest.fixture(scope="module")
def array(new_folder):
    return hdf5(new_folder() / "x.h5", HDF5["gzip"])[0]


class TestArrivals:
    """In whatever order and pieces that is."""

    HEADS = tuple((first, first + 2) for first in range(0, 3000, 300))
    EXPECTED = VALUES[:3000].reshape(10, 300)[:, :2].ravel()

    def reads(self, array, piece_of):
        """Return a store, what reads two values of each of ten chunks, and where these go."""
        store = Arriving(array.files.contents, piece_of)
        reads = reads_of(replace(array, files=store), self.HEADS)
        return store, reads, np.full(20, -1, np.int32)

    @given(
        st.lists(st.integers(0, 4), min_size=10, max_size=10),
        st.permutations(range(5)),
        st.integers(0, 5),
    )
    def test_any_order(self, array, piece_of, order, n_before):
        store, reads, out = self.reads(array, piece_of)
        order = [piece for piece in order if piece < len(store.here)]

        def arrive(pieces):
            for piece in pieces:
                store.here[piece].set_result(None)
                time.sleep(0)

        arrive(order[:n_before])
        late = threading.Thread(target=arrive, args=(order[n_before:],))
        late.start()
        done = run(reads, [out.ctypes.data], num_threads=2)
        late.join()
        assert np.array_equal(out, self.EXPECTED)
        asked = [each for several in store.asked for each in several]
        assert done.n_chunks == len(asked) == len({*asked}) == 10
        assert done.n_bytes == sum(n for _, _, n in asked)

    def test_what_is_here_is_decoded_while_the_rest_is_awaited(self, array):
        store, reads, out = self.reads(array, [1] * 5 + [0] + [2] * 4)
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(reads.run, np.array([out.ctypes.data]))
            store.here[0].set_result(None)
            until = time.monotonic() + 600
            while out[10] == -1 and time.monotonic() < until:
                time.sleep(0.001)
            assert np.array_equal(out[10:12], self.EXPECTED[10:12])
            assert (np.delete(out, [10, 11]) == -1).all()
            assert not done.done()
            store.here[2].set_result(None)
            store.here[1].set_result(None)
            done.result()
        assert np.array_equal(out, self.EXPECTED)

    def test_damage_names_the_chunk_that_is_damaged(self, array):
        store, reads, out = self.reads(array, [*range(10)][::-1])
        for here in store.here:
            here.set_result(None)
        located = array.locations.locate(np.array([3], np.int64))
        change(store, int(located.offsets[0]) + 2, int(located.sizes[0]) - 2)
        with pytest.raises(FormatError, match=r"elements 900 to 1200 .* cannot be decompressed"):
            reads.run(np.array([out.ctypes.data]))


class TestDamage:
    """Each is one line with the location and, where it is known, the byte range."""

    WHERE = r"^memory://bucket/0: `x`, elements 300 to 600 \(bytes \d+ to \d+\): "

    @pytest.mark.parametrize(
        ("codec", "damage", "said"),
        [
            *((codec, end_early, "are beyond the end of the file; ") for codec in HDF5),
            *(
                (codec, change, "(cannot be decompressed|decompress to)")
                for codec in ("gzip", "zstd", "blosc", "lzf")
            ),
            ("gzip", remove, "are missing; "),
        ],
    )
    def test_of_objects_with_many_chunks(self, tmp_path, codec, damage, said):
        array, store = hdf5(tmp_path / "x.h5", HDF5[codec])
        located = array.locations.locate(np.array([1], np.int64))
        damage(store, int(located.offsets[0]), int(located.sizes[0]))
        with pytest.raises(FormatError, match=self.WHERE + said):
            read(array, [(300, 600)])
        if damage is change:
            assert np.array_equal(read(array, [(0, 300)])[0], VALUES[:300])

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
        said = r"index of the shard \(bytes .*: the file ends before"
        with pytest.raises(FormatError, match=said):
            zarr_array(layout, store, "x", no_tables(tmp_path), lost_is_zero=False)


def test_a_store_without_either(tmp_path):
    class Neither(ByteStore):
        def location_of(self, file):
            return Location("nowhere://")

        def sizes(self, files):
            return np.zeros(len(files), np.int64)

    with pytest.raises(NotImplementedError, match=r"^Neither must override `handles` or `read_ra"):
        Neither().read_ranges(*np.zeros((3, 1), np.int64))
