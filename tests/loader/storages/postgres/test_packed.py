"""Rows that are packed one by one come out as they were, and damage is noticed."""

import contextlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numcodecs import Zstd

from cellfeed.storages.postgres._packed import PackedRowError, pack_row, unpack_rows

DTYPES = ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?"]
N_COLUMNS = 70_000


@st.composite
def rows(draw, dtype, n_columns):
    """Columns and values: small integers, any bits, or integers at the ends of what is narrow."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    n = draw(st.integers(0, 40))
    columns = np.sort(random.choice(n_columns, n, replace=False))
    kind = draw(st.sampled_from(["small", "any", "ends"]))
    if kind == "small" or dtype == np.bool_:
        values = random.integers(0, 3, n).astype(dtype)
    elif kind == "any":
        values = random.integers(0, 256, n * dtype.itemsize).astype(np.uint8).view(dtype)
    else:
        ends = np.array([0, 255, 256, 65535, 65536, 2**32 - 1, 2**32], np.float64)
        with np.errstate(all="ignore"):
            values = np.array(ends[random.integers(0, draw(st.integers(1, 7)), n)]).astype(dtype)
    return columns, values


@given(st.sampled_from(DTYPES).map(np.dtype), st.data())
def test_sparse_rows(dtype, data):
    n_columns = data.draw(st.sampled_from([41, 256, 257, 65_536, N_COLUMNS, 2**31]))
    given_rows = data.draw(st.lists(rows(dtype, min(n_columns, N_COLUMNS)), max_size=6))
    packed = [pack_row(own, values, n_columns) for own, values in given_rows]
    indptr, columns, values = unpack_rows(packed, dtype, n_columns)
    assert indptr.tolist() == [0, *np.cumsum([each.size for each, _ in given_rows]).tolist()]
    assert columns.dtype == np.int32
    assert values.dtype == dtype
    for k, (some, others) in enumerate(given_rows):
        here = slice(indptr[k], indptr[k + 1])
        assert columns[here].tolist() == some.tolist()
        assert values[here].tobytes() == others.tobytes()  # the sign of 0 too, and what NaN has


@given(st.sampled_from(DTYPES).map(np.dtype), st.data())
def test_dense_rows(dtype, data):
    n_columns = data.draw(st.integers(0, 30))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    dense = random.integers(0, 256, (5, n_columns * dtype.itemsize)).astype(np.uint8)
    dense = (dense % 2).view(np.bool_) if dtype == np.bool_ else dense.view(dtype)
    packed = [pack_row(None, each, n_columns) for each in dense]
    _, columns, values = unpack_rows(packed, dtype, n_columns, is_dense=True)
    assert columns.size == 0
    assert values.tobytes() == dense.tobytes()


def test_counts_take_a_byte_each_whatever_their_dtype():
    random = np.random.default_rng(0)
    columns = np.sort(random.choice(60_000, 2000, replace=False))
    counts = random.poisson(0.5, 2000) + 1
    sizes = {
        len(pack_row(columns, counts.astype(dtype), 60_000)) for dtype in ("f4", "f8", "i8", "u1")
    }
    assert len(sizes) == 1
    assert sizes.pop() < 2 * 2000


ROW = pack_row(np.array([3, 700, 60_000]), np.array([1.5, 2, -3], np.float32), N_COLUMNS)


@given(st.integers(0, len(ROW) - 1), st.integers(1, 255))
@example(4, 1 << 4)
def test_a_changed_byte_changes_no_value(at, change):
    damaged = bytearray(ROW)
    damaged[at] ^= change
    if (at, change) == (4, 1 << 4):  # the bit of a frame's header that zstd leaves unused
        _, indices, values = unpack_rows([bytes(damaged)], np.dtype("f4"), N_COLUMNS)
        assert indices.tolist() == [3, 700, 60_000]
        assert values.tolist() == [1.5, 2, -3]
        return
    with pytest.raises(PackedRowError) as raised:
        unpack_rows([ROW, bytes(damaged)], np.dtype("f4"), N_COLUMNS)
    assert raised.value.row == 1


@given(st.binary(max_size=40), st.sampled_from([3, 300, N_COLUMNS, 2**31]), st.booleans())
def test_columns_are_in_range_whatever_the_row_contains(content, n_columns, is_dense):
    rows = [pack_row(np.arange(3), np.ones(3), n_columns), bytes(Zstd().encode(content))]
    with contextlib.suppress(PackedRowError):
        options = np.dtype("f8"), n_columns
        indptr, indices, values = unpack_rows(rows[is_dense:], *options, is_dense=is_dense)
        assert indptr[-1] == values.size
        assert indices.size == (0 if is_dense else values.size)
        assert ((indices >= 0) & (indices < n_columns)).all()


@given(st.binary(max_size=80))
def test_anything_else_is_damage(content):
    with pytest.raises(PackedRowError):
        unpack_rows([content], np.dtype("f4"), N_COLUMNS)


def test_a_row_of_another_element():
    dense = pack_row(None, np.ones(3, np.float32), 3)
    for packed, is_dense, n_columns in ((ROW, True, 3), (dense, False, 3), (ROW, False, 60_000)):
        with pytest.raises(PackedRowError):
            unpack_rows([packed], np.dtype("f4"), n_columns, is_dense=is_dense)
