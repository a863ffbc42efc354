"""Chunks that are decompressed as far as they are wanted: right bytes, and what each mode tells."""

import zlib
from typing import Any

import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.decode.test_chunks import chunked, read
from tests.loader.fuzzing import MemoryFile, lzf_chunk

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    ReadOptions,
    open_collection,
)
from cellfeed.decode._kernels._codecs import BLOSC, GZIP, LZ4, LZF, ZLIB, ZSTD
from cellfeed.sources import ChunkedArray, ChunkTable

SECOND = np.random.default_rng(1)


def counts(n: int) -> np.ndarray:
    """Return numbers as they are in data of cells, of which some cannot be compressed."""
    rng = np.random.default_rng(n)
    values = rng.geometric(0.6, n).astype(np.float32)
    values[n // 3 : n // 2] = rng.random(n // 2 - n // 3)
    return values


def deflated(values: np.ndarray, *pieces: tuple[int, int, int], wbits: int = 15) -> bytes:
    """Compress pieces of values, as many, at a level, by a strategy, into blocks of a stream."""
    content, stored, begin = values.tobytes(), b"", 0
    for n, level, strategy in (*pieces, (len(values), 6, zlib.Z_DEFAULT_STRATEGY)):
        raw = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
        stop = min(len(content), begin + n * values.itemsize)
        is_last = stop == len(content)
        stored += raw.compress(content[begin:stop])
        stored += raw.flush(zlib.Z_FINISH if is_last else zlib.Z_FULL_FLUSH)
        begin = stop
        if is_last:
            break
    if wbits == 15:
        return b"\x78\x9c" + stored + zlib.adler32(content).to_bytes(4, "big")
    header = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
    end = zlib.crc32(content).to_bytes(4, "little") + len(content).to_bytes(4, "little")
    return header + stored + end


def array_of(stored: bytes, n: int, codec: int, dtype: Any = np.float32) -> ChunkedArray:
    """Return an array of one chunk."""
    locations = ChunkTable(np.zeros(1, np.int64), np.array([len(stored)]), np.zeros(1, np.uint8))
    values, file = np.empty(n, dtype), MemoryFile(stored)
    array: ChunkedArray = chunked(values, n, locations, file, codec=codec)
    return array


def head(array: ChunkedArray, n: int, verify: Any = "never") -> tuple[np.ndarray, int]:
    """Read the first elements, and return how many bytes were decompressed for them."""
    return of_ranges(array, [(0, n)], verify)


def of_ranges(
    array: ChunkedArray, bounds: list[tuple[int, int]], verify: Any = "never"
) -> tuple[np.ndarray, int]:
    """Read ranges of elements, and return how many bytes were decompressed for them."""
    found, done = read(array, bounds, verify=verify)
    return found, done.n_decompressed


BLOCKS = {"stored": (0, zlib.Z_DEFAULT_STRATEGY), "fixed": (6, zlib.Z_FIXED)}
BLOCKS |= {"dynamic": (6, zlib.Z_DEFAULT_STRATEGY), "literals": (6, zlib.Z_HUFFMAN_ONLY)}
BLOCKS |= {"runs": (6, zlib.Z_RLE)}


class TestDeflate:
    @pytest.mark.parametrize("wbits", [15, 31])
    @pytest.mark.parametrize("kind", BLOCKS)
    def test_every_cut_of_every_kind_of_block(self, kind, wbits):
        values = counts(500)
        stored = deflated(values, (len(values), *BLOCKS[kind]), wbits=wbits)
        codec = ZLIB if wbits == 15 else GZIP
        assert zlib.decompress(stored, wbits) == values.tobytes()
        array = array_of(stored, len(values), codec)
        n_decompressed = []
        for n in range(1, len(values) + 1):
            found, n_bytes = head(array, n)
            assert np.array_equal(found, values[:n])
            n_decompressed.append(n_bytes)
        # Not so of stored blocks: nothing is written of one that does not fit.
        if kind != "stored":
            assert n_decompressed[0] < 400
            assert n_decompressed == sorted(n_decompressed)
        assert n_decompressed[-1] == values.nbytes

    @given(
        st.lists(
            st.tuples(st.integers(1, 3000), st.sampled_from(sorted(BLOCKS))), min_size=1, max_size=6
        ),
        st.sampled_from([np.uint8, np.float32, np.int64]),
        st.data(),
    )
    def test_blocks_of_all_kinds_in_one_stream(self, pieces, dtype, data):
        values = counts(sum(n for n, _ in pieces)).astype(dtype)
        stored = deflated(values, *((n, *BLOCKS[kind]) for n, kind in pieces))
        array = array_of(stored, len(values), ZLIB, dtype)
        for n in data.draw(st.lists(st.integers(1, len(values)), min_size=1, max_size=8)):
            found, n_bytes = head(array, n)
            assert np.array_equal(found, values[:n])
            assert n * array.dtype.itemsize <= n_bytes <= values.nbytes

    @pytest.mark.parametrize("kind", ["stored", "dynamic"])
    def test_what_looks_like_the_mark_of_an_end_is_decompressed_whole(self, kind):
        mark = np.frombuffer(np.uint64(0x9E3779B97F4A7C15).tobytes(), np.uint32)
        values = np.tile(mark, 500)
        array = array_of(deflated(values, (1000, *BLOCKS[kind])), 1000, ZLIB, np.uint32)
        found, n_bytes = head(array, 100)
        assert np.array_equal(found, values[:100])
        assert n_bytes == values.nbytes


LARGE = counts(200_000)  # of several blocks of zstd, and of blosc

OTHERS = {
    "zstd": (ZSTD, lambda: numcodecs.Zstd(1).encode(LARGE)),
    "zstd, checksum": (ZSTD, lambda: numcodecs.Zstd(1, checksum=True).encode(LARGE)),
    "lz4": (LZ4, lambda: bytes(numcodecs.LZ4().encode(LARGE))[4:]),  # without a header
    "lzf": (LZF, lambda: lzf_chunk(LARGE)),
    "blosc lz4": (BLOSC, lambda: numcodecs.Blosc("lz4", blocksize=1 << 14).encode(LARGE)),
}


class TestOtherCodecs:
    @pytest.mark.parametrize("name", OTHERS)
    def test_heads_are_right_and_less_is_decompressed(self, name):
        codec, encode = OTHERS[name]
        array = array_of(bytes(encode()), len(LARGE), codec)
        cuts = [1, 4095, 4096, 4097, 33_000, len(LARGE) - 1, len(LARGE)]
        for n in [*cuts, *SECOND.integers(1, len(LARGE), 20).tolist()]:
            found, n_bytes = head(array, n)
            assert np.array_equal(found, LARGE[:n])
            assert n * 4 <= n_bytes <= LARGE.nbytes
        assert head(array, 4096)[1] < LARGE.nbytes / 4
        assert head(array, 4096, "always")[1] == LARGE.nbytes


def blosc_chunk(data: Any, values: np.ndarray, codecs: list[str]) -> bytes:
    """Return values as a chunk of any blosc."""
    options = data.draw(
        st.fixed_dictionaries(
            {
                "cname": st.sampled_from(codecs),
                "shuffle": st.integers(0, 2),
                "clevel": st.integers(0, 9),
                "blocksize": st.sampled_from([0, 128, 1000, 4096, 1 << 15]),
            }
        )
    )
    return bytes(numcodecs.Blosc(**options).encode(values))


class TestBlosc:
    @given(
        st.sampled_from([np.uint8, np.uint16, np.float32, np.int64]),
        st.integers(1, 30_000),
        st.data(),
    )
    def test_ranges_within_chunks(self, dtype, n, data):
        values = counts(n).astype(dtype)
        codecs = ["lz4", "lz4hc", "zstd", "blosclz"]
        array = array_of(blosc_chunk(data, values, codecs), n, BLOSC, dtype)
        cuts = sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=7)))
        bounds = list(zip(cuts[:-1:2], cuts[1::2], strict=False))
        expected = np.concatenate([values[start:stop] for start, stop in bounds])
        for verify in ("never", "first", "first", "always"):
            found, n_bytes = of_ranges(array, bounds, verify)
            assert np.array_equal(found, expected)
            assert n_bytes <= values.nbytes
        assert n_bytes == values.nbytes  # always

    def test_blocks_before_a_range_are_not_decompressed(self):
        array = array_of(bytes(numcodecs.Blosc("lz4").encode(LARGE)), len(LARGE), BLOSC)
        found, n_bytes = of_ranges(array, [(len(LARGE) - 10, len(LARGE))])
        assert np.array_equal(found, LARGE[-10:])
        assert n_bytes < LARGE.nbytes

    @given(st.sampled_from([np.uint8, np.uint16, np.float32]), st.integers(1, 9000), st.data())
    def test_damage_is_told_where_blosc_itself_tells_it(self, dtype, n, data):
        values = counts(n).astype(dtype)
        stored = bytearray(blosc_chunk(data, values, ["lz4", "lz4hc"]))
        for _ in range(data.draw(st.integers(1, 3))):
            where = data.draw(st.integers(16, len(stored) - 1))  # behind the header
            stored[where] ^= 1 << data.draw(st.integers(0, 7))
        array = array_of(bytes(stored), n, BLOSC, dtype)
        try:
            expected = np.frombuffer(numcodecs.Blosc().decode(bytes(stored)), dtype)
        except RuntimeError:
            expected = None
        for verify in ("always", "first"):
            if expected is None:
                with pytest.raises(FormatError, match="decompress"):
                    of_ranges(array, [(n // 2, n)], verify)
            else:
                found, _ = of_ranges(array, [(n // 2, n)], verify)
                assert found.tobytes() == expected[n // 2 :].tobytes()


class TestModes:
    def stream(self) -> tuple[np.ndarray, bytearray]:
        values = counts(3000)
        return values, bytearray(deflated(values, (3000, *BLOCKS["dynamic"])))

    def test_first_looks_at_each_chunk_once(self):
        values, stored = self.stream()
        array = array_of(bytes(stored), 3000, ZLIB)
        sizes = [head(array, n, "first")[1] for n in (300, 300, 3000, 300)]
        assert sizes[0] == sizes[2] == values.nbytes
        assert sizes[1] == sizes[3] < 300 * 4 + 400
        assert head(array, 300, "always")[1] == values.nbytes

    @pytest.mark.parametrize("where", [-1, -4, -500])
    def test_damage_behind_the_head(self, where):
        values, stored = self.stream()
        stored[where] ^= 0x10
        for verify in ("first", "always"):
            array = array_of(bytes(stored), 3000, ZLIB)
            for _ in range(2):  # what failed once has not been checked
                with pytest.raises(FormatError, match="decompress"):
                    head(array, 300, verify)
        found, _ = head(array_of(bytes(stored), 3000, ZLIB), 300, "never")
        assert np.array_equal(found, values[:300])

    def test_damage_after_the_first_time(self):
        values, stored = self.stream()
        array = array_of(bytes(stored), 3000, ZLIB)
        head(array, 300, "first")
        stored[-1] ^= 0x10
        assert isinstance(array.files, MemoryFile)
        array.files.write(bytes(stored))
        assert np.array_equal(head(array, 300, "first")[0], values[:300])
        with pytest.raises(FormatError, match="decompress"):
            head(array, 300, "always")

    @pytest.mark.parametrize("verify", ["first", "always"])
    def test_a_stream_that_is_short_or_of_another_size(self, verify):
        _, stored = self.stream()
        for n_stored, n in ((len(stored), 2900), (len(stored), 3100), (len(stored) // 2, 3000)):
            array = array_of(bytes(stored[:n_stored]), n, ZLIB)
            for n_wanted in (300, 2800):
                with pytest.raises(FormatError, match="decompress"):
                    head(array, n_wanted, verify)


@pytest.fixture
def path(write_h5ad, replace):
    """Return the path of sparse rows in small chunks of gzip."""
    X = sp.random(600, 40, 0.4, "csr", np.float32, np.random.default_rng(0))

    def edit(file):
        for name in ("X/indices", "X/data"):
            replace(file, name, file[name][:], chunks=(600,), compression="gzip")

    return write_h5ad(X, edit=edit)


class TestDataset:
    def test_chunks_are_remembered_from_epoch_to_epoch(self, path):
        dataset = CellDataset(
            open_collection(path), BlockShuffling(4), 8, 4, seed=0, as_torch=False
        )
        decompressed = list[int]()
        for _ in range(3):
            dataset.set_epoch(0)
            before = dataset.statistics().bytes_decompressed
            for _ in dataset:
                pass
            decompressed.append(dataset.statistics().bytes_decompressed - before)
        assert decompressed[1] == decompressed[2] < decompressed[0]

    def test_another_word_is_refused(self):
        with pytest.raises(ParameterError, match="`verify` must be one of 'first', 'always'"):
            ReadOptions(verify="once")  # type: ignore[arg-type]
