"""Plans, reads and kernels of chunks, each against NumPy or the library that it stands in for."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.loader.guarded import GuardedPool

from cellfeed import FormatError, ParameterError
from cellfeed.bytes._buffers import BufferPool, destination
from cellfeed.decode import ChunkReads, Counter, Decoder, Pieces, can_cast
from cellfeed.decode import _kernels as kernels
from cellfeed.decode._array import plan_ranges, plan_rows
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels import cast_address
from cellfeed.decode._kernels._codecs import STORED
from cellfeed.rows import lay_out
from cellfeed.sources import ByteStore, ChunkedArray, ChunkTable, Location

NUMBERS = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"]

# Starts and counts of ranges that ascend, some of them empty, some next to each other.
ascending_ranges = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20).map(
    lambda pairs: (
        np.cumsum([0, *(gap + n for gap, n in pairs)])[:-1] + [gap for gap, _ in pairs],
        np.array([n for _, n in pairs], np.int64),
    )
)


class FileOf(ByteStore):
    """A file with some content, as an array's files."""

    def __init__(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        self._path = path
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self):
        os.close(self.descriptor)

    def handles(self, files):
        return np.full(len(files), self.descriptor, np.int64), self

    def location_of(self, file):
        return Location.of(self._path)

    def sizes(self, files):
        return np.full(len(files), self._path.stat().st_size, np.int64)


def chunked(values, chunk, locations, files, name="x", codec=STORED):
    """Return an array whose chunks are stored as they are, or by a codec."""
    return ChunkedArray(
        name=name,
        shape=values.shape,
        dtype=values.dtype,
        chunk_shape=(chunk,),
        codec=codec,
        shuffled=False,
        locations=locations,
        files=files,
        lost_is_zero=True,
    )


