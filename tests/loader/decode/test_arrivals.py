"""Chunks are decoded as their bytes arrive, in whatever order and pieces that is."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import FormatError
from cellfeed._bytes._tables import CachedTables
from cellfeed._decode import Decoder, hdf5_array, hdf5_tables
from cellfeed.sources import Arrival, ByteStore, Location

VALUES = np.random.default_rng(0).poisson(2, 3000).astype(np.int32)
N_CHUNKS = 10


class Arriving(ByteStore):
    """A file in memory whose ranges arrive when a test lets them, each with those of its piece."""

    def __init__(self, content, piece_of):
        self.content = content
        self.piece_of = np.array(piece_of)
        self.here = [Future[None]() for _ in range(max(piece_of) + 1)]
        self.read = []

    def location_of(self, file):
        return Location("memory://bucket/x")

    def sizes(self, files):
        return np.full(len(files), len(self.content))

    def arrivals(self, files, offsets, sizes):
        assert len(files) == len(self.piece_of)
        return [
            Arrival(np.flatnonzero(self.piece_of == piece), here, self)
            for piece, here in enumerate(self.here)
            if (self.piece_of == piece).any()
        ]

    def read_ranges(self, files, offsets, sizes):
        ranges = [*zip(offsets.tolist(), sizes.tolist(), strict=True)]
        self.read += ranges
        return [self.content[first : first + n] for first, n in ranges]


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("arriving") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(300,), compression="gzip")
    return path.read_bytes(), path


def reads_of(content, piece_of):
    """Return a store, what reads two values of each chunk, and where these go."""
    bytes_of_file, path = content
    store = Arriving(bytes_of_file, piece_of)
    with h5py.File(path) as file:
        tables = CachedTables(str(path), "x", lambda: None)
        found = hdf5_tables(file["x"], lambda: tables)
        assert found is not None
        array: Any = hdf5_array(found, "x", store, lost_is_zero=False)
    out = np.full(2 * N_CHUNKS, -1, np.int32)
    starts = np.arange(N_CHUNKS, dtype=np.int64) * 300
    counts, places = np.full(N_CHUNKS, 2), np.arange(N_CHUNKS, dtype=np.int64) * 8
    return store, array.reads_of_ranges(starts, counts, places, out.dtype), out


EXPECTED = VALUES.reshape(N_CHUNKS, 300)[:, :2].ravel()


@given(
    st.lists(st.integers(0, 4), min_size=N_CHUNKS, max_size=N_CHUNKS),
    st.permutations(range(5)),
    st.integers(0, 5),
)
def test_any_order(content, piece_of, order, n_before):
    store, reads, out = reads_of(content, piece_of)
    order = [piece for piece in order if piece < len(store.here)]

    def arrive(pieces):
        for piece in pieces:
            store.here[piece].set_result(None)
            time.sleep(0)

    arrive(order[:n_before])
    late = threading.Thread(target=arrive, args=(order[n_before:],))
    with ThreadPoolExecutor(2) as threads:
        late.start()
        done = reads.run(np.array([out.ctypes.data]), Decoder(threads, 2))
    late.join()
    assert np.array_equal(out, EXPECTED)
    assert done.n_chunks == N_CHUNKS
    assert len(store.read) == len(set(store.read)) == N_CHUNKS
    assert done.n_bytes == sum(n for _, n in store.read)


def test_what_is_here_is_decoded_while_the_rest_is_awaited(content):
    store, reads, out = reads_of(content, [1] * 5 + [0] + [2] * 4)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(reads.run, np.array([out.ctypes.data]))
        store.here[0].set_result(None)
        until = time.monotonic() + 600
        while out[10] == -1 and time.monotonic() < until:
            time.sleep(0.001)
        assert np.array_equal(out[10:12], EXPECTED[10:12])
        assert (out[:10] == -1).all()
        assert (out[12:] == -1).all()
        assert not done.done()
        store.here[2].set_result(None)
        store.here[1].set_result(None)
        done.result()
    assert np.array_equal(out, EXPECTED)


def test_damage_names_the_chunk_that_is_damaged(content):
    store, reads, _ = reads_of(content, [*range(N_CHUNKS)][::-1])
    for here in store.here:
        here.set_result(None)
    wanted = reads.owners[0].describe(3)
    first, size = (int(each) for each in wanted.split("bytes ")[1][:-1].split(" to "))
    damaged = bytearray(store.content)
    damaged[first + 2 : size] = bytes(size - first - 2)
    store.content = bytes(damaged)
    out = np.empty(2 * N_CHUNKS, np.int32)
    with pytest.raises(FormatError, match="cannot be decompressed") as error:
        reads.run(np.array([out.ctypes.data]))
    assert str(error.value).startswith(wanted)
