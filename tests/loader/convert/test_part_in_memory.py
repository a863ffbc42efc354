"""Rows of a part come out in another order with the values that went in, however they are held."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import random_csr

from cellfeed._convert._preshuffle._elements import CsrPart

COUNTS = [0.0, 1.0, 2.0, 255.0, 65_535.0]
OTHERS = [-0.0, -1.0, 0.5, 65_536.0, np.nan, np.inf]
N_VARS = 7


def piece(values: list[float], dtype: str, rng: np.random.Generator) -> Any:
    rows: Any = random_csr((4, N_VARS), 0.5, rng, np.float64)
    rows.sort_indices()
    rows.data = rng.choice(np.array(values, dtype), rows.nnz)
    return rows


def part_of(pieces: list[Any], n_expected: int, *, counts: bool) -> CsrPart:
    n_rows = sum(each.shape[0] for each in pieces)
    dtypes = pieces[0].data.dtype, np.dtype(np.uint8)
    part = CsrPart(n_rows, n_expected, *dtypes, counts=counts)
    for each in pieces:
        part.append(each)
    return part


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@given(
    seed=st.integers(0, 1 << 30),
    are_counts=st.lists(st.booleans(), min_size=1, max_size=4),
    n_expected=st.integers(0, 80),
    counts=st.booleans(),
)
def test_values_are_those_that_went_in(dtype, seed, are_counts, n_expected, counts):
    rng = np.random.default_rng(seed)
    others = [-1.0, 65_536.0] if dtype == "int32" else OTHERS
    pieces = [piece(COUNTS if each else COUNTS + others, dtype, rng) for each in are_counts]
    X = sp.vstack(pieces, format="csr")
    order = rng.permutation(X.shape[0])
    found = part_of(pieces, n_expected, counts=counts).shuffled(order)
    expected = X[order]
    assert found.pointer.tolist() == expected.indptr.tolist()
    assert found.dtype("data") == X.dtype
    data = found.elements("data", 0, found.n_elements).astype(X.dtype)
    assert data.tobytes() == expected.data.tobytes()  # also the sign of 0
    indices = found.elements("indices", 0, found.n_elements)
    assert indices.tolist() == expected.indices.tolist()
    are_all = bool(np.isin(X.data, COUNTS).all() and not np.copysign(1, X.data).min(initial=1) < 0)
    largest = int(X.data.max(initial=0)) if counts and are_all else None
    assert found.largest_count == largest


def test_counts_take_two_bytes_until_there_are_others():
    rng = np.random.default_rng(0)
    pieces = [piece(COUNTS, "float32", rng), piece([0.5], "float32", rng)]
    for n, dtype in ((1, "uint16"), (2, "float32")):
        found = part_of(pieces[:n], 20, counts=True).shuffled(np.arange(4 * n))
        assert found.elements("data", 0, found.n_elements).dtype == dtype
