"""Compiled functions of elements in memory, each against NumPy or h5py."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.warm import python as warm

from cellfeed._decode import _kernels as kernels
from cellfeed.testing import GuardedPool


def fuzz(path: Path, *arguments: object) -> str:
    """Run the fuzzer in a process of its own, so that a crash of it is told."""
    fuzzer = Path(__file__).parents[1] / "fuzzing.py"
    return warm.output_of("-W", "error", fuzzer, *arguments, cwd=path)


class TestFilters:
    @given(
        hnp.arrays(
            np.uint8,
            st.integers(1, 600),
            elements=st.sampled_from([0, 1, 2, 3, 255]) | st.integers(0, 255),
        ),
        st.integers(1, 40),
    )
    def test_lzf_as_h5py_writes_it(self, part, repeats):
        values = np.tile(part, repeats)
        with h5py.File("lzf", "w", driver="core", backing_store=False) as file:
            dataset = file.create_dataset("x", data=values, chunks=values.shape, compression="lzf")
            mask, stored = dataset.id.read_direct_chunk((0,))
        if mask:
            return
        source, target = np.frombuffer(stored, np.uint8), GuardedPool()
        for room, expected in ((0, values.size), (100, values.size), (-1, -1)):
            buffer = target.acquire(values.size + room)
            capacity = values.size + room
            arguments = (source.ctypes.data, source.size, buffer.address, capacity)
            n = kernels.lzf(*arguments, values.size + 1)
            assert n == expected
            if room >= 0:
                decoded = buffer.array(np.dtype(np.uint8), values.size)
                assert np.array_equal(decoded, values)
        target.check()

    @pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
    @pytest.mark.parametrize("n_bytes", [0, 5, 48, 51, 4801])
    def test_unshuffle(self, itemsize, n_bytes):
        values = np.random.default_rng(0).integers(0, 256, n_bytes).astype(np.uint8)
        n = n_bytes // itemsize
        apart = values[: n * itemsize].reshape(n, itemsize).T.reshape(-1)
        stored = np.concatenate([apart, values[n * itemsize :]])
        pool = GuardedPool()
        buffer = pool.acquire(n_bytes)
        kernels.unshuffle(stored.ctypes.data, n_bytes, buffer.address, itemsize)
        pool.check()
        assert np.array_equal(buffer.array(np.dtype(np.uint8), n_bytes), values)

    def test_damage_stays_within_memory(self, tmp_path):
        """Each piece of memory ends where the process may not read or write."""
        outcome = fuzz(tmp_path, "chunks", 1000)
        for line in outcome.splitlines():
            codec, result = line.split(": ")
            assert "told" in result
            if codec in ("zlib", "gzip"):  # which have checksums
                assert "other values" not in result
        assert len(outcome.splitlines()) == 9


class TestDensify:
    @pytest.mark.parametrize("index", ["i4", "i8"])
    @pytest.mark.parametrize("value", ["u1", "u2", "u4", "u8"])
    def test_fills_every_element(self, index, value):
        rng = np.random.default_rng(0)
        expected = (rng.integers(1, 200, (9, 7)) * (rng.random((9, 7)) < 0.4)).astype(value)
        rows, columns = np.nonzero(expected)
        pointers = np.searchsorted(rows, np.arange(10)).astype(index)
        dense = np.full((9, 7), 255, value)
        kernels.densify(pointers, columns.astype(index), expected[rows, columns], dense)
        assert np.array_equal(dense, expected)

    @given(
        n_rows=st.integers(1, 9),
        n_vars=st.sampled_from([1, 700, 4095, 4096, 4097, 9001]),
        density=st.sampled_from([0.01, 0.3, 1.0]),
        offset=st.integers(0, 9),
        value=st.sampled_from(["u1", "u2", "u4", "u8"]),
    )
    def test_of_many_tiles_wherever_it_begins(self, n_rows, n_vars, density, offset, value):
        random = np.random.default_rng(n_vars)
        is_stored = random.random((n_rows, n_vars)) < density
        expected = np.where(is_stored, random.integers(1, 200, is_stored.shape), 0).astype(value)
        rows, columns = np.nonzero(expected)
        pointers = np.searchsorted(rows, np.arange(n_rows + 1)).astype(np.int32)
        room = np.full(offset + expected.size + 9, 255, value)
        dense = room[offset : offset + expected.size].reshape(expected.shape)
        kernels.densify(pointers, columns.astype(np.int32), expected[rows, columns], dense)
        assert np.array_equal(dense, expected)
        assert (room[:offset] == 255).all()
        assert (room[-9:] == 255).all()

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (5, 3)])
    def test_of_nothing(self, shape):
        pointers = np.zeros(shape[0] + 1, np.int32)
        nothing = np.empty(0, np.int32), np.empty(0, np.uint32)
        dense = np.full(shape, 255, np.uint32)
        kernels.densify(pointers, *nothing, dense)
        assert not dense.any()
