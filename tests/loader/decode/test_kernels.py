"""Compiled functions of elements in memory, each against NumPy."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.guarded import GuardedPool
from tests.warm import python as warm

from cellfeed.bytes import Location
from cellfeed.decode import Decoder, can_cast, kernels
from cellfeed.sources._in_memory import array_in_memory


def fuzz(path: Path, *arguments: object) -> str:
    """Run the fuzzer in a process of its own, so that a crash of it is told."""
    fuzzer = Path(__file__).parents[1] / "fuzzing.py"
    return warm.output_of("-W", "error", fuzzer, *arguments, cwd=path)


class TestFilters:
    @pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
    @pytest.mark.parametrize("n_bytes", [0, 5, 48, 51, 4801])
    def test_unshuffle(self, itemsize, n_bytes):
        values = np.random.default_rng(0).integers(0, 256, n_bytes).astype(np.uint8)
        n = n_bytes // itemsize
        apart = values[: n * itemsize].reshape(n, itemsize).T.reshape(-1)
        stored = np.concatenate([apart, values[n * itemsize :]])
        pool = GuardedPool()
        buffer = pool.acquire(n_bytes)
        arguments = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        unshuffle = ctypes.CFUNCTYPE(None, *arguments)(kernels.unshuffle.address)
        unshuffle(stored.ctypes.data, n_bytes, buffer.address, itemsize)
        pool.check()
        assert np.array_equal(buffer.array(np.dtype(np.uint8), n_bytes), values)

    @pytest.mark.process
    @pytest.mark.slow
    def test_damage_stays_within_memory(self, tmp_path):
        """Each piece of memory ends where the process may not read or write."""
        outcome = fuzz(tmp_path, "chunks", 1000)
        for line in outcome.splitlines():
            codec, result = line.split(": ")
            assert "told" in result
            if codec in ("zlib", "gzip"):  # which have checksums
                assert "other values" not in result
        assert len(outcome.splitlines()) == 9


@given(
    n_rows=st.integers(0, 9),
    n_vars=st.sampled_from([0, 1, 7, 700, 4095, 4096, 4097, 9001]),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    offset=st.integers(0, 9),
    value=st.sampled_from(["u1", "u2", "u4", "u8"]),
)
def test_densify(n_rows, n_vars, density, offset, value):
    """Every element is filled, of many tiles, wherever the memory begins, and nothing beside."""
    random = np.random.default_rng(n_vars)
    is_stored = random.random((n_rows, n_vars)) < density
    expected = np.where(is_stored, random.integers(1, 200, is_stored.shape), 0).astype(value)
    rows, columns = np.nonzero(expected)
    pointers = np.searchsorted(rows, np.arange(n_rows + 1)).astype("i4")
    room = np.full(offset + expected.size + 9, 255, value)
    dense = room[offset : offset + expected.size].reshape(expected.shape)
    kernels.densify(pointers, columns.astype("i4"), expected[rows, columns], dense)
    assert np.array_equal(dense, expected)
    assert (room[:offset] == 255).all()
    assert (room[-9:] == 255).all()


def every_half_and_its_neighbours():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    bits = halves.view(np.uint32).astype(np.int64)
    apart = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF]  # ties and what lies beside them
    near = np.concatenate([bits + sign * each for each in apart for sign in (1, -1)])
    return np.clip(near, 0, (1 << 32) - 1).astype(np.uint32).view(np.float32)


def every_exponent():
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("values", [every_half_and_its_neighbours(), every_exponent()])
def test_it_is_rounded_as_numpy_does(values):
    assert can_cast(values.dtype, np.dtype(np.float16))
    address = kernels.cast_address(values.dtype, np.dtype(np.float16))
    cast = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
    found = np.empty(values.size, np.float16)
    cast(values.ctypes.data, found.ctypes.data, values.size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    is_nan = np.isnan(values)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])


@st.composite
def rows(draw):
    """Columns of some rows: near each other or far apart, the same or distinct, in any order."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 40))
        first = draw(st.sampled_from([0, 63, 1_000]))
        last = first + draw(st.sampled_from([1, 70, 500, 20_000, 2**31 - 2_000]))
        columns = st.integers(first, last)
        unique = draw(st.booleans()) and n < last - first
        found.append(draw(st.lists(columns, min_size=n, max_size=n, unique=unique)))
    return found


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
@given(rows=rows())
def test_rows_are_sorted(rows, dtype):
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype("i4")
    indices = np.concatenate([*rows, []]).astype("i4")
    data = np.arange(indices.size).astype(dtype)
    expected = [np.argsort(np.array(row, np.int64), kind="stable") for row in rows]
    order = np.concatenate([each + start for each, start in zip(expected, indptr, strict=False)])
    order = order.astype(int)
    wanted = indices[order], data[order]
    distinct = kernels.sort_rows(indptr, indices, data.view(np.uint8), data.itemsize)
    assert distinct == all(len(set(row)) == len(row) for row in rows)
    assert np.array_equal(indices, wanted[0])
    assert np.array_equal(data, wanted[1])


@given(rows=rows(), seed=st.integers(0, 9))
def test_selected_elements_keep_their_order(rows, seed):
    rows = [[column % 3_000 for column in row] for row in rows]
    column_map = np.random.default_rng(seed).permutation(3_000).astype(np.int32)
    column_map[::7] = -1
    lengths = np.array([len(row) for row in rows], np.int64)
    indices = np.concatenate([*rows, []]).astype(np.int64)
    array = array_in_memory(Location("memory://rows"), "indices", indices)
    starts = np.cumsum(lengths) - lengths
    reads = array.reads_selecting(starts, lengths, column_map=column_map)
    selected = reads.select(lengths, Decoder())
    ascending = True
    for number, row in enumerate(rows):
        own = slice(selected.starts[number], selected.starts[number + 1])
        mapped = column_map[np.array(row, int)]
        places = np.flatnonzero(mapped >= 0)
        assert selected.columns[own].tolist() == mapped[places].tolist()
        assert selected.positions[own].tolist() == places.tolist()
        ascending &= bool((np.diff(mapped[places]) > 0).all())
    assert selected.ascending == ascending
