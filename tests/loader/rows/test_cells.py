"""Cells in NumPy and SciPy, and those that come with them."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import Cells
from cellfeed.rows import CsrRows

N, K = 6, 3


def cells_of(rows: np.ndarray, **others: Cells) -> Cells:
    X = np.tile(rows[:, None], 4)
    return Cells(
        {"X": sp.csr_array(X), "obsm/X": X}, {"row": rows}, rows, rows.astype(str), **others
    )


def beside(rows: np.ndarray) -> np.ndarray:
    """The three others of each cell."""
    return (10 * rows[:, None] + np.arange(K)).ravel()


def assert_rows(cells: Cells, rows: np.ndarray) -> None:
    assert cells.obs_names is not None
    for each in (cells.rows, cells.obs["row"], cells["obsm/X"][:, 0], cells.X.toarray()[:, 1]):
        assert each.tolist() == rows.tolist()
    assert cells.obs_names.tolist() == rows.astype(str).tolist()


@pytest.mark.parametrize("name", ["controls", "neighbors"])
@given(
    which=st.lists(st.integers(-N, N - 1), max_size=9).map(lambda each: np.array(each, np.intp))
    | st.lists(st.booleans(), min_size=N, max_size=N).map(np.array)
    | st.slices(N)
)
def test_those_that_are_selected_keep_their_others(name: str, which: Any) -> None:
    rows = np.arange(100, 100 + N)
    others: dict[str, Any] = {name: cells_of(beside(rows))}
    found = cells_of(rows, **others)[which]
    assert_rows(found, rows[which])
    assert_rows(getattr(found, name), beside(rows[which]))
    assert set(found.companions) == {name}


@given(
    columns=st.lists(st.integers(-1, 11), max_size=12, unique=True),
    n_rows=st.integers(0, 5),
    index=st.sampled_from(["u1", "i4", "i8", "u8"]),
    dtype=st.sampled_from(["f2", "f4", "i8"]),
)
def test_sparse_rows_get_the_columns_of_a_collection(columns, n_rows, index, dtype):
    own = np.array([*columns, -1, -1], np.int32)  # the last two are left out
    random = np.random.default_rng(len(columns))
    dense = random.integers(-3, 3, (n_rows, own.size)).astype(dtype)
    stored = sp.csr_array(dense.astype("f8"))
    indices, data = stored.indices.astype(index), stored.data.astype(dtype)
    found = CsrRows(stored.indptr, indices, data, own.size).with_columns(own, 12)
    expected = np.zeros((n_rows, 12), dtype)
    expected[:, own[own >= 0]] = dense[:, own >= 0]
    assert found.shape == (n_rows, 12)
    assert found.data.dtype == dtype
    assert np.array_equal(found.to_scipy().toarray(), expected)


@pytest.mark.parametrize(
    ("column", "reason"),
    [(-1, r"a column index is outside \[0, 3\)"), (3, r"outside \[0, 3\)"), (1, "must have none")],
)
def test_elements_that_cannot_be_are_told(column, reason):
    rows = CsrRows(np.array([0, 2]), np.array([0, column]), np.ones(2, "f4"), 3)
    with pytest.raises(ValueError, match=reason):
        rows.with_columns(np.array([4, -2, -1], np.int32), 9)