@pytest.fixture
def stored(tmp_path):
    """Return a function that makes an array of chunks in a file, which are stored as they are."""

    def make(values, chunk, offsets, *, name="x"):
        content = bytearray(max(offsets) + chunk * values.itemsize)
        for k, offset in enumerate(offsets):
            if offset >= 0:
                part = values[k * chunk : (k + 1) * chunk].tobytes()
                content[offset : offset + len(part)] = part
        n_chunks = -(-len(values) // chunk)
        sizes = np.full(n_chunks, chunk * values.itemsize, np.int64)
        table = ChunkTable(np.array(offsets, np.int64), sizes, np.zeros(n_chunks, np.uint8))
        file = FileOf(tmp_path / f"{name}.bin", bytes(content))
        return chunked(values, chunk, table, file, name)

    return make


def read(array, ranges, dtype=None, num_threads=1, index_limit=-1, verify="first"):
    """Read ranges ``[start, stop)`` into guarded memory; return the elements and what was done."""
    dtype = np.dtype(dtype or array.dtype)
    starts = np.array([start for start, _ in ranges], np.int64)
    counts = np.array([stop - start for start, stop in ranges], np.int64)
    places = (np.cumsum(counts) - counts) * dtype.itemsize
    pool = GuardedPool()
    buffer = pool.acquire(int(counts.sum()) * dtype.itemsize)
    reads = array.reads_of_ranges(starts, counts, places, dtype, index_limit=index_limit)
    done = run(reads, [buffer.address], num_threads, verify)
    pool.check()
    return buffer.array(dtype, int(counts.sum())).copy(), done


class Done(NamedTuple):
    """What a decoder has done."""

    n_bytes: int
    n_chunks: int
    n_decompressed: int
    ascending: bool


def run(reads, addresses, num_threads=1, verify="first"):
    with ThreadPoolExecutor(num_threads) as threads:
        decoder = Decoder(threads if num_threads > 1 else None, num_threads, verify=verify)
        ascending = reads.run(np.array(addresses, np.int64), decoder)
    counted = (Counter.BYTES_READ, Counter.CHUNKS, Counter.BYTES_DECOMPRESSED)
    n_bytes, n_chunks, n_decompressed = (int(decoder.counters.values[each]) for each in counted)
    return Done(n_bytes, n_chunks, n_decompressed, ascending)


class TestPlanOfRanges:
    @given(ascending_ranges, st.integers(1, 12), st.sampled_from([0, 2**31 - 3, 2**33 + 5, 2**52]))
    @example(ranges=(np.empty(0), np.empty(0, np.int64)), chunk=5, first=0)
    def test_covers_every_element_once(self, ranges, chunk, first):
        starts, counts = first + ranges[0].astype(np.int64), ranges[1]
        places = 1000 + np.arange(len(counts)) * 10_000
        (chunks, firsts, segments), joins = plan_ranges(starts, counts, places, chunk, 4)
        assert (np.diff(chunks) > 0).all()
        found: dict[Any, Any] = {}
        for k, number in enumerate(chunks.tolist()):
            stop = firsts[k + 1] if k + 1 < len(chunks) else len(segments)
            assert firsts[k] < stop
            for begin, n, address, within in segments[firsts[k] : stop].tolist():
                assert 0 <= begin < begin + n <= chunk
                assert within == (address - 1000) % 10_000 // 4
                found |= {address + 4 * i: number * chunk + begin + i for i in range(n)}
        expected = {
            place + 4 * i: start + i
            for start, n, place in zip(
                starts.tolist(), counts.tolist(), places.tolist(), strict=True
            )
            for i in range(n)
        }
        assert found == expected
        assert len(firsts) == len(chunks)
        assert (len(chunks) > 0) == (len(segments) > 0) == (len(expected) > 0)
        assert joins.tolist() == [
            address
            for address, element in expected.items()
            if element % chunk == 0 and address not in set(places.tolist())
        ]


class TestPlanOfRows:
    @given(
        st.sets(st.integers(0, 30)),
        st.integers(0, 9),
        st.integers(1, 12),
        st.integers(1, 12),
        st.sampled_from([0, 2**40]),
    )
    def test_covers_every_element_once(self, rows, n_columns, down, across, first):
        numbers = np.array(sorted(rows), np.int64) + first
        places = 1000 + np.arange(len(rows)) * 10_000
        chunks, firsts, segments = plan_rows(numbers, places, n_columns, (down, across), 8)
        grid = max(1, -(-n_columns // across))
        assert (np.diff(chunks) > 0).all()
        found: dict[Any, Any] = {}
        for k, number in enumerate(chunks.tolist()):
            stop = firsts[k + 1] if k + 1 < len(chunks) else len(segments)
            corner = number // grid * down, number % grid * across
            for begin, n, address, within in segments[firsts[k] : stop].tolist():
                row, column = corner[0] + begin // across, corner[1] + begin % across
                assert within == column
                assert column + n <= n_columns
                found |= {address + 8 * i: (row, column + i) for i in range(n)}
        expected = {
            place + 8 * column: (row, column)
            for row, place in zip(numbers.tolist(), places.tolist(), strict=True)
            for column in range(n_columns)
        }
        assert found == expected


class TestGroups:
    """No memory is taken for these."""

    def laid_out(self, n: int, n_columns: int = 10):
        lengths, order = np.array([n - 5, 5], np.int64), np.array([1, 0])
        shape, dtype = (n_columns,), np.dtype(np.float32)
        return lay_out("csr", lengths, order, np.array([0, 2]), row_shape=shape, dtype=dtype)

    def test_of_as_many_elements_as_int32_counts(self):
        n = 2**31 - 1
        groups, target, _ = self.laid_out(n)
        assert groups[0].pointers.dtype == target.dtypes[0] == np.int32
        assert groups[0].pointers.tolist() == [0, 5, n]
        assert target.destinations[0].tolist() == [20, 0]
        assert groups[0].data_start >= n * 4
        assert groups[0].n_bytes == groups[0].data_start + 4 * n

    def test_of_more(self):
        with pytest.raises(ParameterError, match=r"too many .* fewer than 2\^31; read fewer rows"):
            self.laid_out(2**31, 10)


GAP = 1 << 14  # bytes that are read in vain rather than left out
# Values, elements of a chunk, where chunks are, ranges, bytes that are read, chunks.
READS: dict[str, tuple[Any, int, Any, list[tuple[int, int]], int, int]] = {
    "neighbours at once": (np.arange(40), 10, [0, 80, 160, 240], [(0, 40)], 320, 4),
    "over a small gap": (np.arange(20), 10, [0, 80 + GAP], [(0, 20)], 160 + GAP, 2),
    "not over a larger one": (np.arange(20), 10, [0, 80 + GAP + 1], [(0, 20)], 160, 2),
    "cut to what is wanted": (
        *(np.arange(40), 10, [400, 0, 200, 100], [(3, 5), (8, 9), (25, 31)]),
        *((9 - 3 + 5 + 1) * 8, 3),
    ),
    "more than one read holds": (
        *(np.arange(900_000.0), 100_000, [k * 800_000 for k in range(9)], [(5, 850_000)]),
        *((850_000 - 5) * 8, 9),
    ),
    "chunks larger than a read": (
        *(np.random.default_rng(0).random(400_000), 200_000, [64, 1_600_064], [(0, 400_000)]),
        *(3_200_000, 2),
    ),
    "zeros where there is no chunk": (
        *(np.arange(1, 31, dtype=np.int16), 10, [0, -1, 20], [(5, 25)]),
        *(20, 3),
    ),
}


class TestReads:
    @pytest.mark.parametrize("name", READS)
    @pytest.mark.parametrize(("dtype", "num_threads"), [(None, 1), ("f8", 2), ("f4", 3)])
    def test_ranges(self, stored, name, dtype, num_threads):
        values, chunk, offsets, ranges, n_bytes, n_chunks = READS[name]
        elements, done = read(stored(values, chunk, offsets), ranges, dtype, num_threads)
        there = np.where(np.repeat(np.array(offsets) >= 0, chunk), values, 0)
        expected = np.concatenate([there[first:stop] for first, stop in ranges])
        assert np.array_equal(elements, expected.astype(dtype or values.dtype))
        assert (done.n_bytes, done.n_chunks) == (n_bytes, n_chunks)

    def test_go_back_and_forth_in_the_file(self, stored):
        values = np.arange(1000, dtype=np.int32)
        offsets = np.random.default_rng(0).permutation(200) * 20
        elements, done = read(stored(values, 5, offsets.tolist()), [(1, 999)], num_threads=3)
        assert np.array_equal(elements, values[1:999])
        assert done.n_chunks == 200

    @pytest.mark.parametrize("n_bytes", [1 << 60, 1 << 70])
    def test_into_memory_that_the_system_refuses(self, n_bytes):
        with pytest.raises(ParameterError, match=r"cannot allocate [\d,]+ bytes of memory for ro"):
            BufferPool().acquire(n_bytes)

    def test_of_nothing(self, stored):
        array = stored(np.arange(5, dtype=np.int8), 5, [0])
        assert read(array, [])[1].n_chunks == 0
        assert read(array, [(2, 2)])[1].n_chunks == 0
        for reads in (ChunkReads.none(), ChunkReads.concatenate([])):
            for num_threads in (1, 3):
                done = run(reads, [], num_threads)
                assert (done.n_bytes, done.n_chunks, done.ascending) == (0, 0, True)

    def test_of_one_piece(self, tmp_path):
        values = np.random.default_rng(0).random(100_000)
        file = FileOf(tmp_path / "piece", bytes(7) + values.tobytes())
        array = chunked(values, 1 << 14, Pieces.one(7, values.size, values.itemsize), file)
        elements, done = read(array, [(0, 1), (99_000, 100_000)])
        assert np.array_equal(elements, values[[0, *range(99_000, 100_000)]])
        assert done.n_bytes == 8008

    def test_of_several_arrays_together(self, stored):
        arrays = [
            stored(np.arange(n, dtype=dtype), 7, [k * 7 * 8 for k in range(-(-n // 7))], name=dtype)
            for n, dtype in ((50, "i8"), (20, "f8"), (33, "u8"))
        ]
        pool, parts, buffers = GuardedPool(), [], []
        for k, array in enumerate(arrays):
            n = array.shape[0]
            buffers.append(pool.acquire(n * 4))
            places = destination(np.array([k]), np.zeros(1, np.int64))
            every = np.zeros(1, np.int64), np.array([n], np.int64)
            parts.append(array.reads_of_ranges(*every, places, np.dtype(np.float32)))
        addresses = [buffer.address for buffer in buffers]
        done = run(ChunkReads.concatenate(parts), addresses, num_threads=2)
        pool.check()
        assert done.n_chunks == 8 + 3 + 5
        for array, buffer in zip(arrays, buffers, strict=True):
            n = array.shape[0]
            assert buffer.array(np.dtype(np.float32), n).tolist() == list(range(n))

    def test_are_over_when_an_error_comes_out(self, stored, monkeypatch):
        """Otherwise threads would write into memory that is let go."""
        array = stored(np.arange(40, dtype=np.int64), 1, range(0, 320, 8))  # more than one task
        reads = array.reads_of_ranges(
            np.zeros(1, np.int64), np.array([40], np.int64), np.zeros(1, np.int64), array.dtype
        )
        started, at_work = threading.Event(), threading.Event()

        def decode(*_):
            if not started.is_set():
                started.set()
                at_work.set()
                time.sleep(0.2)
                at_work.clear()
                return 0
            raise MemoryError

        monkeypatch.setattr("cellfeed.decode._kernels.decode", decode)
        with ThreadPoolExecutor(2) as threads, pytest.raises(MemoryError):
            reads.run(np.zeros(1, np.int64), Decoder(threads, 2))
        assert started.is_set()
        assert not at_work.is_set()


class TestIndices:
    @pytest.mark.parametrize("dtype", ["u1", "u4", "u8", "i4", "i8"])
    def test_outside_of_the_matrix(self, stored, dtype):
        values = np.array([0, 5, 9, 2, 3, 4], dtype)
        array = stored(values, 2, [0, 16, 32])
        assert read(array, [(0, 6)], np.int32, index_limit=10)[0].tolist() == values.tolist()
        limits = np.iinfo(dtype)
        expected = "elements 4 to 6 .*: have a column index outside of the matrix"
        for bad in (10, -1, 2**31 + 5, 2**32 + 5, 2**63 + 5):
            if limits.min <= bad <= limits.max:
                damaged = values.copy()
                damaged[4] = bad
                array = stored(damaged, 2, [0, 16, 32], name=f"with {bad}")
                with pytest.raises(FormatError, match=expected):
                    read(array, [(0, 6)], np.int32, index_limit=10)

    @given(
        st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8),
        st.integers(1, 7),
    )
    def test_that_ascend_in_every_row_or_not(self, new_folder, rows, chunk):
        values = np.array([column for row in rows for column in row], np.int32)
        bounds = np.cumsum([0, *map(len, rows)])
        firsts = np.arange(0, values.size, chunk)
        sizes = np.minimum(chunk, values.size - firsts) * values.itemsize
        flags = np.zeros(firsts.size, np.uint8)
        table = ChunkTable(firsts * values.itemsize, sizes, flags)
        file = FileOf(new_folder() / "indices", values.tobytes())
        array = chunked(values, chunk, table, file, "indices")
        ranges = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        elements, done = read(array, ranges, np.int32, index_limit=6)
        assert elements.tolist() == values.tolist()
        assert done.ascending == all((np.diff(row) > 0).all() for row in rows)


class TestCasts:
    @pytest.mark.parametrize("source", NUMBERS)
    @pytest.mark.parametrize("target", [each for each in NUMBERS if np.dtype(each) != np.bool_])
    def test_are_those_of_numpy(self, stored, source, target):
        values = numbers_of(np.dtype(source), np.dtype(target))
        array = stored(values, len(values), [3])  # at no multiple of their size
        assert can_cast(array.dtype, np.dtype(target))
        with np.errstate(all="ignore"):
            expected = values.astype(target)
        np.testing.assert_array_equal(read(array, [(0, len(values))], target)[0], expected)

    @pytest.mark.parametrize("dtype", [">f4", "g", "c8", "S3"])
    def test_that_are_left_to_numpy(self, dtype):
        assert not can_cast(np.dtype("f4"), np.dtype(np.bool_))
        assert not can_cast(np.dtype(dtype), np.dtype("f4"))
        assert not can_cast(np.dtype("f4"), np.dtype(dtype))
        assert can_cast(np.dtype(dtype), np.dtype(dtype))
        assert cast_address(np.dtype(dtype), np.dtype(dtype)) == 0


def numbers_of(source, target):
    """Return values of all kinds, but for those whose cast is undefined."""
    rng = np.random.default_rng(0)
    if source == np.bool_:
        return np.array([False, True] * 20)
    if source.kind in "iu":
        limits = np.iinfo(source)
        odd = [0, 1, limits.min, limits.max, limits.max - 1, limits.max // 2, limits.min // 2 + 1]
        drawn = rng.integers(limits.min, limits.max, 200, source, endpoint=True)
        return np.concatenate([np.array(odd, source), drawn])
    whole = [0, -0.0, 1, 1.5, 127, 127.9, 32767]
    if target.kind == "f":
        real = np.finfo(source)
        whole += [-1, real.max, real.min, real.tiny, np.inf, -np.inf, np.nan, 1e-40]
    elif target.itemsize < 8 and target != np.int32:
        whole += [-1, -1.5, 128, 255, 256, 300, 65535, 65536, 2.0**31 - 128, -(2.0**31)]
    return np.array(whole * 5, source)


class TestPlace:
    @given(
        lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
        gaps=st.lists(st.integers(0, 40), min_size=6, max_size=6),
        value=st.sampled_from(["u1", "f4", "i8"]),
        streamed=st.booleans(),
    )
    def test_copies_what_it_should_and_nothing_beside_it(self, lengths, gaps, value, streamed):
        dtype = np.dtype(value)
        values = np.random.default_rng(0).integers(1, 100, sum(lengths)).astype(dtype)
        counts = np.array(lengths, np.int64)
        starts = np.cumsum(counts) - counts
        targets = starts + np.cumsum(gaps[: counts.size])
        room = np.zeros(int(counts.sum()) + sum(gaps) + 40, dtype)
        expected = room.copy()
        for start, count, target in zip(starts, counts, targets, strict=True):
            expected[target : target + count] = values[start : start + count]
        addresses = room.ctypes.data + targets * dtype.itemsize
        array = np.zeros(fields.N_ARRAY_COLUMNS, np.int64)
        array[[fields.ITEMSIZE, fields.OUT_ITEMSIZE]] = dtype.itemsize
        array[fields.STREAMED], array[fields.INDEX_LIMIT] = streamed, -1
        report = np.zeros(fields.N_REPORTS, np.int64)
        segments = np.stack([starts, counts, addresses, np.zeros_like(starts)], axis=1)
        kernels.place(values.ctypes.data, segments, array, report, 0)
        assert report[fields.FAILURE] == 0
        assert np.array_equal(room, expected)
