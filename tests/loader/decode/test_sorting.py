"""Columns of sparse rows are put in order, as NumPy's stable sort does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed._decode import kernels, select_columns


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


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
@given(rows=rows())
def test_rows_are_sorted(rows, index, dtype):
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(index)
    indices = np.concatenate([*rows, []]).astype(index)
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
def test_selected_columns_are_sorted(rows, seed):
    """Slots follow the columns."""
    rows = [[column % 3_000 for column in row] for row in rows]
    column_map = np.random.default_rng(seed).permutation(3_000).astype(np.int32)
    column_map[::7] = -1
    lengths = np.array([len(row) for row in rows])
    selected = select_columns(np.concatenate([*rows, []]).astype(np.int64), lengths, column_map)
    for number, row in enumerate(rows):
        own = slice(selected.starts[number], selected.starts[number + 1])
        mapped = column_map[np.array(row, int)]
        places = np.flatnonzero(mapped >= 0)
        assert selected.columns[own].tolist() == sorted(mapped[places].tolist())
        positions, slots = selected.entries[own] >> 32, selected.entries[own] & 0xFFFFFFFF
        assert positions.tolist() == places.tolist()
        assert selected.columns[own][slots].tolist() == mapped[places].tolist()
        assert sorted(slots.tolist()) == list(range(len(places)))
