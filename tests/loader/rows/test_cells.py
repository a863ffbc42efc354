"""Cells in NumPy and SciPy, and those that come with them."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import Cells

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
